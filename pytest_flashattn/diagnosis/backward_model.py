"""The backward in float64, every factor of which can be replaced. Shapes as in `model`, all query rows.

P = exp(s - lse);  dP = dO V^T;  dS = P o (dP - Delta);  Delta = sum_d dO * O - dlse
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oracles.spec import reduce_to

from .model import Problem, capped, forward, products

Gradients = dict[str, Tensor]


def summed(p: Problem, x: Tensor) -> Tensor:
    """(B, Hq, Lk, ·) added up over the query heads that read the same kv head."""
    out = x.new_zeros(x.shape[0], p.k.shape[1], *x.shape[2:])
    return out.index_add_(1, p.heads, x)


@dataclass(frozen=True, eq=False)
class Tape:
    """What a backward starts from. problem: what scores are recomputed from; o, lse: what the forward saved.

    delta (B, Hq, Lq), None: computed from o, do and dlse. times_delta: a factor of it. cap: the derivative of the
    softcap is applied. keep (n, Lk): pairs that the backward visits. rounded: what P passes through; rounded_ds: dS.
    over_groups: how the query heads of a group are joined. finish: what happens to the gradients at the end.
    """

    problem: Problem
    o: Tensor
    lse: Tensor
    do: Tensor
    dlse: Tensor | None
    delta: Tensor | None = None
    times_delta: float = 1.0
    cap: bool = True
    keep: Tensor | None = None
    rounded: Callable[[Tensor], Tensor] = lambda x: x
    rounded_ds: Callable[[Tensor], Tensor] = lambda x: x
    over_groups: Callable[[Problem, Tensor], Tensor] = summed
    finish: Callable[[Tape, Gradients], Gradients] = lambda tape, out: out
    wanted: frozenset[str] = field(default_factory=frozenset)


def start(p: Problem, dlse: Tensor | None, wanted: frozenset[str]) -> Tape:
    """The right backward of the problem; wanted: "dq", "dbias", …"""
    out = forward(p)
    return Tape(p, out.o, out.lse, p.inputs.dout.double(), dlse, wanted=wanted)


def delta_of(tape: Tape) -> Tensor:
    """(B, Hq, Lq)."""
    delta = tape.delta if tape.delta is not None else (tape.do * tape.o).sum(-1)
    delta = delta * tape.times_delta
    return delta if tape.dlse is None else delta - tape.dlse


def gradients(tape: Tape) -> Gradients:
    """dq, dk, dv, and dbias and dsinks where they are wanted; float64."""
    p = tape.problem
    s = p.build(p)
    lse = tape.lse.masked_fill(tape.lse == -torch.inf, 0)[..., None]
    prob = tape.rounded(torch.exp(s - lse))
    if tape.keep is not None:
        prob = prob * tape.keep
    delta = delta_of(tape)
    ds = prob * (tape.do @ p.v[:, p.heads].mT - delta[..., None])
    dx = ds
    if p.softcap is not None and tape.cap:
        y = capped(p, products(p) * p.scale) / p.softcap
        dx = ds * (1 - y * y)
    dx = tape.rounded_ds(dx)
    out = {
        "dq": p.scale * (dx @ p.k[:, p.heads]),
        "dk": tape.over_groups(p, p.scale * (dx.mT @ p.q)),
        "dv": tape.over_groups(p, prob.mT @ tape.do),
    }
    if "dbias" in tape.wanted and p.inputs.bias is not None:
        out["dbias"] = reduce_to(ds, tuple(p.inputs.bias.shape))
    if "dsinks" in tape.wanted and p.inputs.sinks is not None:
        out["dsinks"] = torch.zeros_like(p.inputs.sinks).double()
        if p.sinks is not None:
            out["dsinks"] = -(torch.exp(p.sinks[None] - tape.lse) * delta).sum((0, 2))
    return tape.finish(tape, out)
