"""Runs transformers' own Trainer tests with this package's Trainer on one simulated core, and with the stock one.

`python -m tests.conformance.trainer DIRECTORY [FILE ...]`, where DIRECTORY is a checkout of huggingface/transformers at
the tag of the installed version; FILEs are names below its tests/trainer (all that need one process, if none is given).
"""

import argparse
import importlib.metadata
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.conformance.suite import REPOSITORY, Outcome, call, read_report

EXPECTATIONS = Path(__file__).with_name("trainer_expectations.yaml")
SEVERAL_PROCESSES = ("distributed", "fsdp", "tpu", "context_parallel")
STATUSES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Expectations:
    """The expectations file: why tests fail that pass with the stock Trainer, by `file::Class::test`."""

    version: str
    instance: str
    reasons: Mapping[str, str]
    failed: Mapping[str, str]


def read(path: Path = EXPECTATIONS) -> Expectations:
    """What the file says; raises KeyError for a reason that its table lacks."""
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    for reason in data["failed"].values():
        data["reasons"][reason]
    return Expectations(data["transformers"], data["instance"], data["reasons"], data["failed"])


def check_source(directory: Path, expectations: Expectations) -> None:
    """Raises RuntimeError where the directory has no such tests, or another transformers is installed."""
    installed = importlib.metadata.version("transformers")
    if installed != expectations.version:
        raise RuntimeError(
            f"{EXPECTATIONS.name} holds what transformers {expectations.version} says, and {installed} is installed: "
            "write that into the file, run the tests of that tag and look at every difference."
        )
    if not (directory / "tests" / "trainer" / "trainer_test_utils.py").exists():
        raise RuntimeError(
            f"{directory} has no tests/trainer/trainer_test_utils.py: give a checkout, `git clone --depth 1 --branch "
            f"v{installed} https://github.com/huggingface/transformers`."
        )


def files_of(directory: Path) -> list[str]:
    """The test files that need one process."""
    names = sorted(path.name for path in (directory / "tests" / "trainer").glob("test_trainer*.py"))
    return [name for name in names if not any(word in name for word in SEVERAL_PROCESSES)]


def outcomes_of(directory: Path, name: str, instance: str | None) -> dict[str, Outcome]:
    """What each test of a file says, with the stock Trainer on the CPU if there is no instance.

    Raises RuntimeError where the process dies before it reports, or hangs.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OPTIMUM_TRN_", "PYTEST_"))}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    if instance is not None:
        environment |= {"OPTIMUM_TRN_AUTOLOAD": "1", "OPTIMUM_TRN_INSTANCE": instance}
        environment["TRANSFORMERS_TEST_DEVICE"] = "neuron"
        # Their tests are a package named tests, which pytest puts first: the plugin can't be a module of ours.
        paths = [str(Path(__file__).parent), str(REPOSITORY), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    plugin = [] if instance is None else ["-p", "own_trainer"]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
        code, output = call([*command, f"tests/trainer/{name}", f"--junitxml={report}"], directory, environment)
        if not report.exists():
            raise RuntimeError(f"{name} ended with code {code} and no report; its output:\n{output[-4000:]}")
        return read_report(report)


def regressions(stock: Mapping[str, Outcome], ours: Mapping[str, Outcome], expectations: Expectations) -> list[str]:
    """What passes with the stock Trainer alone and has no reason, and reasons that nothing needs any more."""
    missing = Outcome("failed", "It is gone.")
    found = [
        f"{name} passes with the stock Trainer and has {ours.get(name, missing).status} with ours. "
        f"{ours.get(name, missing).text}"
        for name, outcome in stock.items()
        if outcome.status == "passed" and ours.get(name, missing).status != "passed" and name not in expectations.failed
    ]
    found += [
        f"{name} passes, and {EXPECTATIONS.name} says why it fails."
        for name in expectations.failed
        if name in ours and ours[name].status == "passed"
    ]
    return found


def failures_on_a_core(stock: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> list[str]:
    """The tests that the CPU skips or fails, too, and that a core fails: they say nothing of a difference."""
    return [
        f"{name}: {stock.get(name, Outcome('missing')).status} with the stock Trainer, failed with ours."
        for name, outcome in ours.items()
        if outcome.status == "failed" and stock.get(name, Outcome("missing")).status != "passed"
    ]


def count(outcomes: Mapping[str, Outcome]) -> list[int]:
    """How many passed, failed and were skipped."""
    counts = Counter(outcome.status for outcome in outcomes.values())
    return [counts[status] for status in STATUSES]


def table(results: Mapping[str, tuple[Mapping[str, Outcome], Mapping[str, Outcome]]]) -> str:
    """A table of both counts by file."""
    lines = [
        "| passed / failed / skipped | stock Trainer on the CPU | NeuronTrainer on a core |",
        "|---|---|---|",
    ]
    for name, (stock, ours) in results.items():
        cells = [" / ".join(map(str, count(outcomes))) for outcomes in (stock, ours)]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the files; the exit code is 1 where a test fails that passes with the stock Trainer, without a reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("files", nargs="*")
    options = parser.parse_args(arguments)
    expectations = read()
    check_source(options.directory, expectations)
    results, failures, others = {}, [], []
    for name in options.files or files_of(options.directory):
        stock = outcomes_of(options.directory, name, None)
        ours = outcomes_of(options.directory, name, expectations.instance)
        results[name] = (stock, ours)
        failures += regressions(stock, ours, expectations)
        others += failures_on_a_core(stock, ours)
    print("\n".join([table(results), *others, *failures]))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
