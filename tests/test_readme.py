"""The README stays true: its table of models is the registry, and its commands exist."""

import re
from pathlib import Path

from optimum_trn.patching import supported_models

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_models_is_the_registry():
    section = README.split("## Supported models")[1].split("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    assert sorted(re.findall(r"`([a-z0-9_-]+)`", table)) == sorted(supported_models())


def test_every_command_and_link_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE):
        assert target in targets, f"the README names `make {target}`"
    for path in re.findall(r"(?:pytest |python |\]\()([A-Za-z_./]+(?:\.py|\.md|tests/[a-z_/]+))", README):
        assert (ROOT / path).exists(), f"the README names {path}"
