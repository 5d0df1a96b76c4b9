"""The rules of other projects: what they compare with, where their limits lie, what each is known to let through."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from pytest_flashattn import attempt
from pytest_flashattn.attempt import Outputs
from pytest_flashattn.cases import Case
from pytest_flashattn.examination import inputs_for
from pytest_flashattn.implementation import load
from pytest_flashattn.inputs import TORCH_DTYPES
from pytest_flashattn.power.rules import RULES, STYLES, Baseline, baseline
from tests.mutants.core import Core, Problem

PLAIN = (
    "bf16-b2-h4-kv2-q65-k130-d64-causal",
    "fp16-b1-h2-q128-k128-d64",
    "bf16-b1-h2-q200-k65-d64-causal-w40.0",
    "fp16-b1-h2-q65-k130-d64-cap5",
)
"""N(0, 1), 16 bits, the usual scale: what all these projects test."""
OPTIONS = (
    *PLAIN,
    "fp32-b1-h4-kv2-q65-k100-d32-causal-alibi",
    "fp32-b2-h2-q65-k100-d32-bias.1hqk-holes-sinks",
    "bf16-b1-h2-q65-k100-d64-bias.11qk-holes",
    "bf16-b1-h2-q65-k100-d64-mask.b1qk-scale0p3",
    "fp16-b2-h4-kv1-q64-k64-d32-causal-sinks",
    "fp32-b1-h2-q64-k0-d64",
)


@cache
def prepared(case_id: str) -> tuple[Outputs, Baseline]:
    """What the honest core returns on a case, and what the rules compare with."""
    implementation = load(Core(), device="cpu")
    inputs = inputs_for(implementation, Case.parse(case_id))
    wrt = attempt.differentiable(implementation, inputs)
    outputs = attempt.backward(implementation, inputs, wrt=wrt, lse=True)
    return outputs, baseline(implementation, inputs, honest=[outputs])


# -- what they compare with -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case_id", OPTIONS)
@pytest.mark.parametrize("style", STYLES)
def test_references_are_attention_with_every_option(style: str, case_id: str) -> None:
    """They differ from the oracle by the rounding of their dtype, never by a forgotten option."""
    _, base = prepared(case_id)
    exact = style == "float32" or base.dtype == torch.float32
    for quantity, want in base.float64.items():
        got = base.references[style][quantity]
        assert torch.equal(got.isinf(), want.isinf())
        off = torch.where(got == want, 0.0, (got - want).abs())
        size = want.abs().nan_to_num(posinf=0.0).flatten().sort().values[-1:]  # none where there is no element
        assert (off.flatten() <= (2e-6 if exact else 3e-2) * size.clamp(min=1)).all()


def test_styles_round_where_they_say() -> None:
    _, base = prepared("bf16-b1-h2-q65-k130-d40-cap5")  # 40: a scale that is no power of two
    off = {name: float((x["o"] - base.float64["o"]).abs().mean()) for name, x in base.references.items()}
    assert off["float32"] < 1e-3 * off["mixed"]
    assert off["mixed"] < 0.9 * min(off["naive"], off["eager"], off["served"])
    assert off["served"] < 0.9 * min(off["naive"], off["eager"])  # its softcap is not rounded
    assert off["naive"] != off["eager"]


def test_a_baseline_without_gradients_has_none() -> None:
    implementation = load(Core(), device="cpu")
    base = baseline(implementation, inputs_for(implementation, Case.parse(PLAIN[0])), backward=False)
    assert set(base.float64) == set(base.honest[0]) == {"o", "lse"} == set(base.references["eager"])


# -- honest and plainly wrong outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case_id", PLAIN)
@pytest.mark.parametrize("name", RULES)
def test_rule_accepts_an_honest_kernel(name: str, case_id: str) -> None:
    outputs, base = prepared(case_id)
    wrong = [quantity for quantity, x in outputs.items() if not RULES[name].passes({quantity: x}, base)]
    assert not wrong
    assert not RULES[name].catches(outputs, base)


@pytest.mark.parametrize("quantity", ["o", "dq", "dk", "dv"])
@pytest.mark.parametrize("name", RULES)
def test_rule_rejects_what_is_no_answer(name: str, quantity: str) -> None:
    """NaN in one element, another shape, another dtype, the negative."""
    outputs, base = prepared("fp16-b1-h2-q128-k128-d64")
    good = outputs[quantity]
    spoilt = good.clone()
    spoilt[0, 1, 5, 7] = math.nan
    for bad in (spoilt, good[:, :, :-1], good.float(), -good):
        assert RULES[name].catches({**outputs, quantity: bad}, base)


def test_only_three_projects_compare_the_log_sum_exp() -> None:
    outputs, base = prepared("fp16-b1-h2-q128-k128-d64")
    base_two = {**outputs, "lse": outputs["lse"] / math.log(2)}
    caught = {name for name, one in RULES.items() if one.catches(base_two, base)}
    assert caught == {"flex", "xformers", "cudnn_frontend"}


def test_what_a_rule_rejects_of_an_honest_kernel_is_not_to_its_credit() -> None:
    """Under a large common offset of all logits float32 itself is wrong; there xFormers' rule for gradients is void."""
    outputs, base = prepared("bf16-b1-h2-q128-k128-d64-causal-offset")
    assert not RULES["xformers"].passes(outputs, base)
    assert {"dq", "dk"}.isdisjoint(base.trusted["xformers"])
    assert not RULES["xformers"].catches(outputs, base)
    assert RULES["xformers"].catches({**outputs, "o": -outputs["o"]}, base)


def test_every_honest_kernel_must_pass_for_a_rule_to_be_trusted() -> None:
    outputs, base = prepared("fp16-b1-h2-q128-k128-d64")
    assert "dq" in base.trusted["fa2"]
    narrow = dataclasses.replace(base, honest=(*base.honest, {**outputs, "dq": outputs["dq"] * 1.5}))
    assert base.trusted["fa2"] - narrow.trusted["fa2"] == {"dq"}


# -- where the limits lie ---------------------------------------------------------------------------------------------

ULP = 2.0**-10
"""Of fp16 at 1; golden below lies a quarter of it above 1, so that rounding it costs a quarter."""

LIMITS = [
    # rule, case, quantity, what it compares with, the last value that passes and the first that does not
    ("allclose_1e2", "bf16", "o", {"naive": 0.0}, 0.00994873046875, 0.01007080078125),
    ("allclose_1e2", "fp16", "dk", {"naive": 4.0}, 4.046875, 4.0546875),
    ("fa2", "bf16", "o", {"float32": 1.0, "eager": 1.25}, 1.5, 1.5078125),
    ("fa2", "bf16", "dq", {"float32": 1.0, "eager": 1.25}, 1.75, 1.7578125),
    ("fa2", "bf16-causal", "dq", {"float32": 1.0, "eager": 1.25}, 1.5, 1.5078125),
    ("fa2", "bf16-causal", "o", {"float32": 0.0, "eager": 0.0}, 9.95e-6, 1.01e-5),
    ("fa3", "bf16", "o", {"float32": 1.0, "eager": 1.25}, 1.5078125, 1.515625),
    ("fa3", "bf16", "dv", {"float32": 1.0, "eager": 1.25}, 1.5078125, 1.515625),
    ("fa3", "bf16-cap5", "o", {"float32": 1.0, "eager": 1.25}, 1.7578125, 1.765625),
    ("fa3", "fp16-cap5", "dk", {"float32": 0.0, "eager": 0.0}, 3.9e-4, 4.1e-4),
    ("sdpa", "fp16", "o", {"float32": 1 + ULP / 4}, 1 + ULP, 1 + 2 * ULP),
    ("sdpa", "fp16", "dq", {"float32": 1 + ULP / 4}, 1 + 45 * ULP, 1 + 46 * ULP),
    ("sdpa", "fp16", "dk", {"float32": 1 + ULP / 4}, 1 + 4 * ULP, 1 + 5 * ULP),
    ("sdpa", "fp16", "dv", {"float32": 1 + ULP / 4}, 1 + ULP, 1 + 2 * ULP),
    ("sdpa", "fp16-bias.1111", "dq", {"float32": 1 + ULP / 4}, 1 + 40 * ULP, 1 + 41 * ULP),
    ("sdpa", "fp16-bias.1111", "dk", {"float32": 1 + ULP / 4}, 1 + 6 * ULP, 1 + 7 * ULP),
    ("sdpa", "fp16-bias.1111", "dv", {"float32": 1 + ULP / 4}, 1 + 2 * ULP, 1 + 3 * ULP),
    ("sdpa", "fp16-bias.1111", "dbias", {"float32": 1 + ULP / 4}, 1 + 11 * ULP, 1 + 12 * ULP),
    ("sdpa", "fp32", "o", {"float64": 0.0, "float32": 0.0}, 0.99e-5, 1.01e-5),
    ("sdpa", "fp32", "o", {"float64": 0.0, "float32": 1e-5}, 3.9e-5, 4.1e-5),
    ("flex", "bf16", "o", {"float64": 0.0, "mixed": 0.5}, 0.546875, 0.5546875),
    ("flex", "fp32", "dq", {"float64": 0.0, "mixed": 0.5}, 4.99, 5.01),
    ("flex", "bf16", "lse", {"float64": 0.0, "mixed": 0.5}, 4.99, 5.01),
    ("xformers", "bf16", "o", {"float32": 0.0}, 1.99e-2, 2.01e-2),
    ("xformers", "fp16", "o", {"float32": 1.0}, 1 + 4 * ULP, 1 + 5 * ULP),
    ("xformers", "fp32", "o", {"float32": 1.0}, 1.000319, 1.000321),
    ("xformers", "bf16", "dq", {"float32": 1.0}, 1.796875, 1.8046875),
    ("xformers", "fp16", "dv", {"float32": 1.0}, 1.109, 1.111),
    ("xformers", "fp32", "dk", {"float32": 1.0}, 1.00059, 1.00061),
    ("xformers", "bf16", "lse", {"float32": 1.0}, 1.00020, 1.00022),
    ("vllm", "fp16", "o", {"served": 1.0}, 1.024, 1.026),
    ("vllm", "fp16", "dk", {"served": 0.0}, 1.49e-2, 1.51e-2),
    ("cudnn_frontend", "bf16", "o", {"float32": 0.0}, 1.99e-2, 2.01e-2),
    ("cudnn_frontend", "fp16", "dk", {"float32": 1.0}, 1.039, 1.041),
    ("cudnn_frontend", "bf16", "dk", {"float32": 0.0}, 6.98e-2, 7.03e-2),
    ("cudnn_frontend", "bf16", "dv", {"float32": 0.0}, 6.98e-2, 7.03e-2),
    ("cudnn_frontend", "bf16", "dsinks", {"float32": 0.0}, 3.9e-2, 4.1e-2),
    ("cudnn_frontend", "fp16", "lse", {"float32": 1.0}, 1.039, 1.041),
]  # fmt: skip


@pytest.mark.parametrize(("name", "case_id", "quantity", "compared", "last", "first"), LIMITS)
def test_limit(name: str, case_id: str, quantity: str, compared: dict[str, float], last: float, first: float) -> None:
    case = Case.parse(case_id)
    dtype = torch.float32 if quantity in ("lse", "dsinks") else TORCH_DTYPES[case.dtype]

    def made(value: float, dtype: torch.dtype = dtype) -> Outputs:
        return {quantity: torch.full((1, 1, 2, 4), value, dtype=dtype)}

    # A reference that the rule must not look at would show as NaN.
    references = {style: made(compared.get(style, math.nan)) for style in STYLES}
    references["float32"] = made(compared.get("float32", math.nan), torch.float32)
    base = Baseline(case, made(compared.get("float64", math.nan), torch.float64), references, (made(0.0),))
    assert RULES[name].passes(made(last), base)
    assert not RULES[name].passes(made(first), base)


def test_every_limit_of_every_rule_is_tested() -> None:
    assert {name for name, *_ in LIMITS} == set(RULES)


# -- what each lets through -------------------------------------------------------------------------------------------


def without(case_id: str, rows: slice, keys: slice) -> Outputs:
    """The output of an honest kernel but that these rows do not see these keys."""

    class Hidden(Core):
        def in_band(self, p: Problem, row: Tensor, key: Tensor) -> Tensor:
            gone = torch.zeros(p.lq + self.block_q, p.lk + self.block_k, dtype=torch.bool)
            gone[rows, keys] = True
            return super().in_band(p, row, key) & ~gone[row, key]

    implementation = load(Hidden(), device="cpu")
    return attempt.forward(implementation, inputs_for(implementation, Case.parse(case_id)))


def scaled(case_id: str, quantity: str, factor: float, rows: slice = slice(None)) -> Outputs:
    """One quantity of the honest kernel, these of its rows times `factor`."""
    x = prepared(case_id)[0][quantity].clone()
    x[0, 0, rows] *= factor
    return {quantity: x}


LONG = "bf16-b1-h1-q16-k16384-d64"
CAUSAL = "bf16-b1-h1-q512-k512-d64-causal"
SHORT = "bf16-b1-h1-q128-k128-d64"
WIDE = "bf16-b4-h8-q64-k512-d64"
LAST = slice(-1, None)
BLIND: dict[str, tuple[str, Callable[[], Outputs]]] = {
    "allclose_1e2": (LONG, lambda: without(LONG, slice(None), slice(8192, 8256))),
    "fa2": (CAUSAL, lambda: without(CAUSAL, slice(511, 512), slice(5, 6))),
    "fa3": (LONG, lambda: without(LONG, slice(None), slice(8192, 8256))),
    "sdpa": (SHORT, lambda: scaled(SHORT, "dq", 0.75)),
    "flex": (WIDE, lambda: scaled(WIDE, "o", 0.8, LAST)),
    "xformers": (LONG, lambda: scaled(LONG, "dq", 0)),
    "vllm": (LONG, lambda: without(LONG, slice(None), slice(8192, 8256))),
    "cudnn_frontend": (LONG, lambda: scaled(LONG, "dk", 0)),
}


@pytest.mark.parametrize("name", RULES)
def test_known_blind_spot(name: str) -> None:
    """A tile or a key lost, gradients zero or a quarter too small, one row too small: accepted where it is trusted."""
    case_id, make = BLIND[name]
    wrong, (honest, base) = make(), prepared(case_id)
    for quantity, x in wrong.items():
        assert quantity in base.trusted[name]
        off, usual = ((y - base.float64[quantity]).abs().amax(-1) for y in (x, honest[quantity]))
        assert (off > 4 * usual).any()
    assert RULES[name].passes(wrong, base)
