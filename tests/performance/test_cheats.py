"""Every way to cheat on the clock fails, and the honest function that they pretend to be is verified."""

from __future__ import annotations

import time

import pytest
import torch
from cheats import CHEATS, Cheat, honest

from pytest_flashattn import trial
from pytest_flashattn.cases import Case
from pytest_flashattn.implementation import load
from pytest_flashattn.performance import trials  # which takes the clocks, as the plugin does, before any cheat
from pytest_flashattn.performance.pairing import Samples
from pytest_flashattn.performance.plan import Plan, in_force
from pytest_flashattn.verdict import Verdict

CASE = Case.parse("bf16-b1-h2-q64-k64-d32")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
QUICK = Plan(seconds=0.0, baseline="reference_kernels.naive:naive_attention")
ALONE = Plan(seconds=0.0, baseline="torch:no_such_function")


@pytest.fixture(autouse=True)
def _clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cheat replaces is put back."""
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", torch.cuda.Event.elapsed_time)


def timed(function: object, direction: str, device: str, plan: Plan = QUICK) -> Verdict:
    with in_force(plan):
        return trial.run_check(f"performance.{direction}", load(function, device=device), CASE, diagnose=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direction", ["forward", "backward", "forward_backward"])
def test_the_honest_function_is_verified(direction: str, device: str) -> None:
    verdict = timed(honest, direction, device)
    found = verdict.extra["performance"]
    assert verdict.status == "verified" or verdict.reason.startswith("undecided"), verdict.text()
    assert found["rounds"] == len(found["samples"]) >= Plan.least
    assert {m.quantity for m in verdict.measures} == set(
        {"forward": ("o",), "backward": ("dq", "dk", "dv"), "forward_backward": ("o", "dq", "dk", "dv")}[direction]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_fails(name: str, device: str) -> None:
    make, says = CHEATS[name]
    verdict = timed(make(), "forward", device)
    assert verdict.status == "failed", verdict
    assert any(phrase in verdict.text() for phrase in says), verdict.text()
    assert "performance" not in verdict.extra, "its time must not get into any statistics"


@pytest.mark.parametrize("name", ["cached_by_address", "cached_by_count"])
def test_a_cheat_fails_without_a_baseline(name: str) -> None:
    """The round that is judged then is one drawn at random."""
    assert timed(CHEATS[name][0](), "forward", "cpu", ALONE).status == "failed"


@pytest.mark.parametrize("name", ["cached_by_count", "skipping"])
def test_a_cheat_fails_with_its_gradients(name: str) -> None:
    assert timed(CHEATS[name][0](), "forward_backward", "cpu").status == "failed"


def test_a_cheat_computes_what_it_should_before() -> None:
    """Otherwise it would fail for another reason than cheating."""
    for name in ("cached_by_address", "cached_by_count", "patched_clock", "skipping"):
        cheat: Cheat = CHEATS[name][0]()
        q, k, v = torch.randn(3, 1, 2, 64, 32).bfloat16()
        assert torch.equal(cheat(q, k, v), honest(q, k, v)), name


def test_work_that_goes_on_after_the_call_is_a_failure() -> None:
    """On a device only, where `Timing.late` is measured."""
    assert "the device went on working after 3 of 5 calls" in trials.cheats(Samples(seconds=[1.0] * 5, late=3))
    assert trials.cheats(Samples(seconds=[1.0] * 5, late=2)) == ""


def test_a_call_too_short_for_the_clock_is_unmet_unless_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes no time at all is what a cheat looks like: its results come first."""
    monkeypatch.setattr("pytest_flashattn.performance.clock.WallClock.shortest", 60.0)
    found = timed(honest, "forward", "cpu")
    assert found.status == "unmet"
    assert found.reason.startswith("too short for CUDA events")
    assert timed(CHEATS["cached_by_address"][0](), "forward", "cpu").status == "failed"
