"""Faults of time and memory as they really happen, and the right kernel that passes the same check; needs a CUDA GPU.

The names are those of the catalogue (tests/mutants/catalogue.py). patch_timer is among the cheats (test_cheats.py), and
flops_full_for_causal cannot happen, since the lane counts the operations itself (test_work.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cheats import Slower

from pytest_flashattn import trial
from pytest_flashattn.cases import Case
from pytest_flashattn.implementation import load
from pytest_flashattn.performance.plan import Plan, in_force
from pytest_flashattn.support import Support
from pytest_flashattn.verdict import Verdict

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU: a CPU tells no peak of memory and no time of a kernel", allow_module_level=True)

pytestmark = pytest.mark.gpu
FEATURES = frozenset({"causal", "window", "scale", "backward"})


def right() -> Callable[..., Any]:
    from reference_kernels import flash_attention

    return flash_attention


def slow_5x() -> Callable[..., Any]:
    return Slower(4.0, right())


def no_tile_skip() -> Callable[..., Any]:
    """The definition computes every score, and hides those outside of the window."""
    from reference_kernels import naive_attention

    return naive_attention


materialise_scores = no_tile_skip

FAULTS = [
    ("forward", "bf16-b4-h16-q2048-k2048-d64-causal", slow_5x, "x the time of"),
    ("window_costs_less", "bf16-b1-h64-q4096-k4096-d64-w256.256", no_tile_skip, "a call with a window takes"),
    ("memory_grows_as_the_length", "bf16-b1-h4-q4096-k4096-d64", materialise_scores, "memory is"),
]


def verdict(check: str, case: str, function: Callable[..., Any]) -> Verdict:
    with in_force(Plan(seconds=0.3)):
        subject = load(function, support=Support(features=FEATURES), device="cuda")
        return trial.run_check(f"performance.{check}", subject, Case.parse(case), diagnose=False)


@pytest.mark.parametrize(("check", "case", "make", "says"), FAULTS, ids=[make.__name__ for _, _, make, _ in FAULTS])
def test_the_fault_fails_and_the_right_kernel_does_not(
    check: str, case: str, make: Callable[[], Callable[..., Any]], says: str
) -> None:
    found = verdict(check, case, make())
    assert found.status == "failed", found
    assert says in found.reason
    assert verdict(check, case, right()).status == "verified"
