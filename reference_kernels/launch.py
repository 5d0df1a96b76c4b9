"""From tensors to the arguments of a launch: what the launchers of forward and backward share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
from torch import Tensor

from .configs import Config


def feature_arguments(
    q: Tensor, k: Tensor, slopes: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> tuple[Any, ...]:
    """slopes, bias and mask, each followed by its strides (zeros where it is broadcast or absent).

    A boolean is read as the byte it is stored in.
    """
    batch, heads, lq, _ = q.shape
    full = (batch, heads, lq, k.shape[2])
    arguments: list[Any] = []
    for x, shape in ((slopes, full[:2]), (bias, full), (None if mask is None else mask.view(torch.uint8), full)):
        arguments += [x, *((0,) * len(shape) if x is None else x.expand(shape).stride())]
    return tuple(arguments)


def sides(left: int | None, right: int | None, lq: int, lk: int) -> tuple[int | None, int | None]:
    """(left, right), None for a side that hides nothing in these lengths: a decoding step is not masked at all."""
    # Diagonals run from Lk - Lq to Lk - 1, so these sides reach the first and the last key from everywhere.
    return (
        None if left is None or left >= lk - 1 else left,
        None if right is None or right >= lq - 1 else right,
    )


def head_dim_blocks(d: int, dv: int) -> tuple[int, int]:
    """The widths of the tiles that hold D and Dv: powers of two, at least the 16 of a matrix product."""
    return max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(dv))


def spans_32_bits(rows: int, tensors: Iterable[Tensor], terms: tuple[Any, ...], lq: int, lk: int) -> bool:
    """Whether offsets inside of one head need 64 bits: of a tile of `rows` rows of (B, H, L, D), of a bias, of a mask.

    terms: what feature_arguments returned.
    """
    bias_or_mask = max(lq * terms[i] + lk * terms[i + 1] for i in (6, 11))
    tiles = (rows * x.stride(2) + 256 * x.stride(3) for x in tensors)
    return bool(max(bias_or_mask, *tiles) >= 2**31)


def tma_refusal(name: str, x: Tensor) -> str | None:
    """Why the TMA cannot copy blocks of x (B, H, L, D), called `name`; None if it can.

    Its terms (CUDA driver API, cuTensorMapEncodeTiled): the last dimension contiguous, the base and all other strides
    multiples of 16 bytes, no stride of 0, none of 2^40 bytes.
    """
    if not x.numel():
        return f"{name} is empty"
    if x.stride(3) != 1:
        return f"{name}'s last dimension is not contiguous"
    if x.data_ptr() % 16:
        return f"{name} does not begin at a multiple of 16 bytes"
    for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True):
        if size > 1 and (stride <= 0 or stride * x.element_size() % 16 or stride * x.element_size() >= 2**40):
            return f"{name}'s strides {x.stride()} are not positive multiples of 16 bytes"
    return None


def tma_strides(x: Tensor) -> list[int]:
    """The strides of all dimensions of x (B, H, L, D) but the last, as the TMA takes them.

    That of a dimension of size 1 may be anything; the TMA wants a multiple of 16 bytes.
    """
    _, heads, length, d = x.shape
    dense = (heads * length * d, length * d, d)
    return [full if size == 1 else own for size, own, full in zip(x.shape[:3], x.stride()[:3], dense, strict=True)]


def options(config: Config) -> dict[str, Any]:
    """What the compiler is told. s * unit - shift is to be one instruction: Triton 3.10 no longer fuses by default."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}


def as_grid(programs: int) -> tuple[int]:
    """A grid of one axis, the only one that may be longer than 65535."""
    if programs >= 2**31:
        raise ValueError(f"the problem needs {programs} programs, a GPU takes 2^31 - 1: split the batch")
    return (programs,)
