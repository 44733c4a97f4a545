"""`make conformance`: runs the whole suite, writes docs/conformance.md and fails on any unexpected outcome."""

import sys
from pathlib import Path

from tests.conformance.suite import REPOSITORY, SCRIPT_TESTS, Run, Suite, check_version, differences, execute, read

TABLE = REPOSITORY / "docs" / "conformance.md"


def command(run: Run) -> str:
    """The run as a person would type it."""
    settings = "".join(f"{key}={value} " for key, value in run.environment.items())
    program = (
        " ".join(run.command)
        .replace("torch.distributed.run", "torchrun")
        .removeprefix("pytest -q -p no:cacheprovider ")
    )
    return f"`{settings}{program if run.is_script else 'pytest ' + program}`"


def document(suite: Suite) -> str:
    """docs/conformance.md: what passes, and why the rest doesn't."""
    lines = [
        "# accelerate's own tests on the simulated cores",
        "",
        f"Written by `make conformance`, which runs accelerate {suite.version}'s scripts under torchrun on two ranks,",
        "and tests of its source distribution, with `OPTIMUM_TRN_AUTOLOAD=1`: they know nothing of optimum_trn. It",
        "fails when any test says something else than below, a pass that was not expected included.",
        "",
        "| run | passed | failed | skipped |",
        "|---|---|---|---|",
    ]
    lines += [f"| {command(run)} | {run.passed} | {len(run.failed)} | {len(run.skipped)} |" for run in suite.runs]
    totals = (
        sum(run.passed for run in suite.runs),
        *(sum(len(getattr(run, kind)) for run in suite.runs) for kind in ("failed", "skipped")),
    )
    lines += ["| **all** | {} | {} | {} |".format(*totals)]
    for kind in ("failed", "skipped"):
        lines += ["", f"## Why tests are {kind}" if kind == "skipped" else "## Why tests fail", ""]
        for key, reason in suite.reasons.items():
            tests = [
                command(run) if test == SCRIPT_TESTS else f"`{run.name}::{test}`"
                for run in suite.runs
                for test, its_key in getattr(run, kind).items()
                if its_key == key
            ]
            if tests:
                lines += [f"- {' '.join(reason.split())}", *(f"  - {test}" for test in tests)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run everything; the exit code is 1 where anything differs from the expectations."""
    suite = read()
    check_version(suite)
    failures: list[str] = []
    for run in suite.runs:
        print(f"{run.name} ...", flush=True)
        try:
            found = differences(run, execute(run, suite.instance))
        except RuntimeError as error:
            found = [str(error)]
        print(
            "\n".join(found)
            or f"  as expected: {run.passed} passed, {len(run.failed)} failed, {len(run.skipped)} skipped",
            flush=True,
        )
        failures += found
    if not failures:
        Path(TABLE).write_text(document(suite))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
