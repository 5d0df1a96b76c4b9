"""Alternatives with a number or a map in them that is fitted to what was returned."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..localise import ranges
from .alternative import Alternative
from .match import Sample
from .model import Problem, forward

KEYS = 512
"""The most keys whose counts are fitted."""

SYSTEM = 2**20
"""Elements of the linear system that is solved for them."""

STEP = 1e-3
ROUNDS = 6
PRECISION = 1e-4
"""A fitted scale nearer to 1 is no finding."""


def scale(p: Problem, sample: Sample) -> Alternative | None:
    """The factor of the scale that explains the error best, by Gauss-Newton on one unknown."""
    if not p.scale or not p.lk or not sample.got.isfinite().all():
        return None
    factor = 1.0
    for _ in range(ROUNDS):
        here, more = (forward(replace(p, scale=p.scale * f)).o for f in (factor, factor * (1 + STEP)))
        slope = (more - here) / (factor * STEP)
        size = float(slope.square().sum())
        if not size:
            return None
        factor += float(((sample.got - here) * slope).sum()) / size
        if not 0.05 < factor < 20:
            return None
    if abs(factor - 1) < PRECISION:
        return None
    sentence = f"scores are {factor:.5g} x what they should be: the scale, or a factor of it, is imprecise or wrong"
    return Alternative("scale-fitted", sentence, lambda p: replace(p, scale=p.scale * factor))


def head_map(p: Problem, sample: Sample) -> Alternative | None:
    """The kv head that explains each query head best, when that is not the right one everywhere."""
    hkv = p.k.shape[1]
    if not 1 < hkv <= 16:
        return None
    errors = []
    for head in range(hkv):
        out = forward(replace(p, heads=torch.full_like(p.heads, head)))
        errors.append((sample.got - out.o).nan_to_num(nan=1e30).square().sum((0, 2, 3)))
    read = torch.stack(errors).argmin(0)
    if torch.equal(read, p.heads):
        return None
    return Alternative(
        "head-map", f"query heads read kv heads {read.tolist()} instead of {p.heads.tolist()}",
        lambda p: replace(p, heads=read),
    )  # fmt: skip


def key_counts(p: Problem, sample: Sample) -> Alternative | None:
    """Keys that are lost or count twice in the wrong rows, whichever they are.

    A key j that counts 1 + d times moves o by d p_j (v_j - o), to first order: the d of all keys are found by least
    squares over the wrong rows, and rounded.
    """
    rows = sample.wrong_rows.nonzero()
    if not 2 <= p.lk <= KEYS or not sample.error.isfinite().all():
        return None
    most = max(SYSTEM // (p.lk * p.v.shape[-1]), 1)
    rows = rows[torch.linspace(0, len(rows) - 1, min(most, len(rows)), device=rows.device).long()]
    b, h, i = rows.unbind(1)
    weights, v, want = forward(p).p[b, h, i], p.v[:, p.heads][b, h], sample.want[b, h, i]
    system = (weights[..., None] * (v - want[:, None])).mT.flatten(0, 1)  # (rows * Dv, Lk)
    normal = system.mT @ system
    if not normal.any():
        return None
    ridge = 1e-9 * normal.diagonal().max() * torch.eye(p.lk, dtype=normal.dtype, device=normal.device)
    moved: Tensor = torch.linalg.solve(normal + ridge, system.mT @ sample.error[b, h, i].flatten())
    count = (1 + moved).round().clamp(0, 2)
    lost, twice = ((count == times).nonzero().flatten().tolist() for times in (0, 2))
    if not 0 < len(lost) + len(twice) < p.lk:
        return None
    said = [f"{_keys(lost)} {'has' if len(lost) == 1 else 'have'} no effect"] if lost else []
    said += [f"{_keys(twice)} {'counts' if len(twice) == 1 else 'count'} twice"] if twice else []
    return Alternative("key-counts", ", ".join(said), lambda p: replace(p, count=count))


def _keys(keys: list[int]) -> str:
    return f"key{'s' if len(keys) > 1 else ''} {ranges(keys)}"
