"""Relations that hold for every attention function, whatever the oracle says."""

from __future__ import annotations

import torch

import oracles

from .. import attempt
from ..cases import Case
from ..examination import inputs_for, judge, truth
from ..implementation import Implementation
from ..judge import against_bound, against_value, ulp
from ..tolerances import limits
from ..verdict import Verdict
from .registry import check


@check()
def key_permutation(implementation: Implementation, case: Case) -> Verdict:
    """Keys and values permuted alike give the same output: every key is visited, none twice."""
    inputs = inputs_for(implementation, case)
    order = torch.randperm(case.k, generator=torch.Generator().manual_seed(case.rng_seed)).to(inputs.k.device)
    moved = inputs.with_(k=inputs.k[:, :, order], v=inputs.v[:, :, order])
    o = attempt.forward(implementation, moved)["o"]
    # The truth of the unpermuted problem is the truth of this one.
    return Verdict.of(judge(implementation, inputs, {"o": o}), reason="keys and values were permuted alike")


@check()
def batch_slice(implementation: Implementation, case: Case) -> Verdict:
    """The last batch element alone gives what it gives among others."""
    inputs = inputs_for(implementation, case)
    part = inputs.with_(q=inputs.q[-1:], k=inputs.k[-1:], v=inputs.v[-1:], dout=inputs.dout[-1:])
    o = attempt.forward(implementation, part)["o"]
    return Verdict.of(judge(implementation, part, {"o": o}), reason=f"batch element {case.batch - 1} alone")


@check()
def head_slice(implementation: Implementation, case: Case) -> Verdict:
    """The last kv head with its query heads alone gives what it gives among others."""
    inputs = inputs_for(implementation, case)
    group = case.heads // case.kv_heads
    part = inputs.with_(q=inputs.q[:, -group:], k=inputs.k[:, -1:], v=inputs.v[:, -1:], dout=inputs.dout[:, -group:])
    o = attempt.forward(implementation, part)["o"]
    return Verdict.of(
        judge(implementation, part, {"o": o}), reason=f"query heads {case.heads - group}-{case.heads - 1} alone"
    )


@check()
def ones_value(implementation: Implementation, case: Case) -> Verdict:
    """V = 1: the output is 1 within an ulp (fp32, or a coarser P: within the bound), 0 on rows without keys."""
    inputs = inputs_for(implementation, case)
    inputs = inputs.with_(v=torch.ones_like(inputs.v))
    o = attempt.forward(implementation, inputs)["o"]
    expected = truth(implementation, inputs)["o"]
    # An ulp of the output is the rule where P is as fine as the output; a P declared as coarser has its own bound.
    if case.dtype == "fp32" or (case.dtype == "fp16" and implementation.support.p_dtype == "bf16"):
        return Verdict.of([against_bound("o", o, expected, limits("o", case).lam)], reason=ONES)
    step = ulp(1.0, o.dtype)
    within = against_value("o", o, expected.value, torch.full_like(expected.value, step))
    # Rounding is as often up as down: over many rows it cancels, and what is left is a P that was truncated.
    rows = max(int(expected.value[..., 0].sum()), 1)
    drift = (o.double() - expected.value).mean((0, 1, 2, 3), keepdim=True)
    mean = against_value(
        "mean of o - 1", drift, torch.zeros_like(drift), torch.full_like(drift, 2.5 * step / rows**0.5)
    )
    return Verdict.of([within, mean], reason=ONES)


ONES = "with V = 1 every output is the sum of a softmax"


@check()
def onehot_value(implementation: Implementation, case: Case) -> Verdict:
    """Column d of V is 1 at one key only: the output holds that key's probability, exactly 0 where it is masked."""
    inputs = inputs_for(implementation, case)
    v = torch.zeros_like(inputs.v)
    # The first and last keys and the tile edges come first: they are the ones that masks and tails get wrong.
    edges = [0, case.k - 1, case.k // 2, *(e + s for e in (16, 32, 64, 128) for s in (-1, 0))]
    keys = list(dict.fromkeys(j for j in [*edges, *range(case.k)] if 0 <= j < case.k))[: case.dv]
    for column, key in enumerate(keys):
        v[:, :, key, column] = 1
    inputs = inputs.with_(v=v)
    o = attempt.forward(implementation, inputs)["o"]
    return Verdict.of(
        judge(implementation, inputs, {"o": o}, noise=False),
        reason=f"column d of the output is the probability of key {keys[:6]}…",
    )


@check(needs=("lse",))
def split_and_merge(implementation: Implementation, case: Case) -> Verdict:
    """Two parts of the keys, merged by their log-sum-exp, are the whole: output and log-sum-exp belong together."""
    inputs = inputs_for(implementation, case)
    cut = case.k // 3
    pieces = [
        inputs.with_(k=inputs.k[:, :, part], v=inputs.v[:, :, part]) for part in (slice(0, cut), slice(cut, None))
    ]
    (a, b), (truth_a, truth_b) = (
        [attempt.forward(implementation, piece, lse=True) for piece in pieces],
        [truth(implementation, piece) for piece in pieces],
    )
    o, lse = oracles.merge(a["o"].double(), a["lse"].double(), b["o"].double(), b["lse"].double())
    whole = truth(implementation, inputs)
    # The merge is linear in the parts' outputs, with weights that only their log-sum-exps decide.
    weight_a, weight_b = ((t["lse"].value - whole["lse"].value).exp() for t in (truth_a, truth_b))
    lam_o, lam_lse = (limits(name, case).lam for name in ("o", "lse"))
    lse_a, lse_b = (t["lse"].limit(lam_lse) for t in (truth_a, truth_b))
    allowed_lse = weight_a * lse_a + weight_b * lse_b
    moved = (truth_a["o"].value - truth_b["o"].value).abs() * (weight_a * weight_b * (lse_a + lse_b))[..., None]
    allowed_o = (
        weight_a[..., None] * truth_a["o"].limit(lam_o) + weight_b[..., None] * truth_b["o"].limit(lam_o) + moved
    )
    return Verdict.of(
        [
            against_value("o", o, whole["o"].value, allowed_o),
            against_value("lse", lse, whole["lse"].value, allowed_lse),
        ],
        reason=f"keys 0-{cut - 1} and {cut}-{case.k - 1} were merged by their log-sum-exp",
    )
