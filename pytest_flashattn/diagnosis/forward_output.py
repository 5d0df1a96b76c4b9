"""Outputs that are no attention at all, or attention that was stored in the wrong place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .alternative import TILES, Alternative, Family, always
from .model import Problem, Values


def _stored(
    name: str,
    sentence: str,
    change: Callable[[Problem, Tensor], Tensor],
    when: Callable[[Problem], bool] = always,
) -> Alternative:
    """An alternative that replaces o, given the right one."""

    def finish(p: Problem, out: Values) -> Values:
        return out._replace(o=change(p, out.o).expand_as(out.o))

    whole = when is _several_heads
    return Alternative(name, sentence, lambda p: replace(p, finish=finish), when, exact_only=True, whole=whole)


def _several_heads(p: Problem) -> bool:
    return len(p.rows) == p.lq and p.q.shape[1] > 1 and p.lq > 1


def _several_keys(p: Problem) -> bool:
    return p.lk > 1


def _columns(p: Problem, o: Tensor) -> Tensor:
    return torch.cat([o[..., : p.q.shape[-1]], torch.zeros_like(o[..., p.q.shape[-1] :])], -1)


def _as_bshd(p: Problem, o: Tensor) -> Tensor:
    b, h, length, d = o.shape
    return o.reshape(b, length, h, d).transpose(1, 2)


OUTPUTS: tuple[Alternative, ...] = (
    _stored("zeros", "o is all zeros", lambda p, o: torch.zeros_like(o)),
    _stored("mean-v", "o is mean(V): all keys weigh the same, whatever the scores",
            lambda p, o: p.v[:, p.heads].mean(2, keepdim=True), _several_keys),
    _stored("sum-v", "o is the sum of V", lambda p, o: p.v[:, p.heads].sum(2, keepdim=True), _several_keys),
    _stored("copy-v", "o is a copy of V", lambda p, o: p.v[:, p.heads][:, :, p.rows], lambda p: p.lk >= max(p.lq, 2)),
    _stored("copy-q", "o is a copy of q", lambda p, o: p.q, lambda p: p.q.shape[-1] == p.v.shape[-1]),
    _stored("batch-0", "o of batch element 0 is returned for all", lambda p, o: o[:1], lambda p: p.q.shape[0] > 1),
    _stored("head-0", "o of head 0 is returned for all heads", lambda p, o: o[:, :1], lambda p: p.q.shape[1] > 1),
    _stored("stored-bshd", "o is stored as (B, L, H, D) and returned as (B, H, L, D)",
            lambda p, o: o.transpose(1, 2).reshape(o.shape), _several_heads),
    _stored("stored-bhsd", "o is stored as (B, H, L, D) and returned as (B, L, H, D)", _as_bshd, _several_heads),
    _stored("columns-of-d", "the columns of o are counted by D: those from D on are 0, though Dv is larger", _columns,
            lambda p: p.v.shape[-1] > p.q.shape[-1]),
)  # fmt: skip


def spilled_rows(p: Problem) -> list[Alternative]:
    """The last query tile stored as a whole: its rows past the end fall on the first rows of the next head."""
    if p.q.shape[0] * p.q.shape[1] == 1:
        return []
    return [
        _stored(
            "q-tail-guard",
            f"the last query tile (of {tile} rows) is stored without a guard: its {-p.lq % tile} rows past the end "
            "overwrite the first rows of the next head",
            partial(_spilled, extra=-p.lq % tile, mean=mean),
        )
        for tile in TILES
        if p.lq % tile
        for mean in (False, True)
    ]


def _spilled(p: Problem, o: Tensor, extra: int, mean: bool) -> Tensor:
    """Rows past the end are 0, or with a query of zeros the mean of the values."""
    above = p.v[:, p.heads].mean(2, keepdim=True).expand_as(o) if mean else torch.zeros_like(o)
    flat, spill = o.flatten(0, 1).clone(), above.flatten(0, 1)
    hit = p.rows < extra
    flat[1:, hit] = spill[:-1][:, hit]
    return flat.view(o.shape)


ALTERNATIVES: tuple[Alternative, ...] = OUTPUTS
FAMILIES: tuple[Family, ...] = (spilled_rows,)
