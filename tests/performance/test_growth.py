"""Growth: what each check says of times and memory that grow as they should, and as they should not."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from cheats import honest

from pytest_flashattn import trial
from pytest_flashattn.__main__ import main
from pytest_flashattn.cases import Case
from pytest_flashattn.implementation import load
from pytest_flashattn.performance import clock, trials, work
from pytest_flashattn.performance.plan import Plan, in_force
from pytest_flashattn.support import Support
from pytest_flashattn.verdict import Verdict
from reference_kernels.naive import naive_attention

FULL = "bf16-b1-h1-q64-k64-d16"
Model = Callable[[Case], float]


class Modelled(clock.WallClock):
    """Makes every call, and says that it took what a model says of its case."""

    def __init__(self, model: Model) -> None:
        self.model, self.drawn = model, random.Random(0)

    def time(self, refresh: Callable[[], None], call: clock.Call) -> clock.Timing:
        results = super().time(refresh, call).results
        case = call.__self__.case  # type: ignore[attr-defined]
        return clock.Timing(self.model(case) * self.drawn.gauss(1, 0.005), results)


def verdict(check: str, case: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    monkeypatch.setattr(clock, "clock_for", lambda device: Modelled(model))
    support = Support(features=frozenset({"causal", "window", "backward"}))
    with in_force(Plan(seconds=0.0)):
        subject = load(naive_attention, support=support, device="cpu")
        return trial.run_check(f"performance.{check}", subject, Case.parse(case), diagnose=False)


def proportional(case: Case) -> float:
    """Time as the visible pairs."""
    return 1e-6 * work.visible_pairs(case)


def full(case: Case) -> float:
    """Time as all pairs, visible or not."""
    return 1e-6 * case.q * case.k


@pytest.mark.parametrize(
    ("check", "case", "model", "status", "says"),
    [
        ("time_grows_as_the_work", FULL, full, "verified", ""),
        ("time_grows_as_the_work", FULL, lambda case: 1e-9 * case.q**3, "failed", r"time grows as N\*\*(2.9|3)"),
        ("time_grows_as_the_work", FULL, lambda case: 1e-9 * case.q**2.2, "unmet", "undecided: time grows as"),
        ("causal_costs_half", f"{FULL}-causal", proportional, "verified", ""),
        ("causal_costs_half", f"{FULL}-causal", full, "failed", r"a causal call takes (0.99|1).* limit 0.6"),
        ("window_costs_less", f"{FULL}-w4.4", proportional, "verified", ""),
        ("window_costs_less", f"{FULL}-w4.4", full, "failed", r"a call with a window takes (0.99|1).* limit 0.5"),
    ],
)
def test_time(check: str, case: str, model: Model, status: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdict(check, case, model, monkeypatch)
    assert found.status == status, found
    assert re.search(says, found.reason)
    assert found.extra["growth"]["limit"]
    assert {m.quantity for m in found.measures} == {"o"}, "what was timed is verified"


@pytest.mark.parametrize(("power", "status"), [(1, "verified"), (2, "failed")])
def test_memory(power: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "peak_memory", lambda subject: 1000 * subject.case.q**power)
    found = verdict("memory_grows_as_the_length", FULL, full, monkeypatch)
    assert found.status == status
    assert found.extra["growth"]["value"][0] == 2**power


def test_a_cpu_does_not_say_how_much_memory_a_call_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verdict("memory_grows_as_the_length", FULL, full, monkeypatch).status == "unmet"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(["memory"])
    assert end.value.code == 2
    assert "this machine has no CUDA device" in capsys.readouterr().err


def test_a_wrong_result_has_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing for the hidden keys, and nothing for the others."""
    monkeypatch.setattr(clock, "clock_for", lambda device: Modelled(proportional))

    def nothing(q, k, v, *, causal=False):
        return honest(q, k, v, causal=causal) * (0.5 if causal else 1.0)

    subject = load(nothing, support=Support(features=frozenset({"causal"})), device="cpu")
    found = trial.run_check("performance.causal_costs_half", subject, Case.parse(f"{FULL}-causal"), diagnose=False)
    assert found.status == "failed"
    assert found.reason.startswith("what it returned while it was timed is wrong")
