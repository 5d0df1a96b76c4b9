"""The diagnosis names faults that are in none of its tables, accuses no honest kernel, and never costs a verdict."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import oracles
import pytest_flashattn
from pytest_flashattn import attempt, examination, trial, watchdog
from pytest_flashattn.cases import Case
from pytest_flashattn.diagnosis import backward, experiments, explain, fits, forward, notebook, rounding, shape
from pytest_flashattn.diagnosis.backward_model import gradients, start
from pytest_flashattn.diagnosis.budget import Budget
from pytest_flashattn.diagnosis.failure import Failure
from pytest_flashattn.diagnosis.match import Finding, Match, Sample, compare, tightest, within
from pytest_flashattn.diagnosis.model import Problem, pose
from pytest_flashattn.implementation import Implementation, load
from pytest_flashattn.inputs import make_inputs
from pytest_flashattn.verdict import Verdict
from tests.mutants.core import Core
from tests.mutants.mutants import MUTANTS

PLAIN = Case.parse("bf16-b2-h4-kv2-q65-k130-d64-causal")
RICH = (
    "bf16-b2-h4-kv2-q65-k130-d64-causal-w40.0-cap5-alibi-sinks",
    "fp16-b1-h4-kv2-q70-k33-d40-dv24-w9.4-scale0p3-bias.1hqk-holes",
    "fp32-b2-h2-q17-k65-d32-mask.b11k",
    "bf16-b2-h2-q65-k65-d64-qkv",
    "fp16-b1-h2-q2-k1-d16",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _implementation(core: Callable[..., Any]) -> Implementation:
    return load(core, device="cpu")


def _problem(case: Case) -> Problem:
    return pose(make_inputs(case), "bottom-right", torch.arange(case.q))


def _judged(core: Core, check: str, case: str, **options: bool) -> Verdict:
    return trial.run_check(check, _implementation(core), Case.parse(case), **options)


class _Lossy(Core):
    """Some keys are lost, others count twice: nothing that a table lists."""

    def scores(self, p: Any, q: Tensor, k: Tensor, i: int, j: int) -> tuple[Tensor, Tensor | None]:
        s, slope = super().scores(p, q, k, i, j)
        keys = torch.arange(j, j + self.block_k)
        lost = torch.isin(keys, torch.tensor([3, 4, 5, 40, 93]))
        twice = (keys >= 70) & (keys < 77)
        return torch.where(twice, s + math.log(2), s).masked_fill(lost, -math.inf), slope


def test_lost_and_doubled_keys_are_found_whichever_they_are() -> None:
    verdict = _judged(_Lossy(), "forward.matches_oracle", "bf16-b2-h4-kv2-q129-k200-d64")
    assert "keys 3-5, 40, 93 have no effect, keys 70-76 count twice" in verdict.diagnosis[0]


class _Permuted(Core):
    """Heads that are read in an order of their own."""

    def head_map(self, p: Any) -> Tensor:
        return torch.tensor([1, 0, 0, 1])


def test_head_maps_are_found_whichever_they_are() -> None:
    verdict = _judged(_Permuted(), "forward.matches_oracle", "bf16-b1-h4-kv2-q65-k130-d64")
    assert "query heads read kv heads [1, 0, 0, 1] instead of [0, 0, 1, 1]" in verdict.diagnosis[0]


def test_a_report_says_what_it_looks_like() -> None:
    report = pytest_flashattn.run(
        MUTANTS["causal_top_left"].make(), chapters=["causal"], cases=["fp16-b1-h2-q65-k130-d64-causal"], device="cpu"
    )
    assert "looks like: top-left alignment" in str(report)
    assert "(o matches that everywhere)" in str(report)


@pytest.mark.parametrize(
    ("name", "check", "case"),
    [
        ("causal_top_left", "causal.matches_oracle", "fp16-b1-h2-q65-k130-d64-causal"),
        ("cache_by_id", "contract.content_is_read", "bf16-b2-h2-q65-k65-d64"),
        ("bwd_no_delta", "backward.matches_oracle", "bf16-b1-h2-q65-k65-d64"),
        ("p_truncated", "metamorphic.ones_value", "bf16-b2-h4-kv2-q65-k130-d64"),
    ],
)
def test_a_diagnosis_changes_nothing_of_the_verdict(name: str, check: str, case: str) -> None:
    told = _judged(MUTANTS[name].make(), check, case)
    silent = _judged(MUTANTS[name].make(), check, case, diagnose=False)
    assert told.diagnosis
    assert not silent.diagnosis
    assert dataclasses.replace(told, diagnosis=(), seconds=0.0) == dataclasses.replace(silent, seconds=0.0)


def test_a_fault_of_the_diagnosis_is_a_note_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(explain, "explain", broken)
    verdict = _judged(MUTANTS["causal_top_left"].make(), "causal.matches_oracle", "fp16-b1-h2-q65-k130-d64-causal")
    assert verdict.status == "failed"
    assert verdict.measures
    assert verdict.diagnosis == ()
    assert verdict.extra["diagnosis"] == "ZeroDivisionError: of ours"


def test_nothing_is_recorded_outside_of_a_check() -> None:
    subject = _implementation(Core())
    attempt.forward(subject, examination.inputs_for(subject, PLAIN))
    assert notebook.current() is None


def test_from_the_21st_failure_on_only_the_shape_is_told() -> None:
    subject = _implementation(MUTANTS["return_zeros"].make())
    case = Case.parse("bf16-b1-h1-q8-k8-d16")
    told = [trial.run_check("forward.matches_oracle", subject, case).diagnosis for _ in range(notebook.FULL + 1)]
    assert all(lines[0].startswith("looks like: o is all zeros") for lines in told[: notebook.FULL])
    assert told[notebook.FULL] == ("o everywhere is 0",)


def test_large_cases_get_the_shape_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "SCORES", 100)
    verdict = _judged(MUTANTS["return_zeros"].make(), "forward.matches_oracle", "bf16-b1-h1-q16-k16-d16")
    assert verdict.diagnosis == ("o everywhere is 0",)


def test_the_budget_ends_before_the_watchdog_barks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.perf_counter()
    assert not Budget(now).spent
    assert Budget(now).allows_a_call
    assert Budget(now, seconds=-1.0).spent
    monkeypatch.setattr(watchdog, "remaining", lambda: 1.0)
    assert not Budget(now).allows_a_call
    assert Budget(now - 2).spent


def test_slow_calls_are_not_repeated() -> None:
    assert not Budget(time.perf_counter() - 60).allows_a_call


# -- honest kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["bf16-b1-h2-q65-k130-d64-causal", "fp16-b1-h2-q128-k128-d64", "fp32-b1-h2-q65-k65-d40"]
)
def test_no_rounding_is_seen_in_an_honest_kernel(case: str) -> None:
    failure = _failure(Core(), case)
    problem, sample = failure.sampled()
    assert rounding.explain(problem, sample, failure.dtype, failure.budget) is None
    assert rounding.exponential(problem, sample) == ""


def _failure(core: Core, case: str) -> Failure:
    """A failure with the outputs of a core, right or wrong."""
    subject = _implementation(core)
    inputs = examination.inputs_for(subject, Case.parse(case))
    with notebook.opened("forward.matches_oracle", subject) as notes:
        outputs = attempt.forward(subject, inputs)
    expected = examination.truth(subject, inputs)
    return Failure(notes, inputs, outputs, expected, slice(None), notes.calls[0], Budget(time.perf_counter(), 60.0))


def test_experiments_find_nothing_in_an_honest_kernel() -> None:
    failure = _failure(Core(), "bf16-b2-h2-q17-k33-d32-padded")
    assert experiments.repeated(failure) == ""
    assert experiments.positive_scale(failure) == ""
    assert experiments.unwritten(failure, "o") is None


def test_an_implementation_that_raises_the_second_time_is_no_finding() -> None:
    class Once(Core):
        calls = 0

        def run(self, p: Any) -> tuple[Tensor, Tensor]:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("only once")
            return super().run(p)

    failure = _failure(Once(), "bf16-b2-h2-q17-k33-d32-swapped")
    assert experiments.repeated(failure) == ""
    assert experiments.contiguous(failure) == ""


# -- the model and its tables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*RICH, PLAIN.id])
@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
def test_the_model_is_the_oracle(case: str, alignment: str) -> None:
    inputs = make_inputs(Case.parse(case))
    spec = inputs.spec(alignment)
    problem = pose(inputs, alignment, torch.arange(inputs.q.shape[2]))
    out = forward.forward(problem)
    right = oracles.dense.forward(inputs.q, inputs.k, inputs.v, spec)
    torch.testing.assert_close(out.o, right.o)
    torch.testing.assert_close(out.lse, right.lse)
    tape = start(problem, inputs.dlse.double(), frozenset(("dbias", "dsinks")))
    want = oracles.dense.backward(inputs.q, inputs.k, inputs.v, spec, inputs.dout, inputs.dlse)
    for name, value in gradients(tape).items():
        torch.testing.assert_close(value, getattr(want, name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", [*RICH, PLAIN.id])
def test_every_alternative_can_be_computed_and_recognises_itself(case: str) -> None:
    problem = _problem(Case.parse(case))
    right = forward.forward(problem)
    noise = forward.noise_of(problem, 2.0**-8, 2.0**-8)
    limit = noise.of(problem, right)
    count = 0
    for alternative in forward.alternatives(problem):
        changed = alternative.change(problem)
        out = forward.forward(changed)
        assert out.o.shape == right.o.shape, alternative
        sample = Sample("o", out.o.bfloat16().double(), right.o, limit)
        match = compare(sample, out.o, noise.of(changed, out))
        assert match is None or match.share > 0.9, alternative
        count += match is not None
    assert count > 10


@pytest.mark.parametrize("case", [*RICH, PLAIN.id])
def test_every_wrong_backward_can_be_computed(case: str) -> None:
    problem = _problem(Case.parse(case))
    tape = start(problem, problem.inputs.dlse.double(), frozenset(("dbias", "dsinks")))
    right = gradients(tape)
    for wrong in backward.wrongs(tape):
        found = gradients(wrong.change(tape))
        if "D = " not in wrong.sentence:  # padded head dims change the width of dq and dk
            assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in right.items()}, wrong


@pytest.mark.parametrize(
    "name", ["window-left-plus", "softcap-ignored", "sink-dropped", "alibi-kv-head", "no-tail-mask"]
)
def test_an_alternative_recognises_itself(name: str) -> None:
    problem = _problem(Case.parse(RICH[0]))
    alternative = next(a for a in forward.alternatives(problem) if a.name == name)
    got = forward.forward(alternative.change(problem)).o.bfloat16().double()
    right = forward.forward(problem).o
    sample = Sample("o", got, right, torch.full_like(right, 1e-6))
    noise = forward.noise_of(problem, 2.0**-8, 2.0**-8)
    tried = forward.Trial(problem, sample, (problem, sample), None, noise, Budget(time.perf_counter(), 60.0))
    best = tightest(tried.findings(forward.alternatives(problem)))
    assert best[0].sentence == alternative.sentence
    assert best[0].match.exact


# -- matching ---------------------------------------------------------------------------------------------------------


def _sample(got: Tensor, want: Tensor, limit: float = 0.1) -> Sample:
    return Sample("o", got, want, torch.full_like(want, limit))


def test_within_knows_nan_and_infinities() -> None:
    nan, inf = math.nan, math.inf
    got, want = torch.tensor([1.0, nan, inf, -inf, nan, 1.0]), torch.tensor([1.05, nan, inf, inf, 1.0, nan])
    assert within(got, want, torch.tensor(0.1)).tolist() == [True, True, True, False, False, False]


def test_a_match_is_exact_or_explains_a_share_of_every_row() -> None:
    want = torch.zeros(1, 1, 4, 2)
    got = want.clone()
    got[..., 2:, :] = 1.0
    none = torch.zeros_like(want)
    exact = compare(_sample(got, want), got, none)
    assert exact is not None
    assert (exact.exact, exact.whole, exact.share, exact.level) == (True, True, 1.0, 3)
    rows = compare(_sample(got, want), torch.ones_like(got), none)
    assert rows is not None
    assert (rows.exact, rows.whole, rows.level) == (True, False, 1)
    one_row = got.clone()
    one_row[..., 3, :] = 100.0
    lucky = want.clone()
    lucky[..., 3, :] = 99.0  # explains nearly all of the error, and one of two wrong rows
    match = compare(_sample(one_row, want), lucky, none)
    assert match is not None
    assert match.share > 0.99
    assert not match.told
    truth = compare(_sample(got, want), want, none)
    assert truth is not None
    assert not truth.told


def test_the_tightest_come_first_and_ties_follow_the_table() -> None:
    def finding(sentence: str, distance: float, *, exact: bool = True, agrees: bool = True) -> Finding:
        return Finding(sentence, Match(exact, True, 0.99, distance), agrees)

    loose, tight, tie = finding("loose", 0.5), finding("tight", 0.1), finding("tie", 0.101)
    assert [f.sentence for f in tightest([loose, tight, tie])] == ["tight", "tie"]
    assert [f.sentence for f in tightest([finding("share", 0.0, exact=False), loose])] == ["loose"]
    assert [f.sentence for f in tightest([finding("lse differs", 0.0, agrees=False), loose])] == ["loose"]
    assert tightest([]) == []


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (8.0, "dk everywhere is 8 x the truth, which is 1 / scale"),
        (0.97, "dk everywhere is 0.97 x the truth"),
        (2.0, "twice"),
    ],
)
def test_factors_are_named(factor: float, said: str) -> None:
    want = torch.randn(1, 2, 33, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    problem = _problem(Case.parse("bf16-b1-h2-q33-k33-d64"))
    assert said in shape.whole_factor(problem, Sample("dk", factor * want, want, torch.full_like(want, 1e-3)))


def test_lost_tails_are_named() -> None:
    want = torch.ones(1, 2, 130, 8, dtype=torch.float64)
    got = want.clone()
    got[:, :, 128:] = 0
    problem = _problem(Case.parse("bf16-b1-h2-q8-k130-d8"))
    said = shape.whole_factor(problem, Sample("dv", got, want, torch.full_like(want, 1e-3)))
    assert said == "dv in keys 128-129 of 130 is 0: the partial tile after the last multiple of 128 is lost"


def test_denominators_are_told_from_weights() -> None:
    want = torch.randn(1, 2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = want * torch.linspace(0.5, 0.9, 8, dtype=torch.float64)[:, None]
    assert "a factor of its own (0.5 to 0.9)" in shape.row_factors(Sample("o", got, want, torch.full_like(want, 1e-3)))


def test_a_scale_is_fitted() -> None:
    problem = _problem(Case.parse("fp32-b1-h2-q33-k65-d64"))
    got = forward.forward(dataclasses.replace(problem, scale=problem.scale * 1.25)).o
    found = fits.scale(problem, _sample(got, forward.forward(problem).o, 1e-6))
    assert found is not None
    assert "scores are 1.25 x" in found.sentence
