"""dK and dV: a block of keys resident, the query rows of all heads of its group streamed past.

The mathematics is in backward.py:

    dV = sum_h P_h^T dO_h          dK = scale sum_h dX_h^T Q_h          h: the query heads that read this kv head

S^T, P^T and dX^T are computed transposed, (keys, rows), so that both products that are summed take them as they are.
Accumulators dk, dv, and S, dP: float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .causal import bands
from .scores import hide, logits, row_shift
from .tiles import dot, lanes, load_tile, rounded, widened


@triton.jit
def stream_rows(
    dk, dv, kt, vt, q, do, lse, delta, q_offsets, do_offsets, q_l, do_l, lo, hi, keys, d_ok, dv_ok,
    bias, bias_l, bias_k, mask, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stream the query rows lo … hi - 1 of one head past the resident keys. Tiles are transposed: (keys, rows).

    dk (BLOCK_N, BLOCK_D), dv (BLOCK_N, BLOCK_DV): float32, returned with the share of these rows; dk without the scale.
    """
    rows = tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    lane_m = lanes(BLOCK_M, WIDE)[:, None]  # (BLOCK_M, 1)
    q_tile = q + tl.cast(lo, tl.int64) * q_l
    do_tile = do + tl.cast(lo, tl.int64) * do_l
    q_step = tl.full([], BLOCK_M, tl.int64) * q_l
    do_step = tl.full([], BLOCK_M, tl.int64) * do_l
    # Few masked tiles: pipelining them costs registers, of which the accumulators leave none.
    for m in tl.range(lo, hi, BLOCK_M, num_stages=1 if MASKED else None):
        here = lane_m < Lq - m  # (BLOCK_M, 1)
        # (BLOCK_M, BLOCK_D)
        qt = load_tile(q_tile + q_offsets, here, d_ok, MASKED and TAIL, D != BLOCK_D)
        shift = row_shift(lse, m + rows, MASKED and TAIL, m + rows < Lq)  # (BLOCK_M,)
        # (BLOCK_N, BLOCK_M)
        s = dot(kt, tl.trans(qt), None, PRECISION)
        s, dsdx = logits(
            s, scale, softcap, slope, bias, bias_l, bias_k, mask, mask_l, mask_k,
            (m + rows)[None, :], keys, Lq, Lk, False, WIDE,
        )  # fmt: skip
        if MASKED:
            s = hide(s, (m + rows)[None, :], keys, Lq, Lk, left, right, TAIL)
        p = tl.exp2(s - shift[None, :])
        # (BLOCK_M, BLOCK_DV)
        dot_ = load_tile(do_tile + do_offsets, here, dv_ok, MASKED and TAIL, DV != BLOCK_DV)
        dv = dot(rounded(p, do.dtype.element_ty), dot_, dv, PRECISION)
        if MASKED and TAIL:  # noqa: SIM108  (constexpr: one of the two is compiled)
            d = tl.load(delta + m + rows, mask=m + rows < Lq, other=0.0)
        else:
            d = tl.load(delta + m + rows)
        # (BLOCK_N, BLOCK_M)
        dp = dot(vt, tl.trans(dot_), None, PRECISION)
        dx = p * (dp - d[None, :])
        if softcap is not None:
            dx *= dsdx
        dk = dot(rounded(dx, q.dtype.element_ty), qt, dk, PRECISION)
        q_tile += q_step
        do_tile += do_step
    return dk, dv


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk", "left", "right"])
def dkv_kernel(
    q, q_b, q_h, q_l, q_d,
    k, k_b, k_h, k_l, k_d,
    v, v_b, v_h, v_l, v_d,
    do, do_b, do_h, do_l, do_d,
    dk, dk_b, dk_h, dk_l, dk_d,
    dv, dv_b, dv_h, dv_l, dv_d,
    lse, delta, slopes, slopes_b, slopes_h,
    bias, bias_b, bias_h, bias_l, bias_k,
    mask, mask_b, mask_h, mask_l, mask_k,
    heads, group, Lq, Lk, left, right, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of BLOCK_N keys of one kv head; accumulators float32.

    lse, delta: contiguous (B, Hq, Lq). TAIL: Lq is not a multiple of BLOCK_M, or Lk not of BLOCK_N.
    """
    blocks = tl.cdiv(Lk, BLOCK_N)
    kv_heads = heads // group
    start = (tl.program_id(0) % blocks) * BLOCK_N
    b = (tl.program_id(0) // blocks // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) // blocks % kv_heads).to(tl.int64)

    lane_m = lanes(BLOCK_M, WIDE)[:, None]  # (BLOCK_M, 1)
    lane_n = lanes(BLOCK_N, WIDE)[:, None]  # (BLOCK_N, 1)
    lane_d = lanes(BLOCK_D, WIDE)[None, :]  # (1, BLOCK_D)
    lane_dv = lanes(BLOCK_DV, WIDE)[None, :]  # (1, BLOCK_DV)
    keys = start + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    first = start.to(tl.int64)
    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    k_tile = k + b * k_b + kv_head * k_h + first * k_l
    v_tile = v + b * v_b + kv_head * v_h + first * v_l
    kt = load_tile(k_tile + lane_n * k_l + lane_d * k_d, keys < Lk, lane_d < D, True, D != BLOCK_D)
    vt = load_tile(v_tile + lane_n * v_l + lane_dv * v_d, keys < Lk, lane_dv < DV, True, DV != BLOCK_DV)

    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    q_offsets = lane_m * q_l + lane_d * q_d  # (BLOCK_M, BLOCK_D)
    do_offsets = lane_m * do_l + lane_dv * do_d  # (BLOCK_M, BLOCK_DV)
    # Seen from a key, what the rows see to their left lies after it.
    lo, full_lo, full_hi, hi = bands(start, Lk, Lq, right, left, BLOCK_N, BLOCK_M)
    # A key that does not exist scores 0, which may be so far above a row's lse that its exponential is inf.
    full_hi = tl.where(start + BLOCK_N > Lk, full_lo, full_hi)
    for member in tl.range(0, group):
        h = kv_head * group + member
        q_head = q + b * q_b + h * q_h
        do_head = do + b * do_b + h * do_h
        lse_head = lse + (b * heads + h) * Lq
        delta_head = delta + (b * heads + h) * Lq
        slope = None
        bias_head = None
        mask_head = None
        if slopes is not None:
            slope = widened(tl.load(slopes + b * slopes_b + h * slopes_h))
        if bias is not None:
            bias_head = bias + b * bias_b + h * bias_h
        if mask is not None:
            mask_head = mask + b * mask_b + h * mask_h
        if right is not None:
            dk_acc, dv_acc = stream_rows(
                dk_acc, dv_acc, kt, vt, q_head, do_head, lse_head, delta_head, q_offsets, do_offsets, q_l, do_l,
                lo, full_lo, keys, lane_d < D, lane_dv < DV,
                bias_head, bias_l, bias_k, mask_head, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, True, TAIL, PRECISION, WIDE,
            )  # fmt: skip
        dk_acc, dv_acc = stream_rows(
            dk_acc, dv_acc, kt, vt, q_head, do_head, lse_head, delta_head, q_offsets, do_offsets, q_l, do_l,
            full_lo, full_hi, keys, lane_d < D, lane_dv < DV,
            bias_head, bias_l, bias_k, mask_head, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, False, TAIL, PRECISION, WIDE,
        )  # fmt: skip
        if TAIL or left is not None:
            dk_acc, dv_acc = stream_rows(
                dk_acc, dv_acc, kt, vt, q_head, do_head, lse_head, delta_head, q_offsets, do_offsets, q_l, do_l,
                full_hi, hi, keys, lane_d < D, lane_dv < DV,
                bias_head, bias_l, bias_k, mask_head, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, True, TAIL, PRECISION, WIDE,
            )  # fmt: skip

    dk_tile = dk + b * dk_b + kv_head * dk_h + first * dk_l
    dv_tile = dv + b * dv_b + kv_head * dv_h + first * dv_l
    tl.store(
        dk_tile + lane_n * dk_l + lane_d * dk_d,
        rounded(dk_acc * scale, dk.dtype.element_ty),
        mask=(keys < Lk) & (lane_d < D),
    )
    tl.store(
        dv_tile + lane_n * dv_l + lane_dv * dv_d,
        rounded(dv_acc, dv.dtype.element_ty),
        mask=(keys < Lk) & (lane_dv < DV),
    )
