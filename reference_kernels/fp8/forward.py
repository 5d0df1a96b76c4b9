# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""The FP8 forward in plain Triton: ../forward.py, with scales, and with P rounded to E4M3.

    S = scale dq dk Q8 K8^T      P = exp(S - m)      O = sum_t dv_t round(2^8 P_t) V8_t / (2^8 l)      l = rowsum P

over tiles t of BLOCK_N keys. q = dq Q8 and so on; a tile lies in one block of scales, so that dq, dk, dv are numbers.

- **S in float32.** Its scale is applied to the product; maximum, exponentials and sums never see 8 bits.
- **P times 2^8.** P is at most 1, and E4M3 has 4 bits of precision from 448 down to 2^-6. The factor puts 1 at 256:
  nothing overflows, and P keeps its bits down to 2^-14 instead of 2^-6. A power of two, it rounds nothing. l sums P as
  it was before rounding.
- **A product of its own for each tile.** acc = alpha acc + dv_t (P_t V8_t), where P_t V8_t begins at 0. The scale of a
  tile of V belongs to that tile's summand: to multiply the sum by it (acc = (acc + P_t V8_t) dv_t) would scale all
  tiles before it as well. And the tensor cores of Hopper and Ada add up FP8 products in fewer bits than float32 has:
  what they sum is one tile, and the sum over tiles is ordinary float32.

Accumulators: acc, m, l, S and P V float32; P is rounded to E4M3 whatever V is; O is rounded once, to bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..causal import bands
from ..configs import Config
from ..launch import as_grid, head_dim_blocks, options, sides
from ..online import online_step
from ..scores import hide
from ..tiles import LN2, LOG2E, NEG_INF, lanes, load_tile, rounded
from .configs import config_for
from .formats import dot8, rounded8
from .quantiser import BLOCK

P_SCALE = tl.constexpr(256.0)
"""What P, at most 1, is multiplied by before it is rounded: 2^8, the largest power of two below 448."""


@triton.jit
def attend(
    acc, m, l, q, k, v, k_offsets, v_offsets, k_l, v_l, k_descale, k_descale_n, v_descale, v_descale_n, unit,
    lo, hi, rows, d_ok, dv_ok, Lq, Lk, right,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Stream the tiles of keys lo … hi - 1 past the resident rows. unit: scale dq log2(e).

    acc (BLOCK_M, BLOCK_DV), m, l (BLOCK_M,): float32, as before these keys; returned as after them.
    """
    keys = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    lane_n = tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    for n in tl.range(lo, hi, BLOCK_N):
        here = lane_n < Lk - n  # (BLOCK_N, 1)
        first = tl.cast(n, tl.int64)
        dk = tl.load(k_descale + n // SCALE_BLOCK * k_descale_n)
        dv = tl.load(v_descale + n // SCALE_BLOCK * v_descale_n)
        # (BLOCK_N, BLOCK_D)
        kt = load_tile(k + first * k_l + k_offsets, here, d_ok, MASKED and TAIL, D != BLOCK_D)
        # (BLOCK_M, BLOCK_N), in units of log2
        s = dot8(q, tl.trans(kt)) * (unit * dk)
        if MASKED:
            s = hide(s, rows, n + keys, Lq, Lk, None, right, TAIL)
        p, alpha, m, l = online_step(s, 1.0, m, l, MASKED)
        # (BLOCK_N, BLOCK_DV)
        vt = load_tile(v + first * v_l + v_offsets, here, dv_ok, MASKED and TAIL, DV != BLOCK_DV)
        # (BLOCK_M, BLOCK_DV)
        pv = dot8(rounded8(p * P_SCALE, tl.float8e4nv), vt)
        acc = acc * alpha[:, None] + pv * (dv / P_SCALE)
    return acc, m, l


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk", "right"])
def forward_kernel(
    q, q_b, q_h, q_l, q_d,
    k, k_b, k_h, k_l, k_d,
    v, v_b, v_h, v_l, v_d,
    o, o_b, o_h, o_l, o_d,
    qs, qs_b, qs_h, qs_n,
    ks, ks_b, ks_h, ks_n,
    vs, vs_b, vs_h, vs_n,
    lse, heads, group, Lq, Lk, right, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_BLOCK: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK_M query rows of one head. acc, m, l: float32.

    Strides are in elements; qs, ks, vs: descales, (B, H, blocks), any stride of which may be 0. o, lse (contiguous (B,
    Hq, Lq), natural logarithm) are written. right: None, or 0 for causal. TAIL: Lk is not a multiple of BLOCK_N. WIDE:
    offsets within a tile need 64 bits.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    block = tl.program_id(0) % blocks
    b = (tl.program_id(0) // blocks // heads).to(tl.int64)
    h = (tl.program_id(0) // blocks % heads).to(tl.int64)
    if right is not None:
        block = blocks - 1 - block  # the longest rows first: what is left for the end is short
    start = block * BLOCK_M

    lane_m = lanes(BLOCK_M, WIDE)[:, None]  # (BLOCK_M, 1)
    lane_n = lanes(BLOCK_N, WIDE)[:, None]  # (BLOCK_N, 1)
    lane_d = lanes(BLOCK_D, WIDE)[None, :]  # (1, BLOCK_D)
    lane_dv = lanes(BLOCK_DV, WIDE)[None, :]  # (1, BLOCK_DV)
    rows = start + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    ks += b * ks_b + (h // group) * ks_h
    vs += b * vs_b + (h // group) * vs_h
    unit = tl.load(qs + b * qs_b + h * qs_h + start // SCALE_BLOCK * qs_n) * (scale * LOG2E)

    # (BLOCK_M, BLOCK_D)
    q_tile = q + b * q_b + h * q_h + start.to(tl.int64) * q_l
    qt = load_tile(q_tile + lane_m * q_l + lane_d * q_d, rows < Lq, lane_d < D, True, D != BLOCK_D)

    # (BLOCK_M, BLOCK_DV), (BLOCK_M,), (BLOCK_M,)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    k_offsets = lane_n * k_l + lane_d * k_d  # (BLOCK_N, BLOCK_D)
    v_offsets = lane_n * v_l + lane_dv * v_d  # (BLOCK_N, BLOCK_DV)
    _, full_lo, full_hi, hi = bands(start, Lq, Lk, None, right, BLOCK_M, BLOCK_N)
    acc, m, l = attend(
        acc, m, l, qt, k, v, k_offsets, v_offsets, k_l, v_l, ks, ks_n, vs, vs_n, unit,
        full_lo, full_hi, rows, lane_d < D, lane_dv < DV, Lq, Lk, right,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SCALE_BLOCK, False, TAIL,
    )  # fmt: skip
    if TAIL or right is not None:
        acc, m, l = attend(
            acc, m, l, qt, k, v, k_offsets, v_offsets, k_l, v_l, ks, ks_n, vs, vs_n, unit,
            full_hi, hi, rows, lane_d < D, lane_dv < DV, Lq, Lk, right,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SCALE_BLOCK, True, TAIL,
        )  # fmt: skip

    # (BLOCK_M, BLOCK_DV); a row that saw nothing has acc = 0, l = 0, m = -inf: o = 0, lse = -inf
    l = tl.where(l == 0.0, 1.0, l)
    o_tile = o + b * o_b + h * o_h + start.to(tl.int64) * o_l
    tl.store(
        o_tile + lane_m * o_l + lane_dv * o_d,
        rounded(acc / l[:, None], o.dtype.element_ty),
        mask=(rows < Lq) & (lane_dv < DV),
    )
    row = start + tl.arange(0, BLOCK_M)
    tl.store(lse + (b * heads + h) * Lq + row, (m + tl.log2(l)) * LN2, mask=row < Lq)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_descale: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    scale: float,
    causal: bool,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """o (B, Hq, Lq, Dv) bfloat16 and lse (B, Hq, Lq) float32. The kernel layer: api.py checks arguments.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) float8, any strides; descales of shape (), (B, H) or (B, H,
    blocks), H that of their tensor. config: None takes the table's.
    """
    (batch, heads, lq, d), (lk, dv) = q.shape, v.shape[2:]
    _, right = sides(None, 0 if causal else None, lq, lk)
    o = torch.empty((batch, heads, lq, dv), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty((batch, heads, lq), dtype=torch.float32, device=q.device)
    config = config or config_for(q, max(d, dv))
    grid = batch * heads * triton.cdiv(lq, config.block_m)
    if grid == 0:
        return o, lse
    block_d, block_dv = head_dim_blocks(d, dv)
    widest = max(max(config.block_m, config.block_n) * x.stride(2) + 256 * x.stride(3) for x in (q, k, v, o))
    with torch.cuda.device_of(q):
        forward_kernel[as_grid(grid)](
            q, *q.stride(), k, *k.stride(), v, *v.stride(), o, *o.stride(),
            *by_block(q_descale, q), *by_block(k_descale, k), *by_block(v_descale, v),
            lse, heads, heads // k.shape[1], lq, lk, right, scale,
            D=d, DV=dv, BLOCK_D=max(32, block_d), BLOCK_DV=block_dv, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            SCALE_BLOCK=BLOCK, TAIL=lk % config.block_n != 0, WIDE=widest >= 2**31, **options(config),
        )  # fmt: skip
    return o, lse


def by_block(descale: Tensor, x: Tensor) -> tuple[Tensor, int, int, int]:
    """A descale of x (B, H, L, D) and its strides as one of shape (B, H, blocks)."""
    blocks = triton.cdiv(x.shape[2], BLOCK)
    whole = descale.reshape(*descale.shape, *(1,) * (3 - descale.dim())) if descale.dim() else descale
    b, h, n = whole.expand(x.shape[0], x.shape[1], max(1, blocks)).stride()
    return descale, b, h, n
