"""Would a kernel that computes nothing have passed this case? If so, the case judges nothing.

Null results: zeros, the mean of V and a copy of V for the output, zeros for everything else. Each must lie beyond the
element bound somewhere. Where a null result is the right answer, that follows from the case, never from the numbers:

    zeros      o, d*          no row sees a key
    zeros      d*             dO is zero
    zeros      dq, dk         scale is 0
    zeros      dq, dk, dbias  every row sees at most one key: the softmax over it is 1, whatever its score
    zeros      dq             family "constant": all keys are alike, and over the keys dS sums to 0
    zeros      dbias          the bias is broadcast over the keys: again the sum of dS
    zeros      lse            scale is 0, and every row sees one key, without a bias (with ALiBi: its own key)
    mean of V  o              every row sees all keys, and its scores are equal
    copy of V  o              every row sees the key on which it stands and no other, or the only one there is

Not so with sinks, which take their share of every softmax, nor where a gradient through the log-sum-exp is added to dS
(dv does not know it, and a scale of 0 is one all the same).
Empty tensors judge nothing and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracles import AttentionSpec, Truth

from .inputs import Inputs, output_dtype
from .tolerances import limits

ZEROS, MEAN, COPY = "zeros", "the mean of V", "a copy of V"


def blind_spots(
    inputs: Inputs, truths: Mapping[str, Truth], alignment: str, *, lse_gradient: bool = False
) -> dict[str, str]:
    """By quantity, the null results that pass without being the answer by design; quantities that have none are absent.

    truths: by quantity ("o", "lse", "dq", …), with the bounds of the arithmetic that was declared. alignment: of the
    implementation's diagonal. lse_gradient: inputs.dlse flows in through the log-sum-exp.
    """
    spec = inputs.spec(alignment)
    found: dict[str, str] = {}
    for quantity, truth in truths.items():
        limit = truth.limit(limits(quantity, inputs.case).lam)
        blind = [
            null
            for null, result in (null_results(quantity, inputs, spec) if truth.value.numel() else ())
            if bool(((result == truth.value) | ((result - truth.value).abs() <= limit)).all())
            and not by_design(null, quantity, inputs, spec, lse_gradient=lse_gradient)
        ]
        if blind:
            found[quantity] = ", ".join(blind)
    return found


def null_results(quantity: str, inputs: Inputs, spec: AttentionSpec) -> Iterator[tuple[str, Tensor]]:
    """What a kernel that computes nothing may return as `quantity`: float64, broadcastable to its shape."""
    yield ZEROS, torch.zeros((), dtype=torch.float64, device=inputs.q.device)
    lq, lk = inputs.q.shape[2], inputs.k.shape[2]
    if quantity != "o" or not lk:
        return
    v = inputs.exact()[2].repeat_interleave(inputs.q.shape[1] // inputs.v.shape[1], 1)
    yield MEAN, v.double().mean(2, keepdim=True).to(output_dtype(inputs.case)).double()
    stand = spec.diagonal(torch.arange(lq, device=v.device), lq, lk)
    yield COPY, v[:, :, stand.clamp(0, lk - 1)].double()


def by_design(null: str, quantity: str, inputs: Inputs, spec: AttentionSpec, *, lse_gradient: bool = False) -> bool:
    """Whether the case has the null result for its right answer: the table of the module docstring."""
    case, keys, sees = inputs.case, inputs.k.shape[2], sight(inputs, spec)
    level = inputs.bias is None or inputs.bias.shape[3] == 1
    flat = (case.scale == 0 or case.family == "constant") and not case.alibi and level
    single, open_ = sees.least == sees.most == 1, inputs.sinks is not None or lse_gradient
    if null == MEAN:
        return inputs.sinks is None and sees.least == keys and (flat or keys == 1)
    if null == COPY:
        return inputs.sinks is None and single and (sees.own or keys == 1)
    if quantity == "lse":
        unmoved = inputs.bias is None and (sees.own or not case.alibi)
        return inputs.sinks is None and single and case.scale == 0 and unmoved
    if sees.most == 0 or not inputs.q.numel():
        return quantity != "dsinks" or not lse_gradient or not inputs.q.numel()
    if case.dout == "zero" and (quantity == "dv" or not lse_gradient):
        return quantity != "o"
    if quantity in ("dq", "dk") and case.scale == 0:
        return True
    if sees.most == 1 and quantity in ("dq", "dk", "dbias"):
        return not open_
    return not open_ and ((quantity == "dq" and case.family == "constant") or (quantity == "dbias" and level))


@dataclass(frozen=True)
class Sight:
    """least, most: how many keys a row sees. own: every row sees the key on which it stands."""

    least: int
    most: int
    own: bool


def sight(inputs: Inputs, spec: AttentionSpec) -> Sight:
    """What the rows see. Without a mask or holes in closed form, for a tensor (Lq, Lk) may be too large."""
    lq, lk, device = inputs.q.shape[2], inputs.k.shape[2], inputs.q.device
    rows, keys = torch.arange(lq, device=device), torch.arange(lk, device=device)
    stand = spec.diagonal(rows, lq, lk)
    if inputs.mask is None and not inputs.case.holes:
        left, right = spec.window or (None, None)
        if spec.causal:
            right = 0 if right is None else min(right, 0)
        first = torch.zeros_like(stand) if left is None else (stand - left).clamp(min=0)
        last = torch.full_like(stand, lk - 1) if right is None else (stand + right).clamp(max=lk - 1)
        count, own = (last - first + 1).clamp(min=0), (stand >= 0) & (stand < lk)
    else:
        seen = torch.ones(1, 1, lq, lk, dtype=torch.bool, device=device)
        if (visible := spec.visible(rows, keys, lq, lk)) is not None:
            seen = seen & visible
        if inputs.bias is not None:
            seen = seen & (inputs.bias != -torch.inf)
        count, own = seen.sum(-1), (seen & (keys == stand[:, None])).any(-1)
    if not count.numel():
        return Sight(0, 0, False)
    return Sight(int(count.min()), int(count.max()), bool(own.all()))
