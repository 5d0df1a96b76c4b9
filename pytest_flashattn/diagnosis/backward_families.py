"""Wrong gradients whose number depends on the problem: tiles, layouts, roundings, and all forward alternatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from . import forward_mask, forward_memory, forward_options, forward_scores
from .alternative import TILES, Alternative, keys_named
from .backward_model import Gradients, Tape, gradients
from .backward_tables import Wrong
from .forward_memory import ORDERS, WHATEVER, misread
from .model import Problem

MOST_TILES = 16
"""Of one size, the most tiles that are tried one by one."""

_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
COARSER: dict[str, dict[str, torch.dtype]] = {
    "fp32": {"fp16": torch.float16, "bf16": torch.bfloat16, **_FP8},
    "fp16": {"bf16": torch.bfloat16, **_FP8},
    "bf16": _FP8,
}
"""Formats with fewer bits than the inputs of a dtype have: rounding P to the input dtype itself is right."""


def bias_sums(tape: Tape) -> list[Wrong]:
    """The gradient of a broadcast bias that is not summed over an axis along which it was broadcast."""
    bias = tape.problem.inputs.bias
    if bias is None or "dbias" not in tape.wanted:
        return []
    return [
        Wrong(
            f"the gradient of the bias, broadcast over {name}, comes from the {said} of them only: it is not summed",
            lambda t, a=axis, w=which: replace(t, finish=lambda t, out: _one_of(t, out, a, w)),
        )
        for axis, name in ((0, "batch elements"), (1, "heads"))
        if bias.shape[axis] == 1 < tape.do.shape[axis]
        for which, said in ((tape.do.shape[axis] - 1, "last"), (0, "first"))
    ]


def _one_of(tape: Tape, out: Gradients, axis: int, which: int) -> Gradients:
    p = tape.problem
    assert p.inputs.bias is not None
    shape = list(p.inputs.bias.shape)
    shape[axis] = tape.do.shape[axis]
    full = replace(p, inputs=p.inputs.with_(bias=p.inputs.bias.expand(shape)))
    found = gradients(replace(tape, problem=full, finish=lambda t, o: o))["dbias"]
    return {**out, "dbias": found.narrow(axis, which, 1)}


def upstream(tape: Tape) -> list[Wrong]:
    """dO read wrongly."""
    do = tape.problem.inputs.dout
    if not do.numel():
        return []
    found = []
    for order, axes in ORDERS:
        read = misread(do, order).double()
        if not torch.equal(read, tape.do):
            sentence = f"dO is read as contiguous {axes} memory, {WHATEVER}"
            found.append(Wrong(sentence, lambda t, x=read: replace(t, do=x)))
    if 0 in do.stride():
        sentence = "an expanded dO (strides of 0) is read past its one element: only its first column counts"
        found.append(Wrong(sentence, _first_column))
    found.append(Wrong("dO is taken to be all ones", lambda t: replace(t, do=torch.ones_like(t.do))))
    return found


def _first_column(tape: Tape) -> Tape:
    do = torch.zeros_like(tape.do)
    do[..., 0] = tape.do[..., 0]
    return replace(tape, do=do)


def roundings(tape: Tape) -> list[Wrong]:
    """P or dS in fewer bits than the inputs have: roundings repeat, so the error itself is reproduced."""
    found = []
    for name, dtype in COARSER[tape.problem.case.dtype].items():
        found += [
            Wrong(f"P is rounded to {name} in the backward", lambda t, d=dtype: replace(t, rounded=_to(d))),
            Wrong(f"dS is rounded to {name}", lambda t, d=dtype: replace(t, rounded_ds=_to(d))),
        ]
    return found


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).double()


def other_problem(tape: Tape) -> list[Wrong]:
    """Backwards that recompute P for another problem than the forward solved: the tables of the forward once more."""
    p = tape.problem
    tables = (forward_mask, forward_scores, forward_options)
    found = [a for table in tables for a in table.ALTERNATIVES if a.when(p)]
    for family in (forward_memory.head_maps, *(f for table in tables for f in table.FAMILIES)):
        found += family(p)
    return [_in_backward(a) for a in found]


def other_memory(tape: Tape) -> list[Wrong]:
    """q, k and v read wrongly in the backward only."""
    return [_in_backward(a) for a in forward_memory.layouts(tape.problem)]


def _in_backward(a: Alternative) -> Wrong:
    return Wrong(f"in the backward only: {a.sentence}", lambda t: replace(t, problem=a.change(t.problem)))


def stores(tape: Tape) -> list[Wrong]:
    """Gradients stored in the wrong place."""
    p = tape.problem
    sizes = {"dq": p.q.numel(), "dk": p.k.numel(), "dv": p.v.numel()}
    found = []
    for names in (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dk", "dv")):
        who = " and ".join(names)
        found += [
            _stored(names, f"{who}: computed packed, yet stored with the strides of a (B, L, H, D) view", _transposed),
            _stored(names, f"{who}: stored as (B, H, L, D), yet read as (B, L, H, D)", _viewed),
        ]
        for bits in (bits for bits in range(12, 32) if 2**bits < min(sizes[n] for n in names)):
            sentence = f"offsets into {who} wrap at 2^{bits} elements: what lies beyond is stored over the front"
            found += [_stored(names, sentence, _folded(bits, add)) for add in (False, True)]
    return found


def _stored(names: tuple[str, ...], sentence: str, change: Callable[[Tensor], Tensor]) -> Wrong:
    def move(name: str, x: Tensor) -> Tensor:
        return change(x) if name in names else x

    def finish(tape: Tape, out: Gradients) -> Gradients:
        return {n: move(n, x) for n, x in out.items()}

    return Wrong(sentence, lambda t: replace(t, finish=finish), exact_only=True, moves=move)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape)


def _viewed(x: Tensor) -> Tensor:
    b, h, length, d = x.shape
    return x.reshape(b, length, h, d).transpose(1, 2)


def _folded(bits: int, add: bool) -> Callable[[Tensor], Tensor]:
    """x stored at offsets mod 2^bits, the last writer or the sum there, and what is never stored 0."""

    def fold(x: Tensor) -> Tensor:
        out = torch.zeros_like(x).flatten()
        for part in x.flatten().split(2**bits):
            out[: len(part)] = out[: len(part)] + part if add else part
        return out.view(x.shape)

    return fold


def partial_tiles(tape: Tape) -> list[Wrong]:
    """A backward that visits only the tiles that are visible as a whole."""
    visible = tape.problem.visible()
    if visible is None:
        return []
    return [
        Wrong(
            f"the backward skips tiles of {tile} x {tile} that are only partly visible (on the diagonal)",
            lambda t, n=tile: replace(t, keep=_whole_tiles(t.problem, n)),
        )
        for tile in TILES
    ]


def _whole_tiles(p: Problem, tile: int) -> Tensor:
    """1 for the pairs in tiles that are visible as a whole, 0 for others; broadcastable to the scores."""
    visible = p.visible()
    assert visible is not None
    n, m = len(p.rows), p.lk
    visible = visible.expand(*visible.shape[:-2], n, m)
    padded = torch.nn.functional.pad(visible, (0, -m % tile, 0, -n % tile), value=True)
    whole: Tensor = padded.unflatten(-1, (-1, tile)).all(-1).unflatten(-2, (-1, tile)).all(-2)
    return whole.repeat_interleave(tile, -1).repeat_interleave(tile, -2)[..., :n, :m].double()


def lost_tiles(tape: Tape) -> list[Wrong]:
    """Any one tile of query rows or of keys that the backward does not visit."""
    p = tape.problem
    found = []
    for tile in TILES:
        for axis, length in ((0, p.lq), (1, p.lk)):
            if not tile < length <= MOST_TILES * tile:
                continue
            for start in range(0, length, tile):
                at = list(range(start, min(start + tile, length)))
                who = keys_named(at) if axis else keys_named(at).replace("key", "query row")
                found.append(
                    Wrong(
                        f"the backward skips {who}, a tile of {tile}",
                        lambda t, axis=axis, at=at: replace(t, keep=_without(t.problem, axis, at)),
                    )
                )
    return found


def _without(p: Problem, axis: int, at: list[int]) -> Tensor:
    keep = torch.ones(p.lq, p.lk, dtype=torch.float64, device=p.q.device)
    return keep.index_fill_(axis, torch.tensor(at, device=p.q.device), 0.0)


FAMILIES: tuple[Callable[[Tape], list[Wrong]], ...] = (
    bias_sums,
    upstream,
    roundings,
    partial_tiles,
    other_problem,
    stores,
    lost_tiles,
    other_memory,
)
