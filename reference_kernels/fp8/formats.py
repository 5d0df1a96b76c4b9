"""The two 8-bit floating-point formats, and how kernels round to them and multiply them.

            exponent   mantissa   largest    smallest normal   smallest   inf
    E4M3    4 bits     3 bits     448        2^-6              2^-9       none, NaN is S.1111.111
    E5M2    5 bits     2 bits     57344      2^-14             2^-16      as in IEEE 754

A product of two of their numbers is exact in float32. What is beyond the largest number becomes the largest one with
that sign, infinities too: that is how the GPU's conversion saturates. NaN stays NaN.

Triton's interpreter (3.9) cuts numbers off where the GPU rounds to nearest even, has no subnormal numbers, and widens
NaN and infinities to numbers. `rounded8` and `dot8` go around that, visibly and only there: compiled kernels contain
none of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..tiles import INTERPRETED

LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest number of each format; its keys are the dtypes that these kernels take."""


@triton.jit
def _encoded(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, NAN: tl.constexpr):
    """The bits of x (float32) in a format of MANTISSA bits, exponent bias BIAS and largest number MOST, as uint8."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    sign = bits >> 31 << 7
    size = tl.minimum(tl.abs(x), MOST)
    # To nearest even: add half of the last place that stays, less one if that place is even, and cut off.
    bits = size.to(tl.uint32, bitcast=True)
    bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    normal = (bits >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number the places are all 2^(1 - BIAS - MANTISSA) wide. 2^23 of them, added and taken
    # away again, leave a whole number of them, rounded by the addition.
    PLACES: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    few = (size * PLACES + 8388608.0) - 8388608.0
    code = tl.where(size < 2.0 ** (1 - BIAS), few.to(tl.uint32), normal)
    code = tl.where(x == x, code, NAN)
    return (code | sign).to(tl.uint8)


@triton.jit
def rounded8(x, DTYPE: tl.constexpr):
    """x, float32, rounded to DTYPE (tl.float8e4nv or tl.float8e5), to nearest even, saturating."""
    if INTERPRETED and tl.float8e4nv == DTYPE:
        y = _encoded(x, 3, 7, 448.0, 0x7F).to(DTYPE, bitcast=True)
    elif INTERPRETED:
        y = _encoded(x, 2, 15, 57344.0, 0x7F).to(DTYPE, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def _widened8(x):
    """x in float32, exactly, in the interpreter."""
    y = x.to(tl.float32)
    code = x.to(tl.uint8, bitcast=True) & 0x7F
    if x.dtype == tl.float8e4nv:
        y = tl.where(code == 0x7F, float("nan"), y)
    else:
        inf = tl.where(y < 0.0, float("-inf"), float("inf"))
        y = tl.where(code > 0x7C, float("nan"), tl.where(code == 0x7C, inf, y))
    return y


@triton.jit
def dot8(a, b):
    """a b in float32. Nothing is added to it: see forward.py for why every tile has a product of its own."""
    if INTERPRETED:
        a = _widened8(a)
        b = _widened8(b)
    return tl.dot(a, b, input_precision="ieee")
