"""Wrong descales of FP8 inputs, a wrong scale of P, and bits read in the other format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oracles.quantise import spread

from .alternative import TILES, Alternative
from .forward_softmax import running
from .model import Problem, Weights, denominator, peak, softmax

OTHER = {torch.float8_e4m3fn: torch.float8_e5m2, torch.float8_e5m2: torch.float8_e4m3fn}
WORDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
NAMES = ("q", "k", "v")
GROUPS = ("qkv", "q", "k", "v", "qk", "kv")
"""Tensors that one fault touches, the commonest first."""

P_SCALES = (256.0, 448.0)
TOO_LARGE = (512.0, 1024.0, 2048.0, 4096.0)
"""Scales of P: the usual ones of e4m3, and those that it cannot hold."""

Edit = Callable[[Tensor], Tensor]


def descales(p: Problem) -> list[Alternative]:
    """Alternatives for the descales of this problem; none where it has none."""
    if p.inputs.q_descale is None:
        return []
    tables = (_edited, _swapped, _q_by_kv_head, _rescaled, _zero_blocks, _other_format, _scale_of_p)
    return [alternative for table in tables for alternative in table(p)]


def _of(p: Problem, name: str) -> Tensor:
    descale: Tensor = getattr(p.inputs, f"{name}_descale")
    return descale


def _with(p: Problem, read: dict[str, Tensor]) -> Problem:
    """The problem with other descales for some tensors, each in a shape that the contract has for it."""
    changed = p.inputs.with_(**{f"{name}_descale": x for name, x in read.items()})
    q, k, v = changed.exact()
    return replace(p, q=q[:, :, p.rows], k=k, v=v)


def _edits(x: Tensor) -> Iterator[tuple[str, str, Edit]]:
    """(name, what it does to the descales of {}, how) for descales like x."""
    yield "ignored", "the descale of {} has no effect", torch.ones_like
    yield "twice", "the descale of {} is applied twice", torch.square
    yield "inverse", "{} is divided by its descale instead of multiplied", torch.reciprocal
    if x.dim() > 1 and x.shape[1] > 1:
        yield "first-head", "the descale of {} is that of its first head for all heads", lambda x: x[:, :1].expand_as(x)
    if x.dim() > 1 and x.shape[0] > 1:
        said = "the descale of {} is that of the first batch element for all"
        yield "first-batch", said, lambda x: x[:1].expand_as(x)
    if x.dim() > 2 and x.shape[2] > 1:
        yield "first-block", "the descale of {} is that of its first block for all", lambda x: x[..., :1].expand_as(x)
        yield "block-before", "a block of {} gets the descale of the block before it", lambda x: _shifted(x, -1)
        yield "block-after", "a block of {} gets the descale of the block after it", lambda x: _shifted(x, 1)


def _shifted(x: Tensor, by: int) -> Tensor:
    return x[..., (torch.arange(x.shape[-1], device=x.device) + by).clamp(0, x.shape[-1] - 1)]


def _edited(p: Problem) -> list[Alternative]:
    found = []
    for group in GROUPS:
        for name, sentence, edit in _edits(_of(p, group[-1])):
            if name in ("twice", "inverse") and len(group) > 1:
                continue
            read = {n: edit(_of(p, n)) for n in group}
            if not all(torch.equal(read[n], _of(p, n)) for n in group):
                found.append(
                    Alternative(f"descale-{name}", sentence.format(_listed(group)), lambda p, read=read: _with(p, read))
                )
    return found


def _listed(names: str) -> str:
    return names if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _swapped(p: Problem) -> list[Alternative]:
    pairs = [(a, b) for a, b in ("kv", "qk", "qv") if _of(p, a).shape == _of(p, b).shape]
    return [
        Alternative("descale-swapped", f"the descales of {a} and {b} are swapped",
                    lambda p, a=a, b=b: _with(p, {a: _of(p, b), b: _of(p, a)}))
        for a, b in pairs
    ]  # fmt: skip


def _q_by_kv_head(p: Problem) -> list[Alternative]:
    x = _of(p, "q")
    if x.dim() < 2 or p.group == 1 or x.shape[1] != len(p.heads):
        return []
    said = "the descale of q is looked up by kv head, though there is one for each query head"
    return [Alternative("descale-kv-head", said, lambda p: _with(p, {"q": x[:, p.heads]}))]


def _rescaled(p: Problem) -> list[Alternative]:
    """acc = (acc + P V) * descale: what a tile adds is multiplied by its own descale and those of all later tiles."""
    if p.case.causal:
        return []  # which tiles come later depends on the row
    x = p.inputs.v
    rows = spread(_of(p, "v").double(), x, p.inputs.blocks.kv).expand(*x.shape[:3], 1)
    found = []
    for tile in (t for t in TILES if t < p.lk):
        later = rows[:, :, ::tile].flip(2).cumprod(2).flip(2).repeat_interleave(tile, 2)[:, :, : p.lk]
        said = f"the running accumulator is multiplied by the descale of v in every tile of {tile} keys"
        v = x.double() * later
        found.append(Alternative("descale-accumulator", said, lambda p, v=v: replace(p, v=v)))
    return found


def _zero_blocks(p: Problem) -> list[Alternative]:
    """0/0 where a kernel or its quantiser scales a tile by its own maximum."""
    found = []
    for name in "kv":
        x = getattr(p, name)
        for tile in TILES:
            amax = torch.stack([part.abs().amax((2, 3)) for part in x.split(tile, 2)], -1)  # (B, H, tiles)
            if amax.numel() and not amax.all():
                bad = (amax == 0).repeat_interleave(tile, 2)[:, :, : p.lk, None]
                said = f"a tile of {name} that is all zero gives NaN: it is divided by its own maximum (0/0)"
                spoilt = {name: x.masked_fill(bad, torch.nan)}
                found.append(Alternative("descale-zero", said, lambda p, spoilt=spoilt: replace(p, **spoilt)))
                break
    return found


def _other_format(p: Problem) -> list[Alternative]:
    dtype = p.inputs.q.dtype
    said = f"the bits of q, k and v are read as {WORDS[OTHER[dtype]]}, though they are {WORDS[dtype]}"

    def change(p: Problem) -> Problem:
        q, k, v = p.inputs.with_(**{n: getattr(p.inputs, n).view(OTHER[dtype]) for n in NAMES}).exact()
        return replace(p, q=q[:, :, p.rows], k=k, v=v)

    return [Alternative("other-format", said, change)]


def _scale_of_p(p: Problem) -> list[Alternative]:
    found = []
    for scale in P_SCALES:
        said = f"the output is not divided by the scale of P, {scale:g}"
        found.append(Alternative("p-scale", said, lambda p, by=scale: replace(p, v=p.v * by)))
    for scale in TOO_LARGE:
        for tile in TILES:
            said = f"P saturates: it is multiplied by {scale:g}, and the largest number of e4m3 is 448"
            normalise = partial(_saturated, most=448 / scale, tile=tile)
            found.append(Alternative("p-saturates", said, lambda p, n=normalise: replace(p, normalise=n)))
    return found


def _saturated(p: Problem, s: Tensor, most: float, tile: int) -> Weights:
    """P that is cut off at `most` of its maximum so far, with a right denominator."""
    m, so_far = peak(s), running(p, s, tile)
    _, total = denominator(p, s, m)
    cut = torch.exp(s - so_far).clamp_max(most) * torch.exp(so_far - m)
    return Weights(cut / total.masked_fill(total == 0, 1), softmax(p, s).lse)
