"""What every kernel does with a tile: index it, load it, multiply it, round it.

Triton's interpreter (TRITON_INTERPRET=1, no GPU needed) is wrong about bfloat16 in 3.9: `tl.dot` multiplies the bit
patterns as integers, a cast from float32 cuts off instead of rounding, and subnormal numbers widen to noise. `dot` and
`rounded` go around that, visibly and only there: compiled kernels contain none of it. (Triton 3.6's interpreter needs
NumPy below 2.4, which no longer makes an integer of an array with one element.)
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels of this process are run by the interpreter; fixed when they are decorated, at import."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def lanes(N: tl.constexpr, WIDE: tl.constexpr):
    """0, 1, …, N - 1. WIDE: in 64 bits, for tensors one tile of which spans 2^31 elements or more."""
    i = tl.arange(0, N)
    if WIDE:
        i = i.to(tl.int64)
    return i


@triton.jit
def load_tile(pointers, rows_ok, columns_ok, CHECK_ROWS: tl.constexpr, CHECK_COLUMNS: tl.constexpr):
    """A tile (R, C) with zeros outside the tensor. rows_ok (R, 1), columns_ok (1, C); only what is CHECKed counts."""
    if CHECK_ROWS and CHECK_COLUMNS:
        tile = tl.load(pointers, mask=rows_ok & columns_ok, other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=rows_ok, other=0.0)
    elif CHECK_COLUMNS:
        tile = tl.load(pointers, mask=columns_ok, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def widened(x):
    """x in float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        # A bfloat16 is the upper half of a float32.
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b in float32; acc None is zero. Products of two 16-bit numbers are exact in float32, widened or not."""
    if INTERPRETED:
        a = widened(a)
        b = widened(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x, float32, rounded to DTYPE, to nearest even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        y = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y
