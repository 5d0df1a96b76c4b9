"""No case of the matrices accepts a result that was never computed, and the exceptions by design are exactly right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oracles
from oracles.quantise import dequantise
from pytest_flashattn import matrices, sensitivity, trial
from pytest_flashattn.cases import Case
from pytest_flashattn.chapters import CHAPTERS
from pytest_flashattn.checks.registry import checks_of
from pytest_flashattn.features import DTYPES, FEATURES, FP8
from pytest_flashattn.implementation import Implementation, load
from pytest_flashattn.inputs import TORCH_DTYPES, make_inputs
from pytest_flashattn.sensitivity import COPY, MEAN, ZEROS
from pytest_flashattn.support import Support
from pytest_flashattn.tolerances import limits
from pytest_flashattn.verdict import Measure, Verdict

sys.path.insert(0, str(Path(__file__).parents[2] / "measurements"))
from sensitivity import asked, cases, examine


@pytest.mark.parametrize(("level", "scores"), [("smoke", 1e9), ("default", 1e5)])
def test_no_case_accepts_what_was_never_computed(level: str, scores: float) -> None:
    """In the arithmetic of a kernel that declares nothing; `measurements/sensitivity.py` has the others, and full."""
    posed = [(case, chapters) for case, chapters in cases(level).items() if case.q * case.k <= scores]
    assert len(posed) > 60
    for case, chapters in posed:
        for backward, through_lse in asked(chapters):
            _, spots, _ = next(examine(case, backward=backward, lse_gradient=through_lse))
            assert not spots, (case.id, spots)


PLAIN = "bf16-b1-h2-q20-k20-d64"
BY_DESIGN = [
    ("bf16-b1-h2-q20-k0-d64", ZEROS, "o", True),
    ("bf16-b1-h2-q20-k1-d64", ZEROS, "o", False),
    ("bf16-b1-h2-q20-k1-d64", MEAN, "o", True),
    ("bf16-b1-h2-q20-k1-d64", COPY, "o", True),
    ("bf16-b1-h2-q20-k1-d64", ZEROS, "dq", True),
    ("bf16-b1-h2-q20-k1-d64", ZEROS, "dk", True),
    ("bf16-b1-h2-q20-k1-d64", ZEROS, "dv", False),
    ("bf16-b1-h2-q20-k1-d64-sinks", MEAN, "o", False),
    ("bf16-b1-h2-q20-k1-d64-sinks", ZEROS, "dq", False),
    (f"{PLAIN}-w0.0", COPY, "o", True),
    (f"{PLAIN}-w0.0", ZEROS, "dq", True),
    ("bf16-b1-h2-q20-k3-d32-mask.b11k", COPY, "o", False),  # all rows see one key, the same
    (f"{PLAIN}-w1.0", COPY, "o", False),
    (f"{PLAIN}-w1.0", ZEROS, "dq", False),
    ("bf16-b1-h2-q20-k30-d64-w0.0", COPY, "o", True),
    ("bf16-b1-h2-q30-k20-d64-w0.0", COPY, "o", False),
    (f"{PLAIN}-scale0", MEAN, "o", True),
    (f"{PLAIN}-causal-scale0", MEAN, "o", False),
    (f"{PLAIN}-scale0-alibi", MEAN, "o", False),
    (f"{PLAIN}-scale0-bias.11qk", MEAN, "o", False),
    (f"{PLAIN}-scale0-bias.bhqk-holes", MEAN, "o", False),
    (f"{PLAIN}-scale0-bias.1h11", MEAN, "o", True),
    (f"{PLAIN}-scale0-mask.11qk", MEAN, "o", False),
    (f"{PLAIN}-scale0", ZEROS, "dk", True),
    (f"{PLAIN}-scale0", ZEROS, "dv", False),
    (f"{PLAIN}-constant", MEAN, "o", True),
    (f"{PLAIN}-constant", ZEROS, "dq", True),
    (f"{PLAIN}-constant", ZEROS, "dk", False),
    (f"{PLAIN}-do.zero", ZEROS, "dv", True),
    (f"{PLAIN}-do.zero", ZEROS, "o", False),
    (f"{PLAIN}-bias.1h11", ZEROS, "dbias", True),
    (f"{PLAIN}-bias.b11k", ZEROS, "dbias", False),
    (f"{PLAIN}-bias.1h11-sinks", ZEROS, "dbias", False),
    (f"{PLAIN}-scale0-w0.0", ZEROS, "lse", True),
    (f"{PLAIN}-scale0-w0.0-alibi", ZEROS, "lse", True),
    (f"{PLAIN}-scale0-w0.0-bias.11qk", ZEROS, "lse", False),
    (f"{PLAIN}-w0.0", ZEROS, "lse", False),
    (f"{PLAIN}-sinks", ZEROS, "dsinks", False),
    ("bf16-b0-h2-q20-k20-d64-sinks", ZEROS, "dsinks", True),
]


@pytest.mark.parametrize(("case", "null", "quantity", "right"), BY_DESIGN)
def test_an_exception_is_one_and_its_neighbour_is_none(case: str, null: str, quantity: str, right: bool) -> None:
    """What is said to follow from the case does: the null result is within the bound there, and only there."""
    inputs = make_inputs(Case.parse(case))
    spec = inputs.spec()
    arithmetic = oracles.Arithmetic.of(TORCH_DTYPES[inputs.case.dtype])
    truth = oracles.evaluate(inputs.q, inputs.k, inputs.v, spec, do=inputs.dout, arithmetic=arithmetic)[quantity]
    result = dict(sensitivity.null_results(quantity, inputs, spec))[null]
    limit = truth.limit(limits(quantity, inputs.case).lam)
    passes = bool(((result == truth.value) | ((result - truth.value).abs() <= limit)).all())
    assert sensitivity.by_design(null, quantity, inputs, spec) is right
    assert passes is right


def test_a_gradient_through_the_lse_lifts_the_exceptions_it_must() -> None:
    for case, quantity, right in (
        ("bf16-b1-h2-q20-k1-d64", "dq", False),
        (f"{PLAIN}-do.zero", "dq", False),
        (f"{PLAIN}-do.zero", "dv", True),
        (f"{PLAIN}-scale0", "dq", True),
    ):
        inputs = make_inputs(Case.parse(case))
        found = sensitivity.by_design(ZEROS, quantity, inputs, inputs.spec(), lse_gradient=True)
        assert found is right, (case, quantity)


def test_a_blind_measure_verifies_nothing() -> None:
    sharp, blind = Measure("o", "bound", 0.5, 1.0), Measure("dq", "bound", 0.1, 1.0, blind="zeros")
    assert Verdict.of([sharp]).status == "verified"
    assert Verdict.of([sharp, blind]).status == "declared"
    assert Verdict.of([sharp, blind]).reason.endswith("they accept zeros as dq")
    assert Verdict.of([sharp, blind, Measure("dk", "bound", 2.0, 1.0)]).status == "failed"


class _Null(torch.autograd.Function):
    """A kernel that computes nothing: `null` for the output, zeros for the log-sum-exp and all gradients."""

    @staticmethod
    def forward(ctx: Any, null: str, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, *extra)
        lq, lk = q.shape[2], k.shape[2]
        each = v.repeat_interleave(q.shape[1] // k.shape[1], 1)
        if null == ZEROS or not lk:
            o = q.new_zeros(*q.shape[:3], v.shape[3])
        elif null == MEAN:
            o = each.double().mean(2, keepdim=True).to(v.dtype).expand(-1, -1, lq, -1).contiguous()
        else:
            o = each[:, :, (torch.arange(lq) + lk - lq).clamp(0, lk - 1)].contiguous()
        return o, torch.zeros(q.shape[:3])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if x is None or x.dtype == torch.bool else torch.zeros_like(x) for x in ctx.saved_tensors)


def computing_nothing(null: str) -> Implementation:
    def attn(
        q, k, v, *, causal=False, scale=None, window=None, softcap=None, alibi_slopes=None, bias=None, sinks=None,
        q_descale=None, k_descale=None, v_descale=None, return_lse=False,
    ):  # fmt: skip
        if v_descale is not None:
            q, k, v = q.bfloat16(), k.bfloat16(), dequantise(v, v_descale).bfloat16()
        o, lse = _Null.apply(null, q, k, v, bias, sinks)
        return (o, lse) if return_lse else o

    attn.__flashattn__ = Support(features=frozenset(FEATURES), dtypes=frozenset({*DTYPES, *FP8}))
    return load(attn, device="cpu")


RELATIONS = {  # these compare an implementation with itself, or its output with what it declares
    "contract.shape_dtype_device", "contract.inputs_unchanged", "contract.output_is_fresh",
    "contract.fresh_memory_has_no_effect", "contract.same_call_twice", "contract.undeclared_features_raise",
}  # fmt: skip
RIGHT = {
    "backward.zero_dout_gives_zero_gradients": {ZEROS, MEAN, COPY},  # dO = 0: zero gradients are what it asks for
    "gqa.head_map": {MEAN, COPY},  # V is constant
    "metamorphic.ones_value": {MEAN, COPY},  # V is 1
}


@pytest.mark.parametrize("null", [ZEROS, MEAN, COPY])
def test_the_suite_fails_kernels_that_compute_nothing(null: str) -> None:
    """Every check but those that cannot, on every smoke case but the one without rows."""
    kernel = computing_nothing(null)
    failed = 0
    for check in (check for chapter in CHAPTERS for check in checks_of(chapter)):
        for case in matrices.cases_for(check.chapter, check.name.partition(".")[2], "smoke", 0):
            status = trial.run_check(check.name, kernel, case, diagnose=False).status
            harmless = check.name in RELATIONS or null in RIGHT.get(check.name, ()) or case.q == 0
            assert status == "failed" or harmless, (check.name, case.id, status)
            failed += status == "failed"
    assert failed >= 70


def test_arithmetic_that_leaves_nothing_to_judge_is_declared() -> None:
    """In tf32 no logit near 1e5 is known to better than 100: the limits accept zeros, a right kernel proves nothing."""

    def attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    case = Case.parse("fp32-b1-h1-q128-k128-d96-offset")
    verdict = trial.run_check("forward.matches_oracle", load(attn, device="cpu"), case)
    assert verdict.status == "verified"
    attn.__flashattn__ = Support(features={"backward"}, tf32=True)  # type: ignore[attr-defined]
    verdict = trial.run_check("forward.matches_oracle", load(attn, device="cpu"), case)
    assert verdict.status == "declared"
    assert "accept zeros, the mean of V, a copy of V as o" in verdict.reason
