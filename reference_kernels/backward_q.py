"""dQ: a block of query rows resident, keys and values streamed past, as in the forward.

The mathematics is in backward.py:

    dQ = scale dX K

Accumulators dq, and S, dP: float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .causal import bands
from .scores import hide, logits, row_shift
from .tiles import dot, lanes, load_tile, rounded, widened


@triton.jit
def stream_keys(
    dq, qt, dot_, shift, d, k, v, k_offsets, v_offsets, k_l, v_l, lo, hi, rows, d_ok, dv_ok,
    bias, bias_l, bias_k, mask, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stream the keys lo … hi - 1 past the resident rows. dq (BLOCK_M, BLOCK_D): float32, without the scale."""
    keys = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    lane_n = lanes(BLOCK_N, WIDE)[:, None]  # (BLOCK_N, 1)
    k_tile = k + tl.cast(lo, tl.int64) * k_l
    v_tile = v + tl.cast(lo, tl.int64) * v_l
    k_step = tl.full([], BLOCK_N, tl.int64) * k_l
    v_step = tl.full([], BLOCK_N, tl.int64) * v_l
    for n in tl.range(lo, hi, BLOCK_N):
        here = lane_n < Lk - n  # (BLOCK_N, 1)
        # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
        kt = load_tile(k_tile + k_offsets, here, d_ok, MASKED and TAIL, D != BLOCK_D)
        vt = load_tile(v_tile + v_offsets, here, dv_ok, MASKED and TAIL, DV != BLOCK_DV)
        # (BLOCK_M, BLOCK_N)
        s = dot(qt, tl.trans(kt), None, PRECISION)
        s, dsdx = logits(
            s, scale, softcap, slope, bias, bias_l, bias_k, mask, mask_l, mask_k, rows, n + keys, Lq, Lk, False, WIDE,
        )  # fmt: skip
        if MASKED:
            s = hide(s, rows, n + keys, Lq, Lk, left, right, TAIL)
        p = tl.exp2(s - shift[:, None])
        dp = dot(dot_, tl.trans(vt), None, PRECISION)
        dx = p * (dp - d[:, None])
        if softcap is not None:
            dx *= dsdx
        # (BLOCK_M, BLOCK_D)
        dq = dot(rounded(dx, k.dtype.element_ty), kt, dq, PRECISION)
        k_tile += k_step
        v_tile += v_step
    return dq


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk", "left", "right"])
def dq_kernel(
    q, q_b, q_h, q_l, q_d,
    k, k_b, k_h, k_l, k_d,
    v, v_b, v_h, v_l, v_d,
    do, do_b, do_h, do_l, do_d,
    dq, dq_b, dq_h, dq_l, dq_d,
    lse, delta, slopes, slopes_b, slopes_h,
    bias, bias_b, bias_h, bias_l, bias_k,
    mask, mask_b, mask_h, mask_l, mask_k,
    heads, group, Lq, Lk, left, right, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dQ of one block of BLOCK_M query rows of one head; accumulator float32. TAIL: Lk is not a multiple of BLOCK_N."""
    blocks = tl.cdiv(Lq, BLOCK_M)
    block = tl.program_id(0) % blocks
    b = (tl.program_id(0) // blocks // heads).to(tl.int64)
    h = (tl.program_id(0) // blocks % heads).to(tl.int64)
    if right is not None:
        block = blocks - 1 - block  # the longest rows first
    start = block * BLOCK_M

    lane_m = lanes(BLOCK_M, WIDE)[:, None]  # (BLOCK_M, 1)
    lane_n = lanes(BLOCK_N, WIDE)[:, None]  # (BLOCK_N, 1)
    lane_d = lanes(BLOCK_D, WIDE)[None, :]  # (1, BLOCK_D)
    lane_dv = lanes(BLOCK_DV, WIDE)[None, :]  # (1, BLOCK_DV)
    row = start + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    rows = row[:, None]  # (BLOCK_M, 1)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    slope = None
    if slopes is not None:
        slope = widened(tl.load(slopes + b * slopes_b + h * slopes_h))
    if bias is not None:
        bias += b * bias_b + h * bias_h
    if mask is not None:
        mask += b * mask_b + h * mask_h

    # (BLOCK_M, BLOCK_D), (BLOCK_M, BLOCK_DV), (BLOCK_M,), (BLOCK_M,)
    q_tile = q + b * q_b + h * q_h + start.to(tl.int64) * q_l
    do_tile = do + b * do_b + h * do_h + start.to(tl.int64) * do_l
    qt = load_tile(q_tile + lane_m * q_l + lane_d * q_d, rows < Lq, lane_d < D, True, D != BLOCK_D)
    dot_ = load_tile(do_tile + lane_m * do_l + lane_dv * do_d, rows < Lq, lane_dv < DV, True, DV != BLOCK_DV)
    shift = row_shift(lse + (b * heads + h) * Lq, row, True, row < Lq)
    d = tl.load(delta + (b * heads + h) * Lq + row, mask=row < Lq, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # (BLOCK_M, BLOCK_D)
    k_offsets = lane_n * k_l + lane_d * k_d  # (BLOCK_N, BLOCK_D)
    v_offsets = lane_n * v_l + lane_dv * v_d  # (BLOCK_N, BLOCK_DV)
    lo, full_lo, full_hi, hi = bands(start, Lq, Lk, left, right, BLOCK_M, BLOCK_N)
    if left is not None:
        acc = stream_keys(
            acc, qt, dot_, shift, d, k, v, k_offsets, v_offsets, k_l, v_l, lo, full_lo, rows, lane_d < D, lane_dv < DV,
            bias, bias_l, bias_k, mask, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, TAIL, PRECISION, WIDE,
        )  # fmt: skip
    acc = stream_keys(
        acc, qt, dot_, shift, d, k, v, k_offsets, v_offsets, k_l, v_l, full_lo, full_hi, rows, lane_d < D, lane_dv < DV,
        bias, bias_l, bias_k, mask, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, TAIL, PRECISION, WIDE,
    )  # fmt: skip
    if TAIL or right is not None:
        acc = stream_keys(
            acc, qt, dot_, shift, d, k, v, k_offsets, v_offsets, k_l, v_l, full_hi, hi, rows, lane_d < D, lane_dv < DV,
            bias, bias_l, bias_k, mask, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, TAIL, PRECISION, WIDE,
        )  # fmt: skip

    dq_tile = dq + b * dq_b + h * dq_h + start.to(tl.int64) * dq_l
    tl.store(
        dq_tile + lane_m * dq_l + lane_d * dq_d,
        rounded(acc * scale, dq.dtype.element_ty),
        mask=(rows < Lq) & (lane_d < D),
    )
