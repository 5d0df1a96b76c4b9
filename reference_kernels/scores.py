"""From q k^T to scores: scale, softcap, ALiBi, bias, masks, in this order.

    x = scale q.k
    s = softcap tanh(x / softcap)                ds/dx = 1 - tanh(x / softcap)^2
    s = s - slope |i + Lk - Lq - j|              the distance to the row's diagonal, bottom-right
    s = s + bias
    s = -inf where hidden

in units of log2: all times log2 e. An option that is None is not there when the kernel is compiled, and costs nothing.
The helpers take row and key numbers that broadcast against the tile, so a tile may be (rows, keys) or (keys, rows).

Scores and derivatives: float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOG2E, NEG_INF, widened


@triton.jit
def capped(x, softcap):
    """softcap tanh(x / softcap), and its derivative.

    With t = exp(-2 |y|): tanh |y| = (1 - t) / (1 + t), right to an ulp of 1, and 1 - tanh^2 = 4 t / (1 + t)^2, right to
    an ulp of itself also where tanh is 1.
    """
    y = x / softcap
    t = tl.exp2(tl.abs(y) * (-2.0 * LOG2E))
    magnitude = softcap * (1.0 - t) / (1.0 + t)
    return tl.where(y < 0, -magnitude, magnitude), 4.0 * t / ((1.0 + t) * (1.0 + t))


@triton.jit
def logits(
    x, scale, softcap, slope, bias, bias_l, bias_k, mask, mask_l, mask_k, rows, keys, Lq, Lk,
    FOLD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores of a tile x = q k^T, hidden ones by position excepted, and ds/dx (1.0 without a softcap).

    rows, keys: int32, broadcastable to the tile. bias, mask: pointers to this batch and head, with the strides of rows
    and keys. slope: of this head. Any of softcap, slope, bias, mask may be None.
    FOLD: leave the scale to the exponent (online_step's unit); only without softcap, slope and bias. WIDE: bias and
    mask are indexed in 64 bits.
    """
    dsdx = 1.0
    if FOLD:
        s = x
    elif softcap is not None:
        s, dsdx = capped(x * scale, softcap)
        s = s * LOG2E
    else:
        s = x * (scale * LOG2E)
    if slope is not None:
        s -= (slope * LOG2E) * tl.abs(rows + (Lk - Lq) - keys).to(tl.float32)
    inside = (rows < Lq) & (keys < Lk)
    if WIDE:
        rows = rows.to(tl.int64)
        keys = keys.to(tl.int64)
    if bias is not None:
        tile = tl.load(bias + rows * bias_l + keys * bias_k, mask=inside, other=0.0)
        s += widened(tile) * LOG2E
    if mask is not None:
        tile = tl.load(mask + rows * mask_l + keys * mask_k, mask=inside, other=0)
        s = tl.where(tile != 0, s, NEG_INF)
    return s, dsdx


@triton.jit
def hide(s, rows, keys, Lq, Lk, left, right, TAIL: tl.constexpr):
    """s, -inf where the key lies outside of the window around the row's diagonal i + Lk - Lq, or does not exist.

    left, right: None is unbounded. TAIL: keys may be beyond Lk. Rows beyond Lq are not looked at: nothing is stored for
    them. The bound is moved to the row, so that each element costs one comparison a side.
    """
    if TAIL:
        s = tl.where(keys < Lk, s, NEG_INF)
    if right is not None:
        s = tl.where(keys <= rows + (Lk - Lq + right), s, NEG_INF)
    if left is not None:
        s = tl.where(keys >= rows + (Lk - Lq - left), s, NEG_INF)
    return s


@triton.jit
def row_shift(lse, offset, CHECK: tl.constexpr, ok):
    """lse in log2, to subtract from scores: 0 for a row that sees no key, +inf (P = 0) for one that is not there.

    CHECK: whether ok is looked at.
    """
    if CHECK:  # noqa: SIM108  (constexpr: one of the two is compiled)
        x = tl.load(lse + offset, mask=ok, other=float("inf"))
    else:
        x = tl.load(lse + offset)
    return tl.where(x == NEG_INF, 0.0, x) * LOG2E
