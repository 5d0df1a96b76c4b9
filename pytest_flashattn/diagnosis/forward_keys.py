"""Keys that are lost, counted twice or invented."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .alternative import TILES, Alternative, Family, keys_named
from .model import Problem


def no_tail_mask(p: Problem) -> list[Alternative]:
    """Padded keys of the last tile, score 0."""
    return [
        Alternative(
            "no-tail-mask",
            f"no tail mask: the {-p.lk % tile} padded keys of the last tile of {tile} enter the denominator, score 0",
            lambda p, t=tile: replace(p, padding=-p.lk % t),
        )
        for tile in TILES
        if p.lk % tile
    ]


def lost_keys(p: Problem) -> list[Alternative]:
    """Runs of keys that have no effect: the last key, the last tile, the first, those that Lq does not count."""
    reasons: dict[tuple[int, int], str] = {}

    def add(start: int, stop: int, why: str) -> None:
        if 0 <= start < stop <= p.lk and stop - start < max(p.lk, 2):
            reasons.setdefault((start, stop), why)

    if p.lq < p.lk:
        add(p.lq, p.lk, "the loop over keys ends at Lq instead of Lk")
    partial = {tile: p.lk // tile * tile for tile in (*TILES, 8) if p.lk % tile}
    for start in dict.fromkeys(partial.values()):
        sizes = " or ".join(str(tile) for tile, at in partial.items() if at == start)
        add(start, p.lk, f"the partial tile after the last multiple of {sizes} is skipped, or Lk is rounded down")
    for tile in TILES:
        add(p.lk - tile, p.lk, f"the last key tile of {tile} is skipped")
        add(0, tile, f"the first key tile of {tile} is skipped")
    add(p.lk - 1, p.lk, "the last key is never seen")
    add(0, 1, "the first key is never seen")
    return [_without(start, stop, why) for (start, stop), why in reasons.items()]


def _without(start: int, stop: int, why: str) -> Alternative:
    keys = keys_named(list(range(start, stop)))
    verb = "has" if stop - start == 1 else "have"
    return Alternative(
        "lost-keys", f"{keys} {verb} no effect: {why}", lambda p: replace(p, count=counts(p, start, stop, 0))
    )


def loop_end(p: Problem) -> list[Alternative]:
    """The loop over key tiles that ends too early on the diagonal, where query and key tiles differ in size."""
    return [
        Alternative(
            "loop-end",
            f"the loop over key tiles ends too early on the diagonal: {keys} keys, a key tile, past the start of a "
            f"query tile of {rows} rows",
            lambda p, r=rows, k=keys: replace(p, reach=_reached(p, r, k)),
        )
        for rows in (128, 64, 32)
        for keys in (64, 32, 16)
        if keys < rows and p.sides[1] is not None
    ]


def _reached(p: Problem, rows: int, keys: int) -> Tensor:
    assert p.sides[1] is not None
    end = p.rows // rows * rows + p.diagonal + keys + p.sides[1]
    return p.keys // keys * keys < end[:, None]


def counts(p: Problem, start: int, stop: int, times: float) -> Tensor:
    """(Lk,): 1, and `times` for keys start … stop."""
    count = torch.ones(p.lk, dtype=torch.float64, device=p.q.device)
    count[start:stop] = times
    return count


def shifted_tail(p: Problem) -> list[Alternative]:
    """The last, partial tile moved back to fit, so that keys count twice."""
    return [
        Alternative(
            "tail-shifted",
            f"{keys_named(list(range(p.lk - tile, p.lk // tile * tile)))} count twice: the last tile of {tile} is "
            "moved back to end at the last key and overlaps the one before",
            lambda p, t=tile: replace(p, count=counts(p, p.lk - t, p.lk // t * t, 2)),
        )
        for tile in TILES
        if p.lk > tile and p.lk % tile
    ]


def wrapped_length(p: Problem) -> list[Alternative]:
    """The number of keys kept in 16 bits, with and without a sign."""
    return [
        Alternative(
            "length-bits",
            f"the number of keys is kept in 16 bits: {p.lk:,} becomes {kept:,}",
            lambda p, n=kept: replace(p, count=counts(p, max(n, 0), p.lk, 0)),
        )
        for kept in ((p.lk + 2**15) % 2**16 - 2**15, p.lk % 2**16)
        if kept != p.lk
    ]


FAMILIES: tuple[Family, ...] = (no_tail_mask, wrapped_length, lost_keys, loop_end, shifted_tail)
