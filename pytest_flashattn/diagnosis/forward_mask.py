"""Wrong diagonals, windows and masks; masks and biases that are read from the wrong place; rows without keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .alternative import TILES, Alternative, Change, Family
from .model import Problem, Values, banded, empty_rows, of_rows

Condition = Callable[[Problem], bool]


def _crosses(p: Problem) -> bool:
    return p.lq != p.lk and p.band is not None


def _top_left(p: Problem) -> bool:
    return p.diagonal != p.lk - p.lq


def _left(p: Problem) -> bool:
    return p.sides[0] is not None


def _window(p: Problem) -> bool:
    return p.case.window is not None


def _right(p: Problem) -> bool:
    """The window has a right side of its own."""
    return _window(p) and p.sides[1] is not None and not p.case.causal


def _causal(p: Problem) -> bool:
    return p.case.causal


def _by(left: int = 0, right: int = 0) -> Change:
    """Sides moved by so many keys, the left one not below 0."""

    def change(p: Problem) -> Problem:
        a, b = p.sides
        return banded(p, a if a is None else max(a + left, 0), b if b is None else b + right)

    return change


def _on(diagonal: Callable[[Problem], int]) -> Change:
    return lambda p: banded(p, p.sides[0], p.sides[1], diagonal(p))


def _without_causal(p: Problem) -> Problem:
    return banded(p, p.sides[0], (p.case.window or (None, None))[1])


DIAGONAL: tuple[Alternative, ...] = (
    Alternative("top-left", "top-left alignment: causal and windows count from the first key, not back from the last",
                _on(lambda p: 0), lambda p: _crosses(p) and not _top_left(p)),
    Alternative("bottom-right", "bottom-right alignment: the diagonal ends at the last key; top-left is declared",
                _on(lambda p: p.lk - p.lq), lambda p: _crosses(p) and _top_left(p)),
    Alternative("diagonal-sign", "the diagonal is shifted by Lq - Lk instead of Lk - Lq",
                _on(lambda p: p.lq - p.lk), lambda p: _crosses(p) and p.lq > p.lk - p.lq),
    Alternative("causal-ignored", "causal is ignored: rows see their future", _without_causal, _causal),
    Alternative("causal-inclusive", "every row sees one key of its future: the causal comparison is off by one",
                _by(right=1), _causal),
    Alternative("causal-exclusive", "no row sees its own key: the causal comparison is off by one",
                _by(right=-1), _causal),
    Alternative("causal-flipped", "causal is turned round: rows see their future, not their past",
                lambda p: banded(p, 0, None), lambda p: _causal(p) and not _window(p)),
    Alternative("causal-assumed", "causal is applied although it was not asked for",
                lambda p: banded(p, p.sides[0], 0), lambda p: not _causal(p)),
    Alternative("window-left-plus", "the window is one key too long on the left", _by(left=1), _left),
    Alternative("window-left-minus", "the window is one key too short on the left", _by(left=-1),
                lambda p: bool(p.sides[0])),
    Alternative("window-right-plus", "the window is one key too long on the right", _by(right=1), _right),
    Alternative("window-right-minus", "the window is one key too short on the right", _by(right=-1), _right),
    Alternative("window-ignored", "the window is ignored",
                lambda p: banded(p, None, 0 if p.case.causal else None), _window),
    Alternative("window-left-ignored", "the left side of the window is ignored",
                lambda p: banded(p, None, p.sides[1]), lambda p: _left(p) and _right(p)),
    Alternative("window-right-ignored", "the right side of the window is ignored",
                lambda p: banded(p, p.sides[0], None), _right),
    Alternative("window-without-causal", "causal is dropped where there is a window", _without_causal,
                lambda p: _causal(p) and _window(p)),
    Alternative("window-implies-causal", "a window is taken to be causal: its right side counts as 0",
                lambda p: banded(p, p.sides[0], 0), _right),
    Alternative("window-swapped", "the two sides of the window are swapped",
                lambda p: banded(p, p.sides[1], p.sides[0]), lambda p: _window(p) and p.sides[0] != p.sides[1]),
)  # fmt: skip


def window_by_tile(p: Problem) -> list[Alternative]:
    """The left side of a window applied only in the key tiles that the diagonal crosses."""
    return [
        Alternative(
            "window-tiles",
            f"the window is applied in the key tiles on the diagonal only, and ignored in tiles of {tile} keys before",
            lambda p, t=tile: replace(p, band=_beyond_diagonal(p, t)),
        )
        for tile in TILES
        if _left(p)
    ]


def _beyond_diagonal(p: Problem, tile: int) -> Tensor:
    assert p.band is not None
    first_row = p.rows // tile * tile
    ends = p.keys // tile * tile + tile - 1
    return p.band | (ends < (first_row + p.diagonal)[:, None])


MASK: tuple[Alternative, ...] = (
    Alternative("mask-inverted", "the mask is inverted: True is taken for hidden",
                lambda p: replace(p, mask=None if p.mask is None else ~p.mask), lambda p: p.mask is not None),
    Alternative("mask-additive", "the boolean mask is added to the scores as 0 and 1 instead of hiding keys",
                lambda p: replace(p, mask=None, bias=None if p.mask is None else p.mask.double()),
                lambda p: p.mask is not None),
)  # fmt: skip


def mask_and_bias(p: Problem) -> list[Alternative]:
    """Ways to read a mask or a bias wrongly, the same for both."""
    name, x = ("bias", p.inputs.bias) if p.inputs.mask is None else ("mask", p.inputs.mask)
    if x is None:
        return []
    x = x if x.dtype == torch.bool else x.double()
    found = [_misread(name, "ignored", f"the {name} is ignored", None)]
    found += [_misread(name, key, sentence.format(name), read) for key, sentence, read in _readings(p, x)]
    return found


Reading = Callable[[Problem], Tensor]


def _misread(name: str, key: str, sentence: str, read: Reading | None) -> Alternative:
    def change(p: Problem) -> Problem:
        value = None if read is None else read(p)
        return replace(p, mask=value) if name == "mask" else replace(p, bias=value)

    return Alternative(f"{name}-{key}", sentence, change)


def _readings(p: Problem, x: Tensor) -> list[tuple[str, str, Reading]]:
    """Names, sentences with {} for the tensor, and how x (B or 1, Hq or 1, Lq or 1, Lk or 1) is read, of p.rows."""
    full = (p.q.shape[0], p.q.shape[1], p.lq, p.lk)
    found: list[tuple[str, str, Reading]] = []
    if x.shape[2] > 1 or x.shape[3] > 1:
        found.append(("transposed", "the {} is read as (key, query): rows and columns are swapped",
                      lambda p: _transposed(x, full, p.rows)))  # fmt: skip
    if tuple(x.shape) != full:
        found.append(("flat", "the {}, broadcast here, is read with the strides of a full (B, H, Lq, Lk) one",
                      lambda p: _flat(x, full, p.rows)))  # fmt: skip
    if x.shape[0] > 1:
        found.append(("batch-0", "the {} of batch element 0 is used for all", lambda p: of_rows(x[:1], p.rows)))
    if x.shape[1] > 1:
        found.append(("head-0", "the {} of head 0 is used for all heads", lambda p: of_rows(x[:, :1], p.rows)))
    if x.shape[2] > 1:
        found.append(("row-0", "the first row of the {} is used for all rows", lambda p: x[:, :, :1]))
    if x.shape[2] > 1 and p.group > 1:
        found.append(("row-group", "the row of the {} is divided by the group, as if heads were packed",
                      lambda p: of_rows(x, p.rows // p.group)))  # fmt: skip
    for multiple in (8, 16):
        if x.shape[3] > 1 and x.shape[3] % multiple:
            said = f"the rows of the {{}} are taken to lie a multiple of {multiple} apart, which {x.shape[3]} is not"
            found.append((f"pitch-{multiple}", said, partial(_pitched, x, multiple)))
    for bits in range(12, 32):
        if 2**bits < x.numel():
            said = f"offsets into the {{}} wrap at 2^{bits} elements: what lies beyond is read from the front"
            found.append((f"wrap-{bits}", said, partial(_rows_of, wrapped(x, bits))))
    return found


def wrapped(x: Tensor, bits: int) -> Tensor:
    """x as read with element offsets modulo 2^bits."""
    return x.flatten()[torch.arange(x.numel(), device=x.device) % 2**bits].view(x.shape)


def _flat(x: Tensor, full: tuple[int, int, int, int], rows: Tensor) -> Tensor:
    """The rows of a broadcast x as a kernel reads it that takes it for contiguous in the full shape."""
    at = torch.arange(torch.Size(full).numel(), device=x.device) % max(x.numel(), 1)
    return x.flatten()[at].view(full)[:, :, rows]


def _rows_of(x: Tensor, p: Problem) -> Tensor:
    return of_rows(x, p.rows)


def _pitched(x: Tensor, multiple: int, p: Problem) -> Tensor:
    """The rows of x as read when rows are taken to lie a multiple of `multiple` elements apart."""
    width = x.shape[-1]
    pitch = -(-width // multiple) * multiple
    starts = torch.arange(x.numel() // width, device=x.device)[:, None] * pitch
    read = x.flatten()[(starts + torch.arange(width, device=x.device)) % x.numel()].view(x.shape)
    return of_rows(read, p.rows)


def _transposed(x: Tensor, full: tuple[int, int, int, int], rows: Tensor) -> Tensor:
    whole = x.expand(x.shape[0], x.shape[1], *full[2:])
    return whole.reshape(*whole.shape[:2], full[3], full[2]).mT[:, :, rows]


def _filled(filling: Callable[[Problem, Values], Tensor]) -> Change:
    """Rows without keys hold something else than 0."""

    def finish(p: Problem, out: Values) -> Values:
        empty = empty_rows(p)[..., None].expand_as(out.o)
        return out._replace(o=torch.where(empty, filling(p, out).expand_as(out.o), out.o))

    return lambda p: replace(p, finish=finish)


def _has_empty(p: Problem) -> bool:
    return bool(empty_rows(p).any())


EMPTY: tuple[Alternative, ...] = (
    Alternative("empty-mean", "rows that see no key return mean(V), not 0: their equal scores are taken for real",
                _filled(lambda p, out: p.v[:, p.heads].mean(2, keepdim=True)), lambda p: p.lk > 0 and _has_empty(p)),
    Alternative("empty-nan", "rows that see no key give NaN (0 / 0, or exp(-inf - -inf)) instead of 0",
                _filled(lambda p, out: out.o.new_tensor(torch.nan)), _has_empty),
)  # fmt: skip

ALTERNATIVES: tuple[Alternative, ...] = (*DIAGONAL, *MASK, *EMPTY)
FAMILIES: tuple[Family, ...] = (window_by_tile, mask_and_bias)
