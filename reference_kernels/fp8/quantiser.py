"""From 16-bit numbers to FP8 with a scale: by tensor, by head, or by block of rows.

    amax = max |x|        descale = amax / largest        stored = round(x / descale)        x ≈ stored descale

over the elements that share a scale. `largest` is 448 for E4M3 and 57344 for E5M2, so that nothing saturates and the
largest element uses the whole range. One scale for a block of rows follows the data more closely than one for a head or
a tensor: an outlier costs its own block the small numbers, and no other.

- All zeros: descale 1, stored 0. Nothing is divided by 0.
- Infinities and NaN do not count for amax, or one of them would erase its neighbours. An infinity is stored as the
  largest number with its sign, NaN as NaN. A rotation mixes a row: with either in it, nothing of that row is left.
- amax below 2^-126 largest: descale stays 2^-126, whose reciprocal is a number; such elements keep fewer bits.

With `signs`, rows are rotated before (hadamard.py), in the same pass over memory. Scales by block read x once; by head
or tensor twice, once for amax, once to round: amax of each block, then their maximum, so that no atomic is needed.

V is stored transposed on request: the FP8 products of Hopper read both operands along the axis that they sum over, and
P V sums over keys. Memory is then (B, H, D, L), L rounded up to a multiple of 16, and what is returned is a view of it
as (B, H, L, D): kernels see shapes and strides, and need not know. A thread stores 16 rows of a column in one
instruction, which only the padding of L allows for any L.

Scales: float32; x / descale is a product with 1 / descale, in float32.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

from ..launch import as_grid
from .configs import MOST_WARPS, QuantiserConfig, quantiser_config_for
from .formats import LARGEST
from .hadamard import HEAD_DIMS
from .quantiser_kernel import quantise_kernel

Per = Literal["tensor", "head", "block"]
BLOCK = 128
"""Rows that share a scale where scales are by block; flash_attention_fp8 expects it."""


class Quantised(NamedTuple):
    """stored (B, H, L, D) float8; descale float32 of shape (), (B, H) or (B, H, ceil(L / block))."""

    stored: Tensor
    descale: Tensor


def quantise(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    per: Per = "block",
    block: int = BLOCK,
    signs: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    config: QuantiserConfig | None = None,
) -> Quantised:
    """x (B, H, L, D) float16 or bfloat16, any strides, D at most 256, in FP8 with its descales.

    dtype: torch.float8_e4m3fn or torch.float8_e5m2. per: what shares a scale; block: rows, a power of two from 16 to
    256. signs (D,) float32 of ±1: rotate rows (D 64, 128 or 256). transposed: stored is a view of (B, H, D, L) memory.
    interleaved, if transposed: byte 4 j + 2 h + b of each 16 keys in it is key 8 h + 2 j + b, j 0 … 3, h and b 0 and 1:
    the order in which a thread of a matrix product holds its columns. Keys of the last 16 may then lie beyond L.
    config: None takes the table's.
    Raises ValueError for arguments that do not fit, NotImplementedError for what the kernel does not serve.
    """
    _check(x, dtype, per, block, signs)
    if interleaved and not transposed:
        raise ValueError("interleaved is an order of keys along memory: it needs transposed=True")
    batch, heads, length, _ = x.shape
    stored = _columns(x, dtype) if transposed else x.new_empty(x.shape, dtype=dtype)
    blocks = triton.cdiv(length, block)
    shape = {"tensor": (), "head": (batch, heads), "block": (batch, heads, blocks)}[per]
    if x.numel() == 0:
        return Quantised(stored, torch.ones(shape, dtype=torch.float32, device=x.device))
    config = config or quantiser_config_for(x, rotated=signs is not None, transposed=transposed)
    descale = torch.empty(shape, dtype=torch.float32, device=x.device)
    amax = None
    if per != "block":
        # Rows in blocks only to be shared out among programs.
        amax = torch.empty((batch, heads, blocks), dtype=torch.float32, device=x.device)
        _launch(x, None, None, amax, signs, block, False, config)
        amax = amax.amax(-1) if per == "head" else amax.max()
    _launch(x, stored, descale, amax, signs, block, interleaved, config)
    return Quantised(stored, descale)


def by_columns(v: Tensor) -> Tensor:
    """A copy of v (B, H, L, D), one byte an element, as transposed=True stores it."""
    return _columns(v, v.dtype).copy_(v)


def _columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for x (B, H, L, D) in `dtype`: a view of (B, H, D, L) memory, L rounded up to a multiple of 16."""
    batch, heads, length, d = x.shape
    return x.new_empty((batch, heads, d, triton.cdiv(length, 16) * 16), dtype=dtype).mT[:, :, :length]


def _launch(
    x: Tensor,
    stored: Tensor | None,
    descale: Tensor | None,
    amax: Tensor | None,
    signs: Tensor | None,
    rows: int,
    interleaved: bool,
    config: QuantiserConfig,
) -> None:
    batch, heads, length, d = x.shape
    strides: tuple[int | None, ...] = (0, 0, None)
    if descale is not None and descale.dim():
        strides = (*descale.stride()[:2], descale.stride(2) if descale.dim() == 3 else None)
    widest = max(rows * t.stride(2) + 256 * t.stride(3) for t in (x, stored) if t is not None)
    count = batch * heads * triton.cdiv(length, rows)
    options = tile(config, d, rows, rotated=signs is not None)
    with torch.cuda.device_of(x):
        quantise_kernel[as_grid(min(count, config.programs * _sms(x.device)) if options["AHEAD"] else count)](
            x, *x.stride(), stored, *((0, 0, 0, 0) if stored is None else stored.stride()),
            descale, *strides, amax, signs, heads, length, count, 1.0 if stored is None else LARGEST[stored.dtype],
            **options, INTERLEAVED=interleaved, WIDE=widest >= 2**31,
            PADDED=stored is not None and stored.stride(2) == 1 and stored.stride(3) % 16 == 0,
        )  # fmt: skip


@functools.cache
def _sms(device: torch.device) -> int:
    if device.type == "cpu":  # the interpreter: one
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def tile(config: QuantiserConfig, d: int, rows: int, *, rotated: bool) -> dict[str, int]:
    """What `config` means for tiles of so many rows, as options of a launch."""
    block_d = triton.next_power_of_2(d)
    return {
        "D": d,
        "PART": min(block_d, config.part) if rotated else block_d,
        "ROWS": rows,
        "AHEAD": config.ahead if rotated else 0,
        "num_warps": min(MOST_WARPS, max(1, rows * block_d // (32 * config.elements))),
    }


def dequantise(stored: Tensor, descale: Tensor, dtype: torch.dtype = torch.float32, *, block: int = BLOCK) -> Tensor:
    """stored (B, H, L, D) times its descale, in `dtype`, contiguous; of rotated tensors that is the rotated one."""
    return (stored.float() * by_row(descale, stored, block)[..., None]).to(dtype).contiguous()


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
