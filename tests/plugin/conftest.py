"""Runs of the plugin in a project of its own (`pytester`): `trial(...)` with fake implementations, `bare(...)` without.

In-process where possible; subprocesses only for xdist, process ends and start-up, since each costs a second.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

# pytester drops the modules that a run imports: what the outer process holds already is not imported again each time.
import pytest_flashattn.ledger
import pytest_flashattn.report.terminal
import pytest_flashattn.session
import pytest_flashattn.watchdog  # noqa: F401

HERE = Path(__file__).parent
REPO = HERE.parents[1]
Run = Callable[..., pytest.RunResult]

_INSTALLED = any(entry.name == "flashattn" for entry in metadata.entry_points(group="pytest11"))
LOAD = [] if _INSTALLED else ["-p", "pytest_flashattn.plugin"]


@pytest.fixture(autouse=True)
def _importable(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(HERE), str(REPO), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.delenv("FAKE_DEVICE", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def trial(pytester: pytest.Pytester) -> Run:
    """`trial("good", …options)`: a smoke run in this process; None names no implementation; process=True: its own."""

    def run(impl: str | None, *args: str, process: bool = False, matrix: str | None = "smoke") -> pytest.RunResult:
        options = [*LOAD, "-p", "fakes", "-p", "no:benchmark", "-p", "no:hypothesispytest"]
        options += [f"--flashattn-impl=kern:{name}" for name in (impl or "").split(",") if name]
        options += [f"--flashattn-matrix={matrix}"] if matrix else []
        start = pytester.runpytest_subprocess if process else pytester.runpytest_inprocess
        return start(*options, *args)

    return run


@pytest.fixture
def bare(pytester: pytest.Pytester) -> Run:
    """The plugin as a user has it, in a process of its own, with nothing faked."""

    def run(*args: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess(*LOAD, "-p", "no:benchmark", *args)

    return run


def last_line(result: pytest.RunResult) -> str:
    return [line for line in result.outlines if line.strip()][-1]


def error(result: pytest.RunResult) -> str:
    """The one sentence of a usage error."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stdout.str() + result.stderr.str()
    lines = [line for line in result.errlines if line.startswith("ERROR: ")]
    assert len(lines) == 1, result.errlines
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    return lines[0].removeprefix("ERROR: ")


def load_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert document["schema"] == 1
    return document
