"""Wrong ALiBi, bias and sinks, and options that arrive in the wrong place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .alternative import TILES, Alternative, Change, Family
from .model import LOG2E, Problem, capped, distance, masked, products

Edit = Callable[[Problem, Tensor], Tensor]


def _grouped(p: Problem) -> bool:
    return p.group > 1


def _several(p: Problem) -> bool:
    return len(p.heads) > 1


def _anyway(p: Problem) -> bool:
    return True


def _scaled(p: Problem) -> bool:
    return p.scale not in (0.0, 1.0)


# -- ALiBi ------------------------------------------------------------------------------------------------------------


def _alibi(name: str, sentence: str, change: Change, when: Callable[[Problem], bool] = _anyway) -> Alternative:
    return Alternative(f"alibi-{name}", sentence, change, lambda p: p.slopes is not None and when(p))


def _slopes(edit: Edit) -> Change:
    def change(p: Problem) -> Problem:
        assert p.slopes is not None
        return replace(p, slopes=edit(p, p.slopes))

    return change


def _with_distance(away: Callable[[Problem], Tensor]) -> Change:
    """Scores with another distance between a row's diagonal and its keys."""

    def build(p: Problem) -> Tensor:
        assert p.slopes is not None
        s = capped(p, products(p) * p.scale) - p.slopes * away(p)
        return masked(p, s if p.bias is None else s + p.bias)

    return lambda p: replace(p, build=build)


ALIBI: tuple[Alternative, ...] = (
    _alibi("ignored", "the ALiBi slopes are ignored", lambda p: replace(p, slopes=None)),
    _alibi("shift", "ALiBi slopes are shifted by one head: head h uses the slope of head h - 1",
           _slopes(lambda p, x: x.roll(1, 0)), _several),
    _alibi("shift-back", "ALiBi slopes are shifted by one head: head h uses the slope of head h + 1",
           _slopes(lambda p, x: x.roll(-1, 0)), _several),
    _alibi("kv-head", "ALiBi slopes are taken by kv head: the heads of a group share one",
           _slopes(lambda p, x: x[p.heads]), _grouped),
    _alibi("top-left", "ALiBi counts distances from the top-left diagonal",
           lambda p: replace(p, alibi_diagonal=0), lambda p: p.alibi_diagonal != 0),
    _alibi("bottom-right", "ALiBi counts distances from the bottom-right diagonal, though top-left is declared",
           lambda p: replace(p, alibi_diagonal=p.lk - p.lq), lambda p: p.alibi_diagonal != p.lk - p.lq),
    _alibi("one-sided", "ALiBi lacks the absolute value: keys right of the diagonal get a bonus",
           _with_distance(distance), lambda p: not p.case.causal),
    _alibi("sign", "ALiBi has the wrong sign: distance is rewarded", _slopes(lambda p, x: -x)),
    _alibi("scaled", "ALiBi is multiplied by the scale: it is added before scaling",
           _slopes(lambda p, x: x * p.scale), _scaled),
)  # fmt: skip


def alibi_tail(p: Problem) -> list[Alternative]:
    """Distances in the last, partial key tile counted from the start of the tile."""
    return [
        _alibi(
            "tail",
            f"ALiBi counts key positions from the start of the tile in the last, partial tile of {tile} keys",
            _with_distance(partial(_tail_local, tile=tile)),
        )
        for tile in TILES
        if p.slopes is not None and p.lk % tile
    ]


def _tail_local(p: Problem, tile: int) -> Tensor:
    start = p.lk // tile * tile
    return (distance(p) + torch.where(p.keys >= start, start, 0)).abs()


# -- bias -------------------------------------------------------------------------------------------------------------


def _bias(name: str, sentence: str, edit: Edit, when: Callable[[Problem], bool] = _anyway) -> Alternative:
    def change(p: Problem) -> Problem:
        assert p.bias is not None
        return replace(p, bias=edit(p, p.bias))

    return Alternative(f"bias-{name}", sentence, change, lambda p: p.bias is not None and when(p))


BIAS: tuple[Alternative, ...] = (
    _bias("scaled", "the bias is multiplied by the scale: it is added before scaling", lambda p, x: x * p.scale,
          lambda p: p.scale > 0),
    _bias("base-2", "the bias is added to scores in base 2 without its factor log2(e)", lambda p, x: x / LOG2E),
    _bias("sign", "the bias is subtracted", lambda p, x: -x, lambda p: not p.case.holes),
    _bias("inf-nan", "a bias of -inf gives NaN (0 * inf, or -inf - -inf) instead of hiding the key",
          lambda p, x: x + 0 * x, lambda p: p.case.holes),
)  # fmt: skip


# -- sinks ------------------------------------------------------------------------------------------------------------


def _sink(name: str, sentence: str, edit: Edit, when: Callable[[Problem], bool] = _anyway) -> Alternative:
    def change(p: Problem) -> Problem:
        assert p.sinks is not None
        return replace(p, sinks=edit(p, p.sinks))

    return Alternative(f"sink-{name}", sentence, change, lambda p: p.sinks is not None and when(p))


SINKS: tuple[Alternative, ...] = (
    Alternative("sink-dropped", "the sink is missing in the denominator", lambda p: replace(p, sinks=None),
                lambda p: p.sinks is not None),
    _sink("scaled", "the sink is multiplied by the scale", lambda p, x: x * p.scale, _scaled),
    _sink("base-2", "the sink is added in base 2 without its factor log2(e)", lambda p, x: x / LOG2E),
    _sink("kv-head", "sinks are taken by kv head: the heads of a group share one", lambda p, x: x[p.heads], _grouped),
    _sink("row", "row i uses the sink of head i mod H: sinks are indexed by row",
          lambda p, x: x[:, 0][p.rows % len(x)], _several),
    _sink("shift", "sinks are shifted by one head", lambda p, x: x.roll(1, 0), _several),
    _sink("capped", "the sink passes through the softcap", capped, lambda p: p.softcap is not None),
)  # fmt: skip


# -- options in the wrong place ---------------------------------------------------------------------------------------

SHIFTED = "an option is passed by position to another parameter"


def _softcap_as_slopes(p: Problem) -> Problem:
    return replace(p, softcap=None, slopes=torch.full_like(p.q[0, :, :1, :1], p.softcap or 0.0))


POSITIONAL: tuple[Alternative, ...] = (
    Alternative("softcap-as-slopes", f"the softcap arrives as the slopes of ALiBi: {SHIFTED}",
                _softcap_as_slopes, lambda p: p.softcap is not None and p.slopes is None),
    Alternative("softcap-as-scale", f"the softcap arrives as the scale: {SHIFTED}",
                lambda p: replace(p, softcap=None, scale=p.softcap or 0.0), lambda p: p.softcap is not None),
    Alternative("scale-as-softcap", f"the scale arrives as the softcap: {SHIFTED}",
                lambda p: replace(p, softcap=p.scale, scale=p.q.shape[-1] ** -0.5),
                lambda p: p.case.scale is not None and p.scale > 0 and p.softcap is None),
)  # fmt: skip

ALTERNATIVES: tuple[Alternative, ...] = (*ALIBI, *BIAS, *SINKS, *POSITIONAL)
FAMILIES: tuple[Family, ...] = (alibi_tail,)
