"""Runs accelerate's scripts and tests on the simulated cores, and compares what they say with expectations.yaml."""

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.conformance.source import accelerate_version, source_directory

REPOSITORY = Path(__file__).resolve().parents[2]
EXPECTATIONS = Path(__file__).with_name("expectations.yaml")
SCRIPTS = "accelerate.test_utils.scripts"
SCRIPT_TESTS = "the script"
"""Name of the only test of a run that is one script."""
SECONDS = 900.0  # a run that takes longer hangs


@dataclass(frozen=True)
class Run:
    """One process (or torchrun) of the suite; `failed` and `skipped` hold each such test's key in `Suite.reasons`."""

    name: str
    command: tuple[str, ...]
    passed: int
    failed: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    sample: bool = False
    is_script: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one test of a run said: "passed", "failed" or "skipped", and its own words."""

    status: str
    text: str = ""


@dataclass(frozen=True)
class Suite:
    """The expectations file."""

    version: str
    instance: str
    reasons: Mapping[str, str]
    runs: tuple[Run, ...]


def read(path: Path = EXPECTATIONS) -> Suite:
    """The suite that the file describes; raises KeyError for a reason that its table lacks."""
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    runs = [_script(entry) for entry in data["scripts"]] + [_file(entry) for entry in data["files"]]
    for run in runs:
        for reason in (*run.failed.values(), *run.skipped.values()):
            data["reasons"][reason]
    return Suite(data["accelerate"], data["instance"], data["reasons"], tuple(runs))


def _name(target: str, through: str | None) -> str:
    return f"{target} through {through}" if through else target


def _script(entry: dict[str, Any]) -> Run:
    fails, environment = entry.get("fails"), entry.get("environment", {})
    module = f"{SCRIPTS}.{entry['script']}"
    return Run(
        name=" ".join([entry["script"], *(f"{key}={value}" for key, value in environment.items())]),
        command=("torch.distributed.run", "--nproc-per-node", "2", "-m", module),
        passed=0 if fails else 1,
        failed={SCRIPT_TESTS: fails} if fails else {},
        environment=environment,
        sample=entry.get("sample", False),
        is_script=True,
    )


def _file(entry: dict[str, Any]) -> Run:
    through = entry.get("through")
    return Run(
        name=_name(entry["file"], through),
        command=(
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(["-p", through] if through else []),
            f"tests/{entry['file']}",
        ),
        passed=entry["passed"],
        failed=entry.get("failed", {}),
        skipped=entry.get("skipped", {}),
        sample=entry.get("sample", False),
    )


def execute(run: Run, instance: str) -> dict[str, Outcome]:
    """Outcome of every test of the run; raises RuntimeError where the process dies before it reports, or hangs."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OPTIMUM_TRN_", "PYTEST_"))}
    environment |= {
        "OPTIMUM_TRN_AUTOLOAD": "1",
        "OPTIMUM_TRN_INSTANCE": instance,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",  # what passes must not depend on the network
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")]),
        **run.environment,
    }
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", *run.command, *([] if run.is_script else [f"--junitxml={report}"])]
        code, output = call(command, REPOSITORY if run.is_script else source_directory(), environment)
        if run.is_script:
            return {SCRIPT_TESTS: Outcome("failed" if code else "passed", output[-4000:])}
        if not report.exists():
            raise RuntimeError(f"{run.name} ended with code {code} and no report; its output:\n{output[-4000:]}")
        return read_report(report)


def call(command: list[str], directory: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command; raises RuntimeError if it hangs, and ends all that it has started."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise RuntimeError(f"{command} took more than {SECONDS:.0f} s; its output:\n{output[-4000:]}") from None
    return process.returncode, output


def read_report(path: Path) -> dict[str, Outcome]:
    """Outcomes by `Class::test` of a JUnit report as pytest writes it."""
    outcomes = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = "::".join([*case.attrib["classname"].split(".")[2:], case.attrib["name"]])  # less tests.test_<file>
        outcome = Outcome("passed")
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = Outcome("failed", f"{child.attrib.get('message', '')}\n{(child.text or '')[-2000:]}")
            elif child.tag == "skipped":
                outcome = Outcome("skipped", child.attrib.get("message", ""))
        outcomes[name] = outcome
    return outcomes


def differences(run: Run, outcomes: Mapping[str, Outcome]) -> list[str]:
    """What the run said that the expectations file doesn't, one line of text each."""
    expected = {**dict.fromkeys(run.failed, "failed"), **dict.fromkeys(run.skipped, "skipped")}
    found = [
        f"{run.name}: {name} {outcome.status}, but was expected to have {expected.get(name, 'passed')}. {outcome.text}"
        for name, outcome in outcomes.items()
        if outcome.status != expected.get(name, "passed")
    ]
    found += [
        f"{run.name}: {name} was expected to have {status}, but is gone."
        for name, status in expected.items()
        if name not in outcomes
    ]
    passed = sum(outcome.status == "passed" for outcome in outcomes.values())
    if not found and passed != run.passed:
        found.append(f"{run.name}: {passed} tests passed, but {run.passed} were expected to.")
    return found


def check_version(suite: Suite) -> None:
    """Raises RuntimeError where the expectations belong to another accelerate than the one installed."""
    if suite.version != accelerate_version():
        raise RuntimeError(
            f"{EXPECTATIONS.name} holds what accelerate {suite.version} says, and {accelerate_version()} is installed: "
            "write that into the file, run `make conformance` and look at every difference."
        )
