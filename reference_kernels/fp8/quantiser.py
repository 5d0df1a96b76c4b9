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
as (B, H, L, D): kernels see shapes and strides, and need not know. A tile changes its order on its way through shared
memory; a thread then stores 16 rows of a column in one instruction, which only the padding of L allows for any L.

Scales: float32; x / descale is a product with 1 / descale, in float32.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import as_grid
from ..tiles import dot, lanes, widened
from .configs import MOST_WARPS, QuantiserConfig, quantiser_config
from .formats import LARGEST, rounded8
from .hadamard import HEAD_DIMS, signed_matrix

Per = Literal["tensor", "head", "block"]
BLOCK = 128
"""Rows that share a scale where scales are by block; flash_attention_fp8 expects it."""


class Quantised(NamedTuple):
    """stored (B, H, L, D) float8; descale float32 of shape (), (B, H) or (B, H, ceil(L / block))."""

    stored: Tensor
    descale: Tensor


@triton.jit
def _load(x, x_l, x_d, lane_m, ok, FIRST: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Columns FIRST … FIRST + PART - 1 of a tile, (ROWS, PART)."""
    lane_d = FIRST + lanes(PART, WIDE)[None, :]  # (1, PART)
    return tl.load(x + lane_m * x_l + lane_d * x_d, mask=ok & (lane_d < D), other=0.0)


@triton.jit
def _rotated(t, signs, FIRST: tl.constexpr, PART: tl.constexpr):
    """What `_load` returned times S H of order PART, float32."""
    return dot(t, signed_matrix(signs + FIRST, PART, t.dtype), None, "ieee")


@triton.jit
def _finite(z):
    """Magnitudes, 0 for what is not finite."""
    size = tl.abs(z)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _store(
    y, y_l, y_d, z, factor, lane_m, ok, FIRST: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """z (ROWS, PART) times factor, rounded, as columns FIRST … FIRST + PART - 1 of a tile."""
    lane_d = FIRST + lanes(PART, WIDE)[None, :]  # (1, PART)
    z = rounded8(z * factor, y.dtype.element_ty)
    tl.store(y + lane_m * y_l + lane_d * y_d, z, mask=ok & (lane_d < D))


@triton.jit(do_not_specialize=["heads", "L"])
def quantise_kernel(
    x, x_b, x_h, x_l, x_d,
    y, y_b, y_h, y_l, y_d,
    descale, descale_b, descale_h, descale_n, amax, signs, heads, L, largest,
    D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head, in parts of PART columns: one, or two or four if they are rotated.

    Strides are in elements, but for those of descale, which may be 0. y is None: their largest magnitude is written to
    amax, (B, H, blocks), and nothing else. Otherwise y and descale are written; descale_n is None: for the magnitudes
    in amax, which has the strides of descale. signs: None does not rotate. PADDED: y has room for its rows up to a
    multiple of 16, which are written too: a thread then stores 16 rows at once. WIDE: offsets within a tile need 64
    bits.
    """
    blocks = tl.cdiv(L, ROWS)
    block = tl.program_id(0) % blocks
    b = (tl.program_id(0) // blocks // heads).to(tl.int64)
    h = (tl.program_id(0) // blocks % heads).to(tl.int64)
    start = block.to(tl.int64) * ROWS
    lane_m = lanes(ROWS, WIDE)[:, None]  # (ROWS, 1)
    rows = L - block * ROWS
    ok = lane_m < rows
    x += b * x_b + h * x_h + start * x_l
    # (ROWS, PART) each; all are on their way before one is waited for
    t0 = _load(x, x_l, x_d, lane_m, ok, 0, PART, D, WIDE)
    if D > PART:
        t1 = _load(x, x_l, x_d, lane_m, ok, PART, PART, D, WIDE)
    if D > 2 * PART:
        t2 = _load(x, x_l, x_d, lane_m, ok, 2 * PART, PART, D, WIDE)
        t3 = _load(x, x_l, x_d, lane_m, ok, 3 * PART, PART, D, WIDE)
    if signs is None:  # noqa: SIM108  (constexpr: one of the two is compiled)
        z0 = widened(t0)
    else:
        z0 = _rotated(t0, signs, 0, PART)
    if D > PART:
        z1 = _rotated(t1, signs, PART, PART)
        z0, z1 = z0 + z1, z0 - z1
    if D > 2 * PART:
        z2 = _rotated(t2, signs, 2 * PART, PART)
        z3 = _rotated(t3, signs, 3 * PART, PART)
        z2, z3 = z2 + z3, z2 - z3
        z0, z2 = z0 + z2, z0 - z2
        z1, z3 = z1 + z3, z1 - z3
    # What the rotation leaves to be multiplied by.
    unit = 1.0 if signs is None else D**-0.5

    at = b * descale_b + h * descale_h
    if y is None or descale_n is not None:
        size = _finite(z0)
        if D > PART:
            size = tl.maximum(size, _finite(z1))
        if D > 2 * PART:
            size = tl.maximum(size, tl.maximum(_finite(z2), _finite(z3)))
        most = tl.max(size)
        most *= unit
    else:
        most = tl.load(amax + at)
    if y is None:
        tl.store(amax + tl.program_id(0), most)
    else:
        factor = tl.where(most > 0.0, tl.maximum(tl.div_rn(most, largest), 1.1754943508222875e-38), 1.0)
        if descale_n is None:
            tl.store(descale + at, factor, mask=block == 0)
        else:
            tl.store(descale + at + block * descale_n, factor)
        scale = tl.div_rn(1.0, factor) * unit
        if PADDED:
            ok = lane_m < (rows + 15) // 16 * 16
        y += b * y_b + h * y_h + start * y_l
        _store(y, y_l, y_d, z0, scale, lane_m, ok, 0, PART, D, WIDE)
        if D > PART:
            _store(y, y_l, y_d, z1, scale, lane_m, ok, PART, PART, D, WIDE)
        if D > 2 * PART:
            _store(y, y_l, y_d, z2, scale, lane_m, ok, 2 * PART, PART, D, WIDE)
            _store(y, y_l, y_d, z3, scale, lane_m, ok, 3 * PART, PART, D, WIDE)


def quantise(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    per: Per = "block",
    block: int = BLOCK,
    signs: Tensor | None = None,
    transposed: bool = False,
    config: QuantiserConfig | None = None,
) -> Quantised:
    """x (B, H, L, D) float16 or bfloat16, any strides, D at most 256, in FP8 with its descales.

    dtype: torch.float8_e4m3fn or torch.float8_e5m2. per: what shares a scale; block: rows, a power of two from 16 to
    256. signs (D,) float32 of ±1: rotate rows (D 64, 128 or 256). transposed: stored is a view of (B, H, D, L) memory.
    config: None takes the table's.
    Raises ValueError for arguments that do not fit, NotImplementedError for what the kernel does not serve.
    """
    _check(x, dtype, per, block, signs)
    batch, heads, length, d = x.shape
    config = config or quantiser_config(d, rotated=signs is not None, transposed=transposed)
    stored = _columns(x, dtype) if transposed else x.new_empty(x.shape, dtype=dtype)
    blocks = triton.cdiv(length, block)
    shape = {"tensor": (), "head": (batch, heads), "block": (batch, heads, blocks)}[per]
    if x.numel() == 0:
        return Quantised(stored, torch.ones(shape, dtype=torch.float32, device=x.device))
    descale = torch.empty(shape, dtype=torch.float32, device=x.device)
    amax = None
    if per != "block":
        # Rows in blocks only to be shared out among programs.
        amax = torch.empty((batch, heads, blocks), dtype=torch.float32, device=x.device)
        _launch(x, None, None, amax, signs, block, config)
        amax = amax.amax(-1) if per == "head" else amax.max()
    _launch(x, stored, descale, amax, signs, block, config)
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
    config: QuantiserConfig,
) -> None:
    batch, heads, length, d = x.shape
    strides: tuple[int | None, ...] = (0, 0, None)
    if descale is not None and descale.dim():
        strides = (*descale.stride()[:2], descale.stride(2) if descale.dim() == 3 else None)
    widest = max(rows * t.stride(2) + 256 * t.stride(3) for t in (x, stored) if t is not None)
    with torch.cuda.device_of(x):
        quantise_kernel[as_grid(batch * heads * triton.cdiv(length, rows))](
            x, *x.stride(), stored, *((0, 0, 0, 0) if stored is None else stored.stride()),
            descale, *strides, amax, signs, heads, length, 1.0 if stored is None else LARGEST[stored.dtype],
            **tile(config, d, rows, rotated=signs is not None), WIDE=widest >= 2**31,
            PADDED=stored is not None and stored.stride(2) == 1 and stored.stride(3) % 16 == 0,
        )  # fmt: skip


def tile(config: QuantiserConfig, d: int, rows: int, *, rotated: bool) -> dict[str, int]:
    """What `config` means for tiles of so many rows, as options of a launch."""
    block_d = triton.next_power_of_2(d)
    num_warps = min(MOST_WARPS, max(1, rows * block_d // (32 * config.elements)))
    return {"D": d, "PART": min(block_d, config.part) if rotated else block_d, "ROWS": rows, "num_warps": num_warps}


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
