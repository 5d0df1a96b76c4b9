"""Sums and maxima of the online softmax gone wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .alternative import TILES, Alternative, Family
from .forward_scores import reach, visited
from .model import Problem, Values, Weights, denominator, peak, softmax

FP32_LARGEST = math.log(3.4e38)
FP32_SMALLEST = math.log(1.4e-45)


def running(p: Problem, s: Tensor, tile: int) -> Tensor:
    """(B, Hq, n, Lk): the running maximum after the tile of each key, 0 before there is one."""
    padded = torch.nn.functional.pad(s, (0, -s.shape[-1] % tile), value=-torch.inf)
    best: Tensor = padded.unflatten(-1, (-1, tile)).amax(-1).cummax(-1).values
    best = best.masked_fill(best == -torch.inf, 0)
    return best.repeat_interleave(tile, -1)[..., : s.shape[-1]]


def _not_rescaled(p: Problem, s: Tensor, tile: int, *, accumulator: bool, total: bool) -> Weights:
    """Keys weighed by the maximum after their tile, not the last one, in the accumulator, the denominator, or both."""
    m = peak(s)
    e, below = denominator(p, s, m)
    late = torch.exp(s - running(p, s, tile))
    if total:
        below = below - e.sum(-1, keepdim=True) + late.sum(-1, keepdim=True)
    above = late if accumulator else e
    return Weights(above / below.masked_fill(below == 0, 1), (m + below.log()).squeeze(-1))


RESCALING = (
    ("the accumulator is not rescaled", True, False),
    ("the denominator is not rescaled", False, True),
    ("neither accumulator nor denominator is rescaled", True, True),
)


def online(p: Problem) -> list[Alternative]:
    """Faults of the online softmax, which depend on where tiles end."""
    return [
        Alternative(
            "no-rescale", f"{what} when the running maximum rises (key tiles of {tile})",
            lambda p, t=tile, a=above, b=below: replace(
                p, normalise=lambda p, s: _not_rescaled(p, s, t, accumulator=a, total=b)
            ),
        )
        for tile in TILES if p.lk > tile
        for what, above, below in RESCALING
    ]  # fmt: skip


def _first_tile(p: Problem, s: Tensor, tile: int) -> Weights:
    """NaN from exp(-inf - -inf) for rows whose first visited tile is hidden as a whole."""
    weights = softmax(p, s)
    starts = visited(p, tile).int().argmax(-1) // tile * tile  # (n,)
    inside = (p.keys >= starts[:, None]) & (p.keys < starts[:, None] + tile)
    blank = ~((s > -torch.inf) & inside).any(-1, keepdim=True)
    return weights._replace(p=weights.p.masked_fill(blank, torch.nan))


def first_tile_hidden(p: Problem) -> list[Alternative]:
    if p.visible() is None and p.bias is None:
        return []
    return [
        Alternative(
            "first-tile-nan",
            f"rows whose first key tile (of {tile}) is hidden as a whole give NaN: -inf - -inf",
            lambda p, t=tile: replace(p, normalise=lambda p, s: _first_tile(p, s, t)),
        )
        for tile in TILES
    ]


def splits(p: Problem) -> list[Alternative]:
    """Split keys whose parts are joined with wrong weights."""
    sizes = {(parts, -(-p.lk // parts // tile) * tile) for parts in (2, 3, 4, 8, 16) for tile in (1, *TILES)}
    return [
        Alternative(
            "split-weights",
            f"parts of {size} keys are merged by {why}, not by their log-sum-exp",
            lambda p, n=size, w=share: replace(p, normalise=lambda p, s: _merged(p, s, n, w)),
        )
        for parts, size in sorted(sizes)
        if 0 < size < p.lk
        for why, share in (("their number of keys", None), ("equal weights, as if each had lse = 0", 1 / parts))
    ]


def _merged(p: Problem, s: Tensor, size: int, share: float | None) -> Weights:
    right = softmax(p, s)
    parts = s.split(size, -1)
    pieces = [
        torch.softmax(x, -1).nan_to_num(nan=0.0) * (x.shape[-1] / p.lk if share is None else share) for x in parts
    ]
    return right._replace(p=torch.cat(pieces, -1))


def _unnormalised(p: Problem, s: Tensor) -> Weights:
    return Weights(denominator(p, s, peak(s))[0], softmax(p, s).lse)


def _no_maximum(p: Problem, s: Tensor) -> Weights:
    """exp in float32 without a maximum: inf / inf above its range, 0 below."""
    e, total = denominator(p, s, torch.zeros_like(peak(s)))
    e = torch.where(s > FP32_LARGEST, torch.inf, torch.where(s < FP32_SMALLEST, 0.0, e))
    total = torch.where((total > 3.4e38) | (e == torch.inf).any(-1, keepdim=True), torch.inf, total)
    total = torch.where((e == 0).all(-1, keepdim=True), 0.0, total)
    ratio = e / total.masked_fill(total == 0, 1)
    return Weights(ratio, total.log().squeeze(-1))


def _zero_rows(p: Problem, out: Values) -> Values:
    """Rows count as empty where a hidden key was visited: nothing visible rose above the sentinel."""
    visible = p.visible()
    assert visible is not None
    inside = torch.ones_like(visible) if p.reach is None else p.reach
    blank = (~visible & inside).any(-1)
    return out._replace(o=out.o.masked_fill(blank[..., None], 0.0), lse=out.lse.masked_fill(blank, -torch.inf))


def _all_empty(p: Problem, out: Values) -> Values:
    return out._replace(o=torch.zeros_like(out.o), lse=torch.full_like(out.lse, -torch.inf))


def sentinel(p: Problem) -> list[Alternative]:
    """A finite number in place of -inf, and visible scores below it."""
    visible = p.visible()
    if visible is None or not p.lk or p.build(p).masked_fill(~visible, -torch.inf).amax() > -2e4:
        return []
    sentence = "a finite number stands for -inf in the mask, and the scores of this case lie below it"
    found = [
        Alternative(
            "finite-sentinel-empty", f"{sentence}: rows count as empty", lambda p: replace(p, finish=_all_empty)
        )
    ]
    for tile in (None, *TILES):
        found += [
            Alternative(
                "finite-sentinel", f"{sentence}: hidden keys win",
                lambda p, t=tile: replace(p, hidden=0.0, reach=reach(p, t)),
            ),
            Alternative(
                "finite-sentinel-empty", f"{sentence}: rows count as empty",
                lambda p, t=tile: replace(p, finish=lambda p, out: _zero_rows(replace(p, reach=reach(p, t)), out)),
            ),
        ]  # fmt: skip
    return found


def _max_of_hidden(p: Problem, tile: int, *, divide: bool) -> Problem:
    """The maximum taken before the mask, tile by tile: float32, and P in fp16, hold 0 for what lies far below it."""

    def normalise(p: Problem, s: Tensor) -> Weights:
        open_ = replace(p, band=None, mask=None)
        bare = open_.build(open_).masked_fill(~visited(p, tile), -torch.inf)
        m, latest = peak(bare), running(p, bare, tile)
        prob, rescale = _fp32(torch.exp(s - latest)), _fp32(torch.exp(latest - m))
        total = (prob * rescale).sum(-1, keepdim=True)
        if not divide:
            total = total.masked_fill(total == 0, 1)
        if p.case.dtype == "fp16":
            prob = prob.half().double()
        return softmax(p, s)._replace(p=prob * rescale / total)

    return replace(p, normalise=normalise)


def _fp32(x: Tensor) -> Tensor:
    return x.float().double()


def maximum_before_mask(p: Problem) -> list[Alternative]:
    if p.visible() is None:
        return []
    sentence = "the running maximum is taken before the mask: large scores of hidden keys underflow the visible ones"
    return [
        Alternative("max-before-mask", sentence, lambda p, t=t, d=d: _max_of_hidden(p, t, divide=d))
        for t in TILES
        for d in (False, True)
    ]


SOFTMAX: tuple[Alternative, ...] = (
    Alternative("not-normalised", "P is not normalised: the output is not divided by the row sum l",
                lambda p: replace(p, normalise=_unnormalised)),
    Alternative("no-maximum", "the maximum of the row is not subtracted: exp overflows or underflows",
                lambda p: replace(p, normalise=_no_maximum)),
)  # fmt: skip


def softmax_faults(p: Problem) -> list[Alternative]:
    return list(SOFTMAX)


FAMILIES: tuple[Family, ...] = (
    sentinel,
    softmax_faults,
    online,
    first_tile_hidden,
    splits,
    maximum_before_mask,
)
