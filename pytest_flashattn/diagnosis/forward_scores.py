"""Wrong scale and softcap, and head dims that are lost or made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .alternative import TILES, Alternative, Family
from .model import LOG2E, Problem, capped, distance, masked, products


def _scaled(
    name: str, sentence: str, scale: Callable[[Problem], float], when: Callable[[Problem], bool]
) -> Alternative:
    return Alternative(f"scale-{name}", sentence, lambda p: replace(p, scale=scale(p)), when)


def _default(p: Problem) -> float:
    return 1 / math.sqrt(p.q.shape[-1])


def _own(p: Problem) -> bool:
    return p.case.scale is not None and p.case.scale != _default(p)


SCALE: tuple[Alternative, ...] = (
    _scaled("ignored", "the scale argument is ignored and D^-0.5 used", _default, _own),
    _scaled("missing", "scores are not scaled at all", lambda p: 1.0, lambda p: p.scale != 1),
    _scaled("twice", "scores are scaled twice", lambda p: p.scale**2, lambda p: p.scale != 1),
    _scaled("no-root", "scores are divided by D, not by its root", lambda p: 1 / p.q.shape[-1], lambda p: not _own(p)),
    _scaled("from-dv", "the scale is taken from the value dim: Dv^-0.5", lambda p: 1 / math.sqrt(p.v.shape[-1]),
            lambda p: p.case.scale is None and p.v.shape[-1] != p.q.shape[-1]),
    _scaled("sign", "the sign of the scale is lost", lambda p: -p.scale, lambda p: p.scale < 0),
    _scaled("log2e", "log2(e) is multiplied into the scale once too often", lambda p: p.scale * LOG2E,
            lambda p: p.scale != 0),
    _scaled("ln2", "exp2 is used for exp, and log2(e) is missing in the scale", lambda p: p.scale / LOG2E,
            lambda p: p.scale != 0),
)  # fmt: skip


def _added(p: Problem, s: Tensor) -> Tensor:
    if p.slopes is not None:
        s = s - p.slopes * distance(p).abs()
    return s if p.bias is None else s + p.bias


def _softcap(name: str, sentence: str, cap: Callable[[Problem, Tensor], Tensor]) -> Alternative:
    """cap: from products q k^T to scores before ALiBi, bias and masks."""

    def build(p: Problem) -> Tensor:
        return masked(p, _added(p, cap(p, products(p))))

    return Alternative(f"softcap-{name}", sentence, lambda p: replace(p, build=build), _capped)


def _capped(p: Problem) -> bool:
    return p.softcap is not None


def _last(p: Problem) -> Tensor:
    return masked(p, capped(p, _added(p, products(p) * p.scale)))


def _tanh(p: Problem, s: Tensor) -> Tensor:
    return torch.tanh(s / (p.softcap or 1.0))


SOFTCAP: tuple[Alternative, ...] = (
    _softcap("ignored", "the softcap is ignored", lambda p, x: x * p.scale),
    _softcap("formula", "the softcap is s * tanh(s), not c * tanh(s / c)",
             lambda p, x: x * p.scale * torch.tanh(x * p.scale)),
    _softcap("unscaled", "the softcap is tanh(s / c), without the factor c", lambda p, x: _tanh(p, x * p.scale)),
    _softcap("before-scale", "the softcap is applied before the scale", lambda p, x: capped(p, x) * p.scale),
    Alternative("softcap-last", "the softcap is applied after ALiBi or the bias was added, not before",
                lambda p: replace(p, build=_last),
                lambda p: _capped(p) and (p.slopes is not None or p.bias is not None)),
)  # fmt: skip


def softcap_after_mask(p: Problem) -> list[Alternative]:
    """Hidden keys get -c instead of -inf, in all tiles or in those only that hold a visible key."""
    if p.softcap is None or p.visible() is None:
        return []
    sentence = "the softcap is applied after the mask: hidden keys get a score of -c instead of -inf"
    return [
        Alternative(
            "softcap-after-mask",
            sentence,
            lambda p, t=tile: replace(p, hidden=-(p.softcap or 0.0), reach=reach(p, t)),
        )
        for tile in (None, *TILES)
    ]


def reach(p: Problem, tile: int | None) -> Tensor | None:
    """(n, Lk): what a loop over tiles of this size computes at all; None: everything."""
    return None if tile is None else visited(p, tile)


def visited(p: Problem, tile: int) -> Tensor:
    """(n, Lk): pairs in square tiles that the band reaches; a loop over key tiles computes these and no others."""
    seen = torch.ones(len(p.rows), p.lk, dtype=torch.bool, device=p.q.device)
    left, right = p.sides
    first = (p.rows // tile * tile + p.diagonal)[:, None]
    start = p.keys // tile * tile
    if left is not None:
        seen &= start + tile - 1 >= first - left
    if right is not None:
        seen &= start <= first + tile - 1 + right
    return seen


def head_dims(p: Problem) -> list[Alternative]:
    """Head dims that are dropped, or padded with something else than zeros."""
    d = p.q.shape[-1]
    found = [
        Alternative(
            "head-dims",
            f"only the first {n} of {d} head dims of q and k enter the scores (a constant in the kernel, or a kernel "
            "compiled for another D)",
            lambda p, n=n: _without_dims(p, n, d),
        )
        for n in (8, 16, 32, 64, 96, 128, 160, 192, 256)
        if n < d
    ]
    for which, at in (("first", 0), ("last", d - 1)):
        sentence = f"the {which} head dim of q and k does not enter the scores"
        found.append(Alternative("head-dim-lost", sentence, lambda p, at=at: _without_dims(p, at, at + 1)))
    if pad := (1 << (d - 1).bit_length()) - d:
        sentence = f"D = {d} is padded to {d + pad} with the start of the next row instead of zeros"
        found.append(Alternative("head-dim-padding", sentence, lambda p: _into_next_row(p, pad)))
    return found


def _without_dims(p: Problem, start: int, stop: int) -> Problem:
    q = p.q.clone()
    q[..., start:stop] = 0
    return replace(p, q=q)


def _into_next_row(p: Problem, pad: int) -> Problem:
    after = p.inputs.exact()[0][:, :, (p.rows + 1) % max(p.lq, 1)].double()
    q = torch.cat([p.q, after[..., :pad]], -1)
    return replace(p, q=q, k=torch.cat([p.k, p.k.roll(-1, 2)[..., :pad]], -1))


ALTERNATIVES: tuple[Alternative, ...] = (*SCALE, *SOFTCAP)
FAMILIES: tuple[Family, ...] = (softcap_after_mask, head_dims)
