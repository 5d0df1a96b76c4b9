"""The reference kernels on trial by the suite itself, in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreted import python

HALVES = {
    "outputs": ("forward", "causal", "lse", "gqa", "layout", "numerics", "shapes"),
    "gradients and options": ("backward", "features", "metamorphic", "fp8", "contract"),
}


def test_the_halves_are_the_whole_suite() -> None:
    from pytest_flashattn.chapters import CHAPTERS

    # The performance lane measures a GPU.
    assert set(CHAPTERS) - {"performance"} <= {chapter for half in HALVES.values() for chapter in half}


@pytest.mark.parametrize("half", HALVES)
def test_smoke_is_conformant(half: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = python(
        "-m", "pytest", *(f"flashattn-suite/{chapter}" for chapter in HALVES[half]), "-q", "-p", "no:cacheprovider",
        "--flashattn-impl=reference_kernels:flash_attention", "--flashattn-matrix=smoke", f"--flashattn-json={report}",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    totals = json.loads(report.read_text())["totals"]
    assert totals["failed"] == totals["unmet"] == 0
    assert totals["verified"] >= 30


@pytest.mark.parametrize("chapter", ["forward", "backward", "features"])
def test_the_naive_baseline_is_conformant(chapter: str) -> None:
    from pytest_flashattn import run
    from reference_kernels.naive import naive_attention

    report = run(naive_attention, chapters=[chapter], device="cpu")
    assert report.conformant, str(report)
