"""The suite fails the mutants that hang, crash or spoil its memory, and says so. Each costs a process or two."""

from __future__ import annotations

from pathlib import Path

import pytest

from .isolated import ISOLATED, Isolated
from .process import run_suite


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name) for m in ISOLATED.values()])
def test_suite_fails_isolated_mutant(mutant: Isolated, tmp_path: Path) -> None:
    """On the smoke matrix: exit status 1, and the failing case is booked with what happened to it."""
    spec = f"mutants.isolated:{mutant.name}"
    run = run_suite(spec, "--flashattn-matrix=smoke", "--flashattn-device=cpu", *mutant.options, folder=tmp_path)
    failed = run.of("failed")
    assert run.status == 1, run.text
    assert failed, run.text
    assert failed[0]["reason"].startswith(mutant.reason)
    if "hang" in mutant.name:
        assert "in hang, isolated.py" in failed[0]["reason"]  # reached: the watchdog saw it there
