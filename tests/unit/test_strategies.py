"""Draws: distinct, reproducible, within the support and small; shrinking finds the smallest case that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from pytest_flashattn import strategies, trial
from pytest_flashattn.cases import Case
from pytest_flashattn.features import FEATURES
from pytest_flashattn.implementation import load
from pytest_flashattn.support import Support
from tests.mutants.core import Core
from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = Support(features=frozenset(FEATURES))
SUPPORTS = [
    EVERYTHING,
    Support(),
    Support(features={"causal", "gqa", "backward"}, dtypes={"fp16"}, max_head_dim=128),
    Support(features={"causal", "cross", "bias"}, head_dims={64, 100}, length_multiple=16),
]


@pytest.mark.parametrize("support", SUPPORTS, ids=["everything", "nothing", "half", "multiples"])
def test_draws_are_distinct_small_and_within_the_support(support: Support) -> None:
    drawn = strategies.draw(support, 120, 5)
    assert len(set(drawn)) == len(drawn) == 120
    for case in drawn:
        assert Case.parse(case.id) == case
        assert support.gap(case) is None
        rows, keys = case.batch * case.heads * case.q, case.batch * case.heads * case.k
        assert rows <= strategies.ROWS
        assert keys <= max(strategies.KEYS, strategies.ROWS)
        assert rows * case.k <= strategies.SCORES
    assert drawn == strategies.draw(support, 120, 5)
    assert drawn != strategies.draw(support, 120, 6)


def test_everything_that_is_declared_is_drawn() -> None:
    drawn = [case for seed in range(3) for case in strategies.draw(EVERYTHING, 200, seed)]
    words = Counter(word for case in drawn for word in case.features)
    wanted = {"causal", "cross", "gqa", "dv", "scale", "window", "softcap", "alibi", "bias", "mask", "sinks"}
    assert all(words[word] >= 12 for word in wanted), words
    for name, least in (("dtype", 3), ("layout", 10), ("dout", 5), ("family", 13), ("d", 12), ("batch", 4)):
        assert len({getattr(case, name) for case in drawn}) >= least, name
    assert any(0 in (case.q, case.k, case.batch) for case in drawn)
    assert sum(case.q > 64 for case in drawn) > 120
    assert sum(case.k > 64 for case in drawn) > 120


def test_another_process_with_other_modules_draws_the_same(tmp_path: Path) -> None:
    """Hypothesis looks for numbers in the modules that are loaded; a worker of xdist has others than the controller."""
    (tmp_path / "numbers_of_mine.py").write_text(f"mine = {list(range(2, 150))}\n")
    code = (
        "import numbers_of_mine; from pytest_flashattn import strategies; from pytest_flashattn.support import Support;"
        "from pytest_flashattn.features import FEATURES;"
        "print(*strategies.draw(Support(features=frozenset(FEATURES)), 60, 3))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert process.stdout.split() == [case.id for case in strategies.draw(EVERYTHING, 60, 3)]
    assert not (tmp_path / ".hypothesis").exists(), "Hypothesis left a folder behind"


@pytest.mark.parametrize(
    ("fails", "smallest"),
    [
        (lambda case: case.causal and case.q < case.k, "q1-k2-d64-causal"),
        (lambda case: case.k > 64 and case.k % 64, "q1-k65-d64 q65-k65-d64"),
        (lambda case: case.window is not None and case.k > 64, "q1-k65-d64-w0.0 q65-k65-d64-w0.0"),
        (lambda case: case.kv_heads != case.heads and case.dtype == "fp16", "fp16-b1-h2-kv1-q1-k1-d64"),
        (lambda case: case.batch > 1 and case.layout != "plain", "bf16-b2-h1-q1-k1-d64-swapped"),
    ],
)
def test_shrinking_leaves_what_the_failure_needs(fails, smallest: str) -> None:
    """From any draw that fails; Lq == Lk is simpler than Lq != Lk, so there may be two smallest cases."""
    drawn = strategies.draw(EVERYTHING, 200, 0)
    for failing in [case for case in drawn[20:] if fails(case)][:3]:
        found, runs = strategies.shrink(EVERYTHING, 200, 0, failing, lambda case: bool(fails(case)))
        assert str(found).removeprefix("bf16-b1-h1-") in smallest.split()
        assert 0 < runs <= strategies.RUNS


def test_shrinking_keeps_to_its_time() -> None:
    drawn = strategies.draw(EVERYTHING, 50, 0)
    found, runs = strategies.shrink(EVERYTHING, 50, 0, drawn[30], lambda case: True, seconds=-1)
    assert (found, runs) == (drawn[30], 0)


@pytest.mark.parametrize(
    ("mutant", "features"),
    [
        ("causal_top_left", {"causal", "window", "alibi"}),
        ("window_plus_one", {"window"}),
        ("no_kv_tail_mask", set()),
    ],
)
def test_a_mutant_shrinks_to_its_essence(mutant: str, features: set[str]) -> None:
    """Real kernels, real judgement: the smallest case has one feature that the fault needs, and nothing else."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kernel = load(MUTANTS[mutant].make(), device="cpu")

    def fails(case: Case) -> bool:
        return trial.run_check("fuzz.matches_oracle", kernel, case, diagnose=False).status == "failed"

    try:
        drawn = strategies.draw(kernel.support, 60, 0)
        failing = next(case for case in drawn if fails(case))
        smallest = strategies.shrink(kernel.support, 60, 0, failing, fails)[0]
    finally:
        torch.set_num_threads(threads)
    assert len(smallest.features - {"cross"}) == bool(features)
    assert smallest.features <= features | {"cross"}
    assert (smallest.dtype, smallest.batch, smallest.heads, smallest.d) == ("bf16", 1, 1, 64)
    assert (smallest.layout, smallest.dout, smallest.family) == ("plain", "plain", "normal")
    assert smallest.q * smallest.k <= 16


def test_an_honest_kernel_passes_draws() -> None:
    kernel = load(Core(), device="cpu")
    statuses = Counter(
        trial.run_check("fuzz.matches_oracle", kernel, case).status for case in strategies.draw(kernel.support, 40, 9)
    )
    assert statuses["failed"] == 0
    assert statuses["verified"] >= 35
