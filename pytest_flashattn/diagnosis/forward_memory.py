"""Wrong heads, strides, offsets and layouts: the right mathematics on numbers that were read from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .alternative import TILES, Alternative, Family, keys_named
from .forward_keys import counts
from .forward_mask import wrapped
from .model import Problem

VECTOR = 8
"""Elements of a 16-byte load of 16-bit numbers."""

ORDERS = (("bhsd", "(B, H, L, D)"), ("bshd", "(B, L, H, D)"))
WHATEVER = "whatever the strides say"
MOST_TILES = 32
"""Of one size, the most tiles that are tried one by one."""


def head_maps(p: Problem) -> list[Alternative]:
    """Formulas for the kv head of a query head that are not h // (Hq // Hkv)."""
    hkv = p.k.shape[1]
    if hkv == 1 or p.group == 1:
        return []
    h = torch.arange(len(p.heads), device=p.q.device)
    floored = 1 << (p.group.bit_length() - 1)
    formulas = (
        ("gqa-modulo", "query head h reads kv head h mod Hkv, not h // (Hq // Hkv)", h % hkv),
        ("gqa-division", "query head h reads kv head h // Hkv, not h // (Hq // Hkv)", (h // hkv) % hkv),
        ("gqa-pow2", f"the group of {p.group} query heads is rounded down to {floored}, a power of two",
         (h // floored).clamp_max(hkv - 1)),
        ("gqa-first", "all query heads read kv head 0", torch.zeros_like(h)),
        ("gqa-identity", "query head h reads kv head h, up to the last: the group is ignored", h.clamp_max(hkv - 1)),
    )  # fmt: skip
    return [
        Alternative(name, sentence, lambda p, heads=heads: replace(p, heads=heads))
        for name, sentence, heads in formulas
        if not torch.equal(heads, p.heads)
    ]


def misread(x: Tensor, order: str) -> Tensor:
    """x (B, H, L, D) as read by a kernel that takes its memory for contiguous in "bhsd" or "bshd" order.

    Past the end of the storage it starts again at the front: what really lies there cannot be known.
    """
    start = x.storage_offset()
    there = min(x.untyped_storage().nbytes() // x.element_size() - start, x.numel())
    read = x.as_strided((there,), (1,), start).repeat(-(-x.numel() // max(there, 1)))[: x.numel()]
    if order == "bhsd":
        return read.view(x.shape)
    b, h, length, d = x.shape
    return read.view(b, length, h, d).transpose(1, 2)


def _reading(name: str, sentence: str, names: str, read: Callable[[Tensor], Tensor]) -> Alternative:
    """The tensors `names` ("q", "kv", …) read by `read`; {} in the sentence stands for them and their verb."""

    def change(p: Problem) -> Problem:
        changed = {n: p.inputs.meant(n, read(getattr(p.inputs, n))).double() for n in names}
        if "q" in changed:
            changed["q"] = changed["q"][:, :, p.rows]
        return replace(p, **changed)  # type: ignore[arg-type]

    return Alternative(name, sentence.format(listed(names)), change)


def listed(names: str) -> str:
    """ "kv" -> "k and v"."""
    return names if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def layouts(p: Problem) -> list[Alternative]:
    """Each tensor, k and v, and all three, read as contiguous in either order of axes, or transposed by a copy."""
    if not p.q.numel() or not p.k.numel() or not p.v.numel():
        return []
    found = [*_foreign_strides(p), *_rounded_bases(p), *_head_pitch(p)]
    for names in ("q", "k", "v", "kv", "qkv"):
        tensors = [getattr(p.inputs, n) for n in names]
        verb = "is" if len(names) == 1 else "are"
        for order, axes in ORDERS:
            if not all(torch.equal(misread(x, order), x) for x in tensors):
                sentence = f"{{}} {verb} read as contiguous {axes} memory, {WHATEVER}"
                found.append(_reading(f"misread-{order}", sentence, names, partial(misread, order=order)))
        if any(x.shape[1] > 1 and x.shape[2] > 1 for x in tensors):
            sentence = f"{{}} {verb} taken in transposed layout: (B, L, H, D) memory read as (B, H, L, D)"
            found.append(_reading("transposed", sentence, names, lambda x: x.transpose(1, 2).reshape(x.shape)))
    return found


def _foreign_strides(p: Problem) -> list[Alternative]:
    found = []
    for name, other in (("v", "k"), ("k", "v")):
        x, strides = getattr(p.inputs, name), getattr(p.inputs, other).stride()
        if p.k.shape == p.v.shape and x.stride() != strides and _fits(x, strides):
            sentence = f"{{}} is read with the strides of {other}"
            found.append(_reading("foreign-strides", sentence, name, partial(_strided, strides=strides)))
    return found


def _strided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return x.as_strided(x.shape, strides)


def _rounded_bases(p: Problem) -> list[Alternative]:
    found = []
    for name in "qkv":
        x = getattr(p.inputs, name)
        if odd := int(x.storage_offset()) % VECTOR:
            sentence = (
                f"the base address of {{}}, {odd * x.element_size()} bytes beyond a multiple of 16, is rounded down"
            )
            found.append(_reading("base-rounded", sentence, name, partial(_moved, back=odd)))
    return found


def _moved(x: Tensor, back: int) -> Tensor:
    return x.as_strided(x.shape, x.stride(), x.storage_offset() - back)


def _head_pitch(p: Problem) -> list[Alternative]:
    k = p.inputs.k
    if k.shape[1] == 1 or k.stride(1) in (p.lk * k.stride(2), k.stride(2)) or k.stride(3) != 1:
        return []
    sentence = f"the heads of {{}} are taken to lie Lk rows apart, {WHATEVER}"
    return [_reading("head-pitch", sentence, names, _packed_heads) for names in ("k", "v", "kv")]


def _packed_heads(x: Tensor) -> Tensor:
    strides = (x.stride(0), x.shape[2] * x.stride(2), x.stride(2), x.stride(3))
    return x.as_strided(x.shape, strides) if _fits(x, strides) else x


def _fits(x: Tensor, strides: tuple[int, ...]) -> bool:
    last = int(x.storage_offset()) + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    return last < x.untyped_storage().nbytes() // x.element_size()


def wrapped_offsets(p: Problem) -> list[Alternative]:
    """Element offsets of k or v that wrap at a power of two, as 32-bit offsets do at 2^31."""
    return [
        _reading(
            "offset-wraps",
            f"offsets into {{}} wrap at 2^{bits} elements: what lies beyond is read from the front",
            names,
            partial(wrapped, bits=bits),
        )
        for names in ("k", "v", "kv")
        for bits in range(14, 32)
        if 2**bits < min(getattr(p, n).numel() for n in names)
    ]


def lost_tiles(p: Problem) -> list[Alternative]:
    """Any one tile of keys lost or counted twice."""
    found = []
    for tile in (t for t in TILES if t < p.lk <= MOST_TILES * t):
        for start in range(0, p.lk, tile):
            keys = list(range(start, min(start + tile, p.lk)))
            one = len(keys) == 1
            skipped = "has no effect: its tile is skipped" if one else "have no effect: their tile is skipped"
            for times, said in ((0, skipped), (2, "counts twice" if one else "count twice")):
                found.append(
                    Alternative(
                        "lost-tile" if not times else "doubled-tile",
                        f"{keys_named(keys)} {said}",
                        lambda p, a=start, b=start + tile, n=times: replace(p, count=counts(p, a, b, n)),
                    )
                )
    return found


FAMILIES: tuple[Family, ...] = (head_maps, layouts, wrapped_offsets, lost_tiles)
