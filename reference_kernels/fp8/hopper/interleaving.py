"""The order of V's keys in which P needs no exchange of registers.

wgmma leaves thread j of a quad the columns 2 j + b and 8 + 2 j + b, b = 0, 1, of every 16 of a product, and takes from
it the columns 4 j … 4 j + 3 of every 16 of an FP8 operand. A sum over keys does not care about their order: if V is
stored so that of every 16 keys

    position 4 j + 2 h + b holds key 8 h + 2 j + b        j = 0 … 3, h = 0, 1, b = 0, 1

then what thread j has of Q K^T, with K in its own order, is what P V wants from it. `quantise` can write V like this at
no cost; `interleave_keys` does it to what is stored already.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 16
"""Keys that change places among themselves; V is stored up to a multiple of it."""


def interleave_keys(v: Tensor) -> Tensor:
    """A copy of v (B, H, L, D), one byte an element, for flash_attention_fp8(..., v_interleaved=True).

    Memory is (B, H, D, L), L rounded up to a multiple of 16, with zeros where there is no key. What is returned is a
    view of it as (B, H, L, D), in which row i is not key i.
    """
    batch, heads, length, d = v.shape
    groups = -(-length // GROUP)
    padded = torch.zeros((batch, heads, groups * GROUP, d), dtype=torch.uint8, device=v.device)
    padded[:, :, :length] = v.view(torch.uint8)
    swapped = padded.view(batch, heads, groups, 2, 4, 2, d).permute(0, 1, 6, 2, 4, 3, 5)  # …, D, group, j, h, b
    memory = swapped.reshape(batch, heads, d, groups * GROUP).view(v.dtype)
    return memory.mT[:, :, :length]


def as_stored(v: Tensor, *, interleaved: bool) -> Tensor:
    """The memory of v (B, H, L, D), contiguous along L, as (B, H, D, L); interleaved: with all of its last 16 keys."""
    batch, heads, length, d = v.shape
    length = -(-length // GROUP) * GROUP if interleaved else length
    return v.as_strided((batch, heads, d, length), (*v.stride()[:2], v.stride(3), 1))


def padding_refusal(v: Tensor) -> str | None:
    """Why v (B, H, L, D), contiguous along L, cannot be interleaved: no room for its last 16 keys. None if it can."""
    whole = -(-v.shape[2] // GROUP) * GROUP
    sizes = (v.shape[0], v.shape[1], 1, v.shape[3])
    last = sum((size - 1) * stride for size, stride in zip(sizes, v.stride(), strict=True))
    room = v.untyped_storage().nbytes() // v.element_size() - v.storage_offset() - last
    if room < whole or any(n > 1 and v.stride(dim) < whole for dim, n in enumerate(sizes)):
        return f"v's {v.shape[2]} keys are not stored up to a multiple of {GROUP}: interleaved, they must be"
    return None
