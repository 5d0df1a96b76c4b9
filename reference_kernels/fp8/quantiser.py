"""From 16-bit numbers to FP8 with a scale: by tensor, by head, or by block of rows.

    amax = max |x|        descale = amax / largest        stored = round(x / descale)        x ≈ stored descale

over the elements that share a scale. `largest` is 448 for E4M3 and 57344 for E5M2, so that nothing saturates and the
largest element uses the whole range. One scale for a block of rows follows the data more closely than one for a head or
a tensor: an outlier costs its own block the small numbers, and no other.

- All zeros: descale 1, stored 0. Nothing is divided by 0.
- Infinities and NaN do not count for amax, or one of them would erase its neighbours. An infinity is stored as the
  largest number with its sign, NaN as NaN. A rotation mixes a row: with either in it, that row becomes NaN.
- amax below 2^-126 largest: descale stays 2^-126, whose reciprocal is a number; such elements keep fewer bits.

With `signs`, rows are rotated before (hadamard.py), in the same pass over memory. Scales by block read x once; by head
or tensor twice, once for amax, once to round: amax of each block, then their maximum, so that no atomic is needed.

V is stored transposed on request: the FP8 products of Hopper read both operands along the axis that they sum over, and
P V sums over keys. Memory is then (B, H, D, L), L rounded up to a multiple of 16, and what is returned is a view of it
as (B, H, L, D): kernels see shapes and strides, and need not know.

Scales: float32; x / descale is a product with 1 / descale, in float32.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import as_grid
from ..tiles import lanes, widened
from .formats import LARGEST, rounded8
from .hadamard import HEAD_DIMS, rotated

Per = Literal["tensor", "head", "block"]
BLOCK = 128
"""Rows that share a scale where scales are by block; flash_attention_fp8 expects it."""


class Quantised(NamedTuple):
    """stored (B, H, L, D) float8; descale float32 of shape (), (B, H) or (B, H, ceil(L / block))."""

    stored: Tensor
    descale: Tensor


@triton.jit(do_not_specialize=["heads", "L"])
def quantise_kernel(
    x, x_b, x_h, x_l, x_d,
    y, y_b, y_h, y_l, y_d,
    descale, descale_b, descale_h, descale_n, amax, signs, heads, L, largest,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head. Strides are in elements, but for those of descale, which may be 0.

    amax is given: their largest magnitude is written to it, (B, H, blocks), and nothing else (y and descale: None).
    Otherwise y is written; descale too, unless descale_n is None: then it is read. signs: None does not rotate. WIDE:
    offsets within a tile need 64 bits.
    """
    blocks = tl.cdiv(L, ROWS)
    block = tl.program_id(0) % blocks
    b = (tl.program_id(0) // blocks // heads).to(tl.int64)
    h = (tl.program_id(0) // blocks % heads).to(tl.int64)
    start = block.to(tl.int64) * ROWS
    lane_m = lanes(ROWS, WIDE)[:, None]  # (ROWS, 1)
    lane_d = lanes(BLOCK_D, WIDE)[None, :]  # (1, BLOCK_D)
    ok = (lane_m < L - block * ROWS) & (lane_d < D)
    # (ROWS, BLOCK_D)
    tile = tl.load(x + b * x_b + h * x_h + start * x_l + lane_m * x_l + lane_d * x_d, mask=ok, other=0.0)
    if signs is not None:  # noqa: SIM108  (constexpr: one of the two is compiled)
        z = rotated(tile, signs, ROWS, D)
    else:
        z = widened(tile)
    if descale_n is not None or amax is not None:
        size = tl.abs(z)
        most = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0)
    if amax is not None:
        tl.store(amax + tl.program_id(0), most)
    else:
        at = descale + b * descale_b + h * descale_h
        if descale_n is not None:
            factor = tl.where(most > 0.0, tl.maximum(tl.div_rn(most, largest), 1.1754943508222875e-38), 1.0)
            tl.store(at + block * descale_n, factor)
        else:
            factor = tl.load(at)
        z = rounded8(z * tl.div_rn(1.0, factor), y.dtype.element_ty)
        tl.store(y + b * y_b + h * y_h + start * y_l + lane_m * y_l + lane_d * y_d, z, mask=ok)


def quantise(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    per: Per = "block",
    block: int = BLOCK,
    signs: Tensor | None = None,
    transposed: bool = False,
) -> Quantised:
    """x (B, H, L, D) float16 or bfloat16, any strides, D at most 256, in FP8 with its descales.

    dtype: torch.float8_e4m3fn or torch.float8_e5m2. per: what shares a scale; block: rows, a power of two from 16 to
    256. signs (D,) float32 of ±1: rotate rows (D 64, 128 or 256). transposed: stored is a view of (B, H, D, L) memory.
    Raises ValueError for arguments that do not fit, NotImplementedError for what the kernel does not serve.
    """
    _check(x, dtype, per, block, signs)
    batch, heads, length = x.shape[:3]
    stored = x.new_empty(x.shape, dtype=dtype) if not transposed else _columns(x, dtype)
    blocks = triton.cdiv(length, block)
    if per == "block":
        descale = torch.empty((batch, heads, blocks), dtype=torch.float32, device=x.device)
        _launch(x, stored, descale, None, signs, block)
        return Quantised(stored, descale)
    # Rows in blocks only to be shared out among programs: a missing one (L = 0) leaves 0.
    amax = torch.zeros((batch, heads, max(1, blocks)), dtype=torch.float32, device=x.device)
    _launch(x, None, None, amax, signs, block)
    most = amax.amax(-1) if per == "head" else amax.max()
    smallest = torch.finfo(torch.float32).smallest_normal
    descale = torch.where(most > 0, (most / LARGEST[dtype]).clamp_min(smallest), 1.0)
    _launch(x, stored, descale, None, signs, block)
    return Quantised(stored, descale)


def by_columns(v: Tensor) -> Tensor:
    """A copy of v (B, H, L, D), one byte an element, as transposed=True stores it."""
    return _columns(v, v.dtype).copy_(v)


def _columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for x (B, H, L, D) in `dtype`: a view of (B, H, D, L) memory, L rounded up to a multiple of 16."""
    batch, heads, length, d = x.shape
    return x.new_empty((batch, heads, d, triton.cdiv(length, 16) * 16), dtype=dtype).mT[:, :, :length]


def _launch(
    x: Tensor, stored: Tensor | None, descale: Tensor | None, amax: Tensor | None, signs: Tensor | None, rows: int
) -> None:
    batch, heads, length, d = x.shape
    programs = batch * heads * triton.cdiv(length, rows)
    if programs == 0:
        return
    strides: tuple[int | None, ...] = (0, 0, None)
    if descale is not None and descale.dim():
        strides = (*descale.stride()[:2], descale.stride(2) if descale.dim() == 3 else None)
    block_d = triton.next_power_of_2(d)
    widest = max(rows * t.stride(2) + 256 * t.stride(3) for t in (x, stored) if t is not None)
    with torch.cuda.device_of(x):
        quantise_kernel[as_grid(programs)](
            x, *x.stride(), stored, *((0, 0, 0, 0) if stored is None else stored.stride()),
            descale, *strides, amax, signs, heads, length, 1.0 if stored is None else LARGEST[stored.dtype],
            D=d, BLOCK_D=block_d, ROWS=rows, WIDE=widest >= 2**31, num_warps=warps(rows, block_d),
        )  # fmt: skip


def warps(rows: int, block_d: int) -> int:
    """So that a thread has 64 elements of the tile in its registers, 128 of the largest."""
    return min(8, max(1, rows * block_d // (64 * 32)))


def dequantise(stored: Tensor, descale: Tensor, dtype: torch.dtype = torch.float32, *, block: int = BLOCK) -> Tensor:
    """stored (B, H, L, D) times its descale, in `dtype`; of rotated tensors that is the rotated one."""
    return (stored.float() * by_row(descale, stored, block)[..., None]).to(dtype)


def by_row(descale: Tensor, x: Tensor, block: int = BLOCK) -> Tensor:
    """The descale of every row of x (B, H, L, D), (B, H, L)."""
    if descale.dim() == 3:
        return descale.repeat_interleave(block, dim=2)[:, :, : x.shape[2]]
    return (descale[..., None] if descale.dim() else descale).expand(x.shape[:3])


def _check(x: Tensor, dtype: torch.dtype, per: str, block: int, signs: Tensor | None) -> None:
    if x.dim() != 4:
        raise ValueError(f"x must have 4 dimensions, (B, H, L, D), got shape {tuple(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"x {x.dtype}: the quantiser reads float16 and bfloat16")
    if dtype not in LARGEST:
        raise ValueError(f"dtype must be {' or '.join(map(str, LARGEST))}, got {dtype}")
    if per not in ("tensor", "head", "block"):
        raise ValueError(f"per must be 'tensor', 'head' or 'block', got {per!r}")
    if block not in (16, 32, 64, 128, 256):
        raise ValueError(f"block must be a power of two from 16 to 256, got {block}")
    if not 0 < x.shape[3] <= 256:
        raise NotImplementedError(f"head dim {x.shape[3]}: the quantiser takes 1 to 256")
    if signs is not None:
        if x.shape[3] not in HEAD_DIMS:
            raise NotImplementedError(f"head dim {x.shape[3]}: rows of {', '.join(map(str, HEAD_DIMS))} can be rotated")
        if signs.shape != (x.shape[3],) or signs.dtype != torch.float32 or signs.device != x.device:
            raise ValueError(
                f"signs must be ({x.shape[3]},) float32 on {x.device}, got {tuple(signs.shape)} {signs.dtype} on "
                f"{signs.device}: random_signs makes them"
            )
