"""The backward of FlashAttention-2's Algorithm 2: one pass, five products, dQ added up in memory by atomics.

backward.py computes S and dP twice, once beside the keys for dK and dV and once beside the rows for dQ. Here a program
holds a block of keys, as in backward_kv.py, and with dX of a tile at hand it also forms that tile's share of dQ,

    dQ_i  +=  scale dX_ij K_j          of every block j of keys: different programs add to the same rows

so S and dP are computed once. The price: dQ is float32 in memory, zeroed before, and read and written for every tile by
`atomic_add`; and since float32 sums depend on the order of their terms, and programs come in any order, dq differs in
its last bits from call to call. dK and dV have one writer and repeat theirs.

Small on purpose: causal (bottom-right) or not, grouped heads, any lengths and strides, D = Dv up to 128. Accumulators:
dK, dV, dQ, S, dP and D float32; P and dX are rounded to the input dtype for their products; each gradient is rounded
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward import DELTA_ROWS, delta_kernel
from .cases import CompileCase, specialise
from .causal import bands
from .configs import Config
from .launch import as_grid, head_dim_blocks, options
from .scores import hide, row_shift
from .tiles import INTERPRETED, LOG2E, dot, load_tile, rounded

# D: BLOCK_M rows streamed past BLOCK_N keys, for sm_80 and sm_90. Of eight tiles, those that spill least; not timed.
TABLE = {64: Config(32, 128, 8, 2), 128: Config(32, 128, 8, 2)}
_INTERPRETER = Config(32, 64, 1, 1)


@triton.jit
def stream(
    dk, dv, kt, vt, q, do, dq, lse, delta, q_l, q_d, do_l, do_d, lo, hi, keys, dims, scale, Lq, Lk, right,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Stream the query rows lo … hi - 1 of one head past the resident keys. S, dP and dX are transposed: (keys, rows).

    dk, dv (BLOCK_N, BLOCK_D): float32, returned with the share of these rows, dk without the scale. dq: added to.
    """
    lane_m = tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    lanes = lane_m[:, None]  # (BLOCK_M, 1)
    q += tl.cast(lo, tl.int64) * q_l
    do += tl.cast(lo, tl.int64) * do_l
    dq += tl.cast(lo, tl.int64) * D
    # Few masked tiles: pipelining them costs registers, of which the accumulators leave none.
    for m in tl.range(lo, hi, BLOCK_M, num_stages=1 if MASKED else None):
        row = m + lane_m  # (BLOCK_M,)
        here = lanes < Lq - m  # (BLOCK_M, 1)
        # (BLOCK_M, BLOCK_D)
        qt = load_tile(q + lanes * q_l + dims * q_d, here, dims < D, MASKED and TAIL, D != BLOCK_D)
        dot_ = load_tile(do + lanes * do_l + dims * do_d, here, dims < D, MASKED and TAIL, D != BLOCK_D)
        shift = row_shift(lse, row, MASKED and TAIL, row < Lq)  # (BLOCK_M,)
        d = tl.load(delta + row, mask=row < Lq, other=0.0)  # (BLOCK_M,)
        # (BLOCK_N, BLOCK_M)
        s = dot(kt, tl.trans(qt), None, "ieee") * (scale * LOG2E)
        if MASKED:
            s = hide(s, row[None, :], keys, Lq, Lk, None, right, TAIL)
        p = tl.exp2(s - shift[None, :])
        dv = dot(rounded(p, do.dtype.element_ty), dot_, dv, "ieee")
        dp = dot(vt, tl.trans(dot_), None, "ieee")
        dx = rounded(p * (dp - d[None, :]), q.dtype.element_ty)
        dk = dot(dx, qt, dk, "ieee")
        # (BLOCK_M, BLOCK_D)
        share = dot(tl.trans(dx), kt, None, "ieee") * scale
        tl.atomic_add(dq + lanes * D + dims, share, mask=here & (dims < D), sem="relaxed")
        q += tl.full([], BLOCK_M, tl.int64) * q_l
        do += tl.full([], BLOCK_M, tl.int64) * do_l
        dq += BLOCK_M * D
    return dk, dv


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk", "right"])
def atomic_kernel(
    q, q_b, q_h, q_l, q_d,
    k, k_b, k_h, k_l, k_d,
    v, v_b, v_h, v_l, v_d,
    do, do_b, do_h, do_l, do_d,
    dk, dk_b, dk_h, dk_l, dk_d,
    dv, dv_b, dv_h, dv_l, dv_d,
    dq, lse, delta, scale, heads, group, Lq, Lk, right,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of BLOCK_N keys of one kv head, and its share of dQ.

    dq: contiguous (B, Hq, Lq, D), float32, zeroed. lse, delta: contiguous (B, Hq, Lq). right: 0 if causal, else None.
    TAIL: Lq is not a multiple of BLOCK_M, or Lk not of BLOCK_N.
    """
    blocks = tl.cdiv(Lk, BLOCK_N)
    kv_heads = heads // group
    start = (tl.program_id(0) % blocks) * BLOCK_N
    b = (tl.program_id(0) // blocks // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) // blocks % kv_heads).to(tl.int64)
    keys = start + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    at = keys.to(tl.int64)
    dims = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    inside = (keys < Lk) & (dims < D)
    # (BLOCK_N, BLOCK_D)
    kt = load_tile(k + b * k_b + kv_head * k_h + at * k_l + dims * k_d, keys < Lk, dims < D, True, D != BLOCK_D)
    vt = load_tile(v + b * v_b + kv_head * v_h + at * v_l + dims * v_d, keys < Lk, dims < D, True, D != BLOCK_D)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    lo, full_lo, full_hi, hi = bands(start, Lk, Lq, right, None, BLOCK_N, BLOCK_M)
    # A key that does not exist scores 0, which may be so far above a row's lse that its exponential is inf.
    full_hi = tl.where(start + BLOCK_N > Lk, full_lo, full_hi)
    for member in tl.range(0, group):
        h = kv_head * group + member
        line = (b * heads + h) * Lq
        q_head = q + b * q_b + h * q_h
        do_head = do + b * do_b + h * do_h
        if right is not None:
            dk_acc, dv_acc = stream(
                dk_acc, dv_acc, kt, vt, q_head, do_head, dq + line * D, lse + line, delta + line, q_l, q_d, do_l, do_d,
                lo, full_lo, keys, dims, scale, Lq, Lk, right, D, BLOCK_D, BLOCK_M, True, TAIL,
            )  # fmt: skip
        dk_acc, dv_acc = stream(
            dk_acc, dv_acc, kt, vt, q_head, do_head, dq + line * D, lse + line, delta + line, q_l, q_d, do_l, do_d,
            full_lo, full_hi, keys, dims, scale, Lq, Lk, right, D, BLOCK_D, BLOCK_M, False, TAIL,
        )  # fmt: skip
        if TAIL:
            dk_acc, dv_acc = stream(
                dk_acc, dv_acc, kt, vt, q_head, do_head, dq + line * D, lse + line, delta + line, q_l, q_d, do_l, do_d,
                full_hi, hi, keys, dims, scale, Lq, Lk, right, D, BLOCK_D, BLOCK_M, True, TAIL,
            )  # fmt: skip
    dk_tile = dk + b * dk_b + kv_head * dk_h + at * dk_l + dims * dk_d
    dv_tile = dv + b * dv_b + kv_head * dv_h + at * dv_l + dims * dv_d
    tl.store(dk_tile, rounded(dk_acc * scale, dk.dtype.element_ty), mask=inside)
    tl.store(dv_tile, rounded(dv_acc, dv.dtype.element_ty), mask=inside)


def backward_atomic(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of sum(o do), each in the shape and dtype of its input. o and lse: results of a forward.

    q, do (B, Hq, Lq, D), k and v (B, Hkv, Lk, D), D at most 128. scale: None takes D ** -0.5. config: None takes the
    table's. Raises NotImplementedError for other head dimensions.
    """
    (batch, heads, lq, d), (kv_heads, lk) = q.shape, k.shape[1:3]
    if d > max(TABLE) or v.shape[3] != d:
        raise NotImplementedError(f"D {d}, Dv {v.shape[3]}: backward_atomic takes D = Dv up to {max(TABLE)}")
    scale = d**-0.5 if scale is None else scale
    c = config or (_INTERPRETER if INTERPRETED.value else TABLE[min(row for row in TABLE if row >= d)])
    block_d = head_dim_blocks(d, d)[0]
    dq32 = torch.zeros((batch, heads, lq, d), dtype=torch.float32, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    if dq32.numel() and lk:
        delta = torch.empty((batch, heads, lq), dtype=torch.float32, device=q.device)
        delta_kernel[as_grid(batch * heads * triton.cdiv(lq, DELTA_ROWS))](
            o, *o.stride(), do, *do.stride(), None, 0, 0, 0, delta, heads, lq,
            DV=d, BLOCK_DV=block_d, BLOCK_M=DELTA_ROWS, **options(Config(DELTA_ROWS, 0, 4, 1)),
        )  # fmt: skip
        atomic_kernel[as_grid(batch * kv_heads * triton.cdiv(lk, c.block_n))](
            q, *q.stride(), k, *k.stride(), v, *v.stride(), do, *do.stride(), dk, *dk.stride(), dv, *dv.stride(),
            dq32, lse, delta, scale, heads, heads // kv_heads, lq, lk, 0 if causal and lq > 1 else None,
            D=d, BLOCK_D=block_d, BLOCK_M=c.block_m, BLOCK_N=c.block_n,
            TAIL=lq % c.block_m != 0 or lk % c.block_n != 0, **options(c),
        )  # fmt: skip
    return dq32.to(q.dtype), dk, dv


def compile_case(dtype: str, d: int, *, causal: bool) -> CompileCase:
    """The kernel for one dtype ("bf16") and head dimension of the table."""
    c = TABLE[d]
    pointers = dict.fromkeys(("q", "k", "v", "do", "dk", "dv"), dtype) | dict.fromkeys(("dq", "lse", "delta"), "fp32")
    constants: dict[str, object] = {
        "D": d, "BLOCK_D": d, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "TAIL": False
    }  # fmt: skip
    scalars = {"scale": "fp32"}
    if causal:
        scalars["right"] = "i32"
    else:
        constants["right"] = None
    return specialise(
        f"backward_atomic-{dtype}-d{d}{'-causal' if causal else ''}",
        atomic_kernel, pointers, constants, scalars, num_warps=c.num_warps, num_stages=c.num_stages,
    )  # fmt: skip


def compile_cases(capability: int) -> list[CompileCase]:
    """Both head dimensions, dense and causal, for the architectures of the table."""
    if capability not in (80, 90):
        return []
    return [compile_case("bf16", 64, causal=True), compile_case("fp16", 128, causal=False)]
