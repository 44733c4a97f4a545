"""The house: layers import only downwards, files stay small and say in one sentence what they are."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "optimum_trn"
LAYERS = [
    "errors",
    "hardware",
    "cost",
    "report",
    "device",
    "parallel",
    "patching",
    "models",
    "store",
    "checkpoint",
    "modeling",
    "trainer",
    "planning",
    "elastic",
    "pool",
    "cli",
]
FILES = sorted(PACKAGE.rglob("*.py"))
MAXIMUM_LINES = 500
FORBIDDEN_NAMES = {"utils", "misc", "common", "helpers"}


def layer_of(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py") if parts else "__init__"


def imported_layers(tree: ast.Module, file: Path) -> set[tuple[str, int]]:
    """The layers of this package that a file imports, with the line of the import."""
    package_parts = file.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] == "optimum_trn"]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = ("optimum_trn", *package_parts)[: len(package_parts) + 2 - node.level]
                prefix = ".".join((*base, node.module) if node.module else base)
            else:
                prefix = node.module or ""
            if prefix.split(".")[0] == "optimum_trn":
                names = [f"{prefix}.{a.name}" if prefix == "optimum_trn" else prefix for a in node.names]
        for name in names:
            parts = name.split(".")
            if len(parts) > 1:
                found.add((parts[1], node.lineno))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_file_is_small_named_for_its_concept_and_imports_only_downwards(file):
    text = file.read_text()
    assert len(text.splitlines()) <= MAXIMUM_LINES, f"{file} has more than {MAXIMUM_LINES} lines: split it"
    assert file.stem not in FORBIDDEN_NAMES, f"{file}: name the concept"
    if file == PACKAGE / "__init__.py":
        return  # re-exports every layer
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree)
    assert docstring, f"{file} has no docstring"
    assert docstring.split("\n")[0].endswith((".", ":")), f"{file}: the docstring's first line is one sentence"
    own = layer_of(file.relative_to(PACKAGE).parts)
    assert own in LAYERS, f"{own} is not a layer of the house: {LAYERS}"
    for other, line in imported_layers(tree, file):
        if other in LAYERS:
            assert LAYERS.index(other) <= LAYERS.index(own), f"{file}:{line}: {own} imports {other}, which is above it"
