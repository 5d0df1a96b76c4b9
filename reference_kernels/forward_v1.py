# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""The loop order of FlashAttention-1: keys outside, queries inside, the output taken up again for each block of keys.

    for each block K_j, V_j of a head:                        forward.py, the order of FlashAttention-2, has
        for each block Q_i, with O_i, m_i, l_i from memory:       for each block Q_i:  (a program each)
            P = exp(S_ij - m')                                        for each block K_j, V_j:
            O_i = (alpha l_i O_i + P V_j) / l'                            the same in registers
            O_i, m_i, l_i to memory                                   O_i to memory, once

(Algorithm 1 of Dao et al. 2022; m', l' and alpha as in online.py, O_i always normalised.) What a head moves between
memory and the SM, in tiles, with n blocks of queries and k of keys:

    keys outside       K, V read once: 2 k        Q, O read and O written for every block of keys: 3 n k
    queries outside    Q read, O written: 2 n     K, V read for every block of queries: 2 n k

and O here is float32, twice the size. Nor can the blocks of queries of a head be given to different programs, since
each block of keys changes all of them: a program has a whole head, and a GPU with more SMs than heads has idle ones.

Small on purpose: causal (bottom-right) or not, grouped heads, any lengths and strides, D = Dv up to 128, scale > 0.
Accumulators: O, m, l and S float32; P is rounded to the dtype of V for its product; O is rounded once, when the last
block of keys that its rows see has come.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cases import CompileCase, specialise
from .configs import Config
from .launch import as_grid, head_dim_blocks, options
from .online import online_step
from .tiles import INTERPRETED, LN2, LOG2E, NEG_INF, dot, load_tile, rounded

# D: BLOCK_M query rows by BLOCK_N keys, for sm_80 and sm_90. What spills little; not timed.
TABLE = {64: Config(64, 64, 8, 2), 128: Config(64, 32, 8, 2)}
_INTERPRETER = Config(64, 32, 1, 1)


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def forward_v1_kernel(
    q, q_b, q_h, q_l, q_d,
    k, k_b, k_h, k_l, k_d,
    v, v_b, v_h, v_l, v_d,
    o, o_b, o_h, o_l, o_d,
    partial, maxima, sums, lse, unit, heads, group, Lq, Lk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """All of one head. partial (contiguous (B, Hq, Lq, D)), maxima, sums and lse ((B, Hq, Lq)): float32, written.

    Strides are in elements. unit: scale times log2(e), positive.
    """
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    lane_m = tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    lane_n = tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    dims = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    q += b * q_b + h * q_h
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    o += b * o_b + h * o_h
    line = (b * heads + h) * Lq
    partial += line * D
    for n in tl.range(0, Lk, BLOCK_N):
        here = lane_n < Lk - n  # (BLOCK_N, 1)
        # (BLOCK_N, BLOCK_D)
        k_tile = k + tl.cast(n, tl.int64) * k_l + lane_n * k_l
        v_tile = v + tl.cast(n, tl.int64) * v_l + lane_n * v_l
        kt = load_tile(k_tile + dims * k_d, here, dims < D, True, D != BLOCK_D)
        vt = load_tile(v_tile + dims * v_d, here, dims < D, True, D != BLOCK_D)
        first = 0
        if CAUSAL:
            # The first block of keys visits all rows, so that those which see no key are written too.
            first = tl.where(n == 0, 0, tl.maximum(n + Lq - Lk, 0) // BLOCK_M * BLOCK_M)
        for start in tl.range(first, Lq, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
            at = tl.cast(start, tl.int64)
            end = Lk
            if CAUSAL:
                end = tl.minimum(tl.maximum(start + BLOCK_M + Lk - Lq, 0), Lk)
            begun = n > 0
            inside = (lane_m < Lq - start) & (dims < D)  # (BLOCK_M, BLOCK_D)
            # (BLOCK_M, BLOCK_D)
            qt = load_tile(q + at * q_l + lane_m * q_l + dims * q_d, lane_m < Lq - start, dims < D, True, D != BLOCK_D)
            # (BLOCK_M, BLOCK_N)
            s = dot(qt, tl.trans(kt), None, "ieee")
            key = n + tl.arange(0, BLOCK_N)[None, :]
            s = tl.where(key < Lk, s, NEG_INF)
            if CAUSAL:
                s = tl.where(key <= row[:, None] + (Lk - Lq), s, NEG_INF)
            # (BLOCK_M,), (BLOCK_M,), (BLOCK_M, BLOCK_D)
            m = tl.load(maxima + line + row, mask=begun & (row < Lq), other=NEG_INF)
            l = tl.load(sums + line + row, mask=begun & (row < Lq), other=0.0)
            held = partial + at * D + lane_m * D + dims
            ot = tl.load(held, mask=begun & inside, other=0.0)
            p, alpha, m, l_new = online_step(s, unit, m, l, True)
            total = tl.where(l_new == 0.0, 1.0, l_new)
            ot = dot(rounded(p, v.dtype.element_ty), vt, ot * (alpha * l)[:, None], "ieee") / total[:, None]
            if n + BLOCK_N < end:
                tl.store(maxima + line + row, m, mask=row < Lq)
                tl.store(sums + line + row, l_new, mask=row < Lq)
                tl.store(held, ot, mask=inside)
            else:
                o_tile = o + at * o_l + lane_m * o_l + dims * o_d
                tl.store(o_tile, rounded(ot, o.dtype.element_ty), mask=inside)
                tl.store(lse + line + row, (m * unit + tl.log2(total)) * LN2, mask=row < Lq)
        # What one thread wrote another may read for the next block of keys.
        tl.debug_barrier()


def forward_v1(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """o (B, Hq, Lq, D) in q's dtype and lse (B, Hq, Lq) float32, natural log; rows without keys: 0 and -inf.

    q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D), D at most 128. scale: None takes D ** -0.5. config: None takes the
    table's. Raises NotImplementedError for other head dimensions and a scale that is not positive.
    """
    (batch, heads, lq, d), lk = q.shape, k.shape[2]
    scale = d**-0.5 if scale is None else scale
    if not (scale > 0 and math.isfinite(scale)) or d > max(TABLE) or v.shape[3] != d:
        takes = f"a positive scale and D = Dv up to {max(TABLE)}"
        raise NotImplementedError(f"scale {scale}, D {d}, Dv {v.shape[3]}: forward_v1 takes {takes}")
    o = torch.empty((batch, heads, lq, d), dtype=q.dtype, device=q.device)
    partial = torch.empty((batch, heads, lq, d), dtype=torch.float32, device=q.device)
    maxima, sums, lse = (torch.empty((batch, heads, lq), dtype=torch.float32, device=q.device) for _ in range(3))
    if not o.numel() or not lk:
        return o.zero_(), lse.fill_(-math.inf)
    c = config or (_INTERPRETER if INTERPRETED.value else TABLE[min(row for row in TABLE if row >= d)])
    forward_v1_kernel[as_grid(batch * heads)](
        q, *q.stride(), k, *k.stride(), v, *v.stride(), o, *o.stride(), partial, maxima, sums, lse,
        scale * LOG2E.value, heads, heads // k.shape[1], lq, lk,
        D=d, BLOCK_D=head_dim_blocks(d, d)[0], BLOCK_M=c.block_m, BLOCK_N=c.block_n, CAUSAL=causal, **options(c),
    )  # fmt: skip
    return o, lse


def compile_case(dtype: str, d: int, *, causal: bool) -> CompileCase:
    """The kernel for one dtype ("bf16") and head dimension of the table."""
    c = TABLE[d]
    constants: dict[str, Any] = {"D": d, "BLOCK_D": d, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "CAUSAL": causal}
    return specialise(
        f"forward_v1-{dtype}-d{d}{'-causal' if causal else ''}",
        forward_v1_kernel,
        dict.fromkeys(("q", "k", "v", "o"), dtype) | dict.fromkeys(("partial", "maxima", "sums", "lse"), "fp32"),
        constants,
        {"unit": "fp32"},
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """Both head dimensions, dense and causal, for the architectures of the table."""
    if capability not in (80, 90):
        return []
    return [compile_case("bf16", 64, causal=True), compile_case("fp16", 128, causal=False)]
