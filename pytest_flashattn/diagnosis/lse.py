"""Explain a wrong log-sum-exp beside a right output."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .alternative import TILES
from .budget import Budget
from .forward import Noise, alternatives
from .match import Finding, Sample, compare
from .model import LOG2E, Problem, empty_rows, forward, peak


def _without_sink(p: Problem, lse: Tensor) -> Tensor:
    assert p.sinks is not None
    return lse + torch.log1p(-torch.exp(p.sinks[None] - lse))


def _filled(value: float) -> Callable[[Problem, Tensor], Tensor]:
    return lambda p, lse: torch.where(empty_rows(p).expand_as(lse), value, lse)


def _permuted(p: Problem, lse: Tensor) -> Tensor:
    return lse[:, torch.arange(lse.shape[1]).view(-1, p.group).T.flatten()]


def _permuted_back(p: Problem, lse: Tensor) -> Tensor:
    return lse[:, torch.arange(lse.shape[1]).view(p.group, -1).T.flatten()]


def _maximum(p: Problem, lse: Tensor) -> Tensor:
    return peak(p.build(p)).squeeze(-1).expand_as(lse)


def _heads_swapped(p: Problem, lse: Tensor) -> Tensor:
    return lse.transpose(1, 2).reshape(lse.shape)


Change = Callable[[Problem, Tensor], Tensor]
Row = tuple[str, Change, Callable[[Problem], bool]]


def _always(p: Problem) -> bool:
    return True


TABLE: tuple[Row, ...] = (
    ("lse is all zeros: not computed, or not stored", lambda p, x: torch.zeros_like(x), _always),
    ("lse is to base 2, not natural: log2 for ln", lambda p, x: x * LOG2E, _always),
    ("lse is multiplied by ln 2: a natural one converted from base 2", lambda p, x: x / LOG2E, _always),
    ("lse has the wrong sign", lambda p, x: -x, _always),
    ("the sink is left out of lse", _without_sink, lambda p: p.sinks is not None),
    ("lse is the maximum of the row only: log(l) is missing", _maximum, _always),
    ("lse is log(l) only: the maximum of the row is missing", lambda p, x: x - _maximum(p, x), _always),
    ("lse is +inf, not -inf, in rows that see no key", _filled(torch.inf), lambda p: bool(empty_rows(p).any())),
    ("lse is 0, not -inf, in rows that see no key", _filled(0.0), lambda p: bool(empty_rows(p).any())),
    ("lse is NaN, not -inf, in rows that see no key", _filled(torch.nan), lambda p: bool(empty_rows(p).any())),
    ("the heads of lse come in the order (group, kv head), not (kv head, group)", _permuted,
     lambda p: p.group > 1 and p.k.shape[1] > 1),
    ("the heads of lse come in another order, (kv head, group) taken for (group, kv head)", _permuted_back,
     lambda p: p.group > 1 and p.k.shape[1] > 1),
    ("lse is stored as (B, L, H) and returned as (B, H, L)", _heads_swapped,
     lambda p: p.q.shape[1] > 1 and len(p.rows) == p.lq),
    ("lse of batch element 0 is returned for all", lambda p, x: x[:1].expand_as(x), lambda p: p.q.shape[0] > 1),
    ("lse of head 0 is returned for all heads", lambda p, x: x[:, :1].expand_as(x), lambda p: p.q.shape[1] > 1),
    ("lse is rounded to bf16 on its way", lambda p, x: x.to(torch.bfloat16).double(), _always),
    ("lse is rounded to fp16 on its way", lambda p, x: x.to(torch.float16).double(), _always),
)  # fmt: skip


def _changes(p: Problem) -> Iterator[Row]:
    yield from (row for row in TABLE if row[2](p))
    yield from ((f"lse of a query tile of {t} rows without keys is never written", _tile_nan(t), _always)
                for t in TILES if empty_rows(p).any())  # fmt: skip


def _tile_nan(tile: int) -> Change:
    """NaN where all rows of a query tile are empty."""

    def change(p: Problem, lse: Tensor) -> Tensor:
        empty = empty_rows(p).expand_as(lse)
        number = p.rows // tile
        blank = torch.stack([empty[..., number == n].all(-1) for n in number.tolist()], -1)
        return torch.where(blank, torch.nan, lse)

    return change


def try_all(p: Problem, sample: Sample, noise: Noise, budget: Budget) -> list[Finding]:
    """What matches lse: changes of a right one, then alternatives of the forward that leave o alone."""
    right = forward(p).lse
    found = []
    for sentence, change, _ in _changes(p):
        value = change(p, right)
        match = compare(sample, value, noise.of_lse(value))
        if match is not None and match.told:
            found.append(Finding(sentence, match))
    if found:
        return found
    for alternative in alternatives(p):
        if budget.spent:
            break
        value = forward(alternative.change(p)).lse
        match = compare(sample, value, noise.of_lse(value))
        if match is not None and match.told:
            found.append(Finding(f"in lse only: {alternative.sentence}", match))
    return found
