"""Grouped heads: query head h reads kv head h // (Hq // Hkv)."""

from __future__ import annotations

import torch

from .. import attempt
from ..cases import Case
from ..examination import examine, inputs_for
from ..implementation import Implementation
from ..verdict import Measure, Verdict
from .registry import check


@check()
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """Output, log-sum-exp and gradients of grouped heads within their bounds."""
    return examine(implementation, inputs_for(implementation, case))


@check()
def head_map(implementation: Implementation, case: Case) -> Verdict:
    """Each kv head holds one constant value, so the output names the kv head that each query head read."""
    inputs = inputs_for(implementation, case)
    constants = torch.arange(1, case.kv_heads + 1, dtype=inputs.v.dtype, device=inputs.v.device)
    v = constants[None, :, None, None].expand(inputs.v.shape).contiguous()
    o = attempt.forward(implementation, inputs.with_(v=v))["o"].double()
    group = case.heads // case.kv_heads
    want = constants.double().repeat_interleave(group)[None, :, None, None]
    error = (o - want).abs()
    # P rounded to 16 bits sums to 1 within an ulp; neighbouring heads differ by 1, so 0.25 separates them with ease.
    read = o.mean((0, 2, 3)).nan_to_num().round().int().tolist()
    bad = ~(error < 0.25)
    ratio = float("nan") if error.isnan().any() else float(error.max()) / 0.25
    heads = [h // group for h in range(case.heads)]
    note = f"where: query heads read kv heads {[r - 1 for r in read]}, want {heads}" if bad.any() else ""
    measure = Measure("o", "bound", ratio, 0.25, int(bad.sum()), o.numel(), note=note)
    return Verdict.of([measure], reason="the map from query heads to kv heads is not h // (Hq // Hkv)")
