# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""The forward pass of FlashAttention-2: attention in O(L) memory, one program for each block of query rows.

    S = scale Q K^T (+ the terms of scores.py)      P = softmax(S)      O = P V      lse = log sum exp(S)

A program holds BLOCK_M rows of Q and streams the keys and values of its head past them, BLOCK_N at a time, in the order
of causal.bands: masked tiles, full tiles, masked tiles. S and P exist for one tile at a time, in registers. Per tile:

    S = Q K^T;  m' = max(m, rowmax S);  P = exp(S - m');  alpha = exp(m - m')
    l = alpha l + rowsum P;  acc = alpha acc + P V;  m = m'

and at the end O = acc / l, lse = m + log l (online.py says why that is the softmax). A sink is merged last.

Accumulators: acc, m, l and S float32; P is rounded to the dtype of V for its product, and summed before that; O is
rounded once. float32 inputs are multiplied in full precision, or as TF32 on request (input_precision).

    python -m reference_kernels.forward         error against the float64 oracle; on a GPU, TFLOP/s beside PyTorch's
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cases import CompileCase, specialise
from .causal import bands
from .configs import Config, config_for, lookup
from .launch import as_grid, feature_arguments, head_dim_blocks, options, sides, spans_32_bits
from .online import merge, online_step
from .scores import hide, logits
from .tiles import LN2, LOG2E, NEG_INF, dot, lanes, load_tile, rounded, widened


@triton.jit
def attend(
    acc, m, l, q, k, v, k_offsets, v_offsets, k_l, v_l, lo, hi, rows, d_ok, dv_ok,
    bias, bias_l, bias_k, mask, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap, unit,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, TAIL: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stream the tiles of keys lo … hi - 1 past the resident rows; the inner loop, in its masked and unmasked form.

    acc (BLOCK_M, BLOCK_DV), m, l (BLOCK_M,): float32, as before these keys; returned as after them.
    """
    keys = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    lane_n = lanes(BLOCK_N, WIDE)[:, None]  # (BLOCK_N, 1)
    k_tile = k + tl.cast(lo, tl.int64) * k_l
    v_tile = v + tl.cast(lo, tl.int64) * v_l
    k_step = tl.full([], BLOCK_N, tl.int64) * k_l
    v_step = tl.full([], BLOCK_N, tl.int64) * v_l
    for n in tl.range(lo, hi, BLOCK_N):
        here = lane_n < Lk - n  # (BLOCK_N, 1)
        # (BLOCK_N, BLOCK_D)
        kt = load_tile(k_tile + k_offsets, here, d_ok, MASKED and TAIL, D != BLOCK_D)
        # (BLOCK_M, BLOCK_N)
        s = dot(q, tl.trans(kt), None, PRECISION)
        s, _ = logits(
            s, scale, softcap, slope, bias, bias_l, bias_k, mask, mask_l, mask_k, rows, n + keys, Lq, Lk, FOLD, WIDE,
        )  # fmt: skip
        if MASKED:
            s = hide(s, rows, n + keys, Lq, Lk, left, right, TAIL)
        CAN_HIDE: tl.constexpr = MASKED or bias is not None or mask is not None
        p, alpha, m, l = online_step(s, unit, m, l, CAN_HIDE)
        # (BLOCK_N, BLOCK_DV)
        vt = load_tile(v_tile + v_offsets, here, dv_ok, MASKED and TAIL, DV != BLOCK_DV)
        # (BLOCK_M, BLOCK_DV)
        acc = dot(rounded(p, v.dtype.element_ty), vt, acc * alpha[:, None], PRECISION)
        k_tile += k_step
        v_tile += v_step
    return acc, m, l


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk", "left", "right"])
def forward_kernel(
    q, q_b, q_h, q_l, q_d,
    k, k_b, k_h, k_l, k_d,
    v, v_b, v_h, v_l, v_d,
    o, o_b, o_h, o_l, o_d,
    lse, slopes, slopes_b, slopes_h,
    bias, bias_b, bias_h, bias_l, bias_k,
    mask, mask_b, mask_h, mask_l, mask_k,
    sinks, heads, group, Lq, Lk, left, right, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NEGATE: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK_M query rows of one head. acc, m, l: float32.

    Strides are in elements. o and lse (contiguous (B, Hq, Lq)) are written; lse in natural logarithm. slopes, bias,
    mask, sinks, left, right, softcap: None where absent. scale: not negative; NEGATE: it was. TAIL: Lk is not a
    multiple of BLOCK_N.
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
    slope = None
    if slopes is not None:
        slope = widened(tl.load(slopes + b * slopes_b + h * slopes_h))
    if bias is not None:
        bias += b * bias_b + h * bias_h
    if mask is not None:
        mask += b * mask_b + h * mask_h

    # (BLOCK_M, BLOCK_D)
    q_tile = q + b * q_b + h * q_h + start.to(tl.int64) * q_l
    qt = load_tile(q_tile + lane_m * q_l + lane_d * q_d, rows < Lq, lane_d < D, True, D != BLOCK_D)
    if NEGATE:
        # Exact; the row maximum of s is again that of s * unit. (The interpreter cannot negate a bfloat16.)
        qt = rounded(-widened(qt), q.dtype.element_ty)
    unit = 1.0
    if FOLD:
        unit = scale * LOG2E

    # (BLOCK_M, BLOCK_DV), (BLOCK_M,), (BLOCK_M,)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    k_offsets = lane_n * k_l + lane_d * k_d  # (BLOCK_N, BLOCK_D)
    v_offsets = lane_n * v_l + lane_dv * v_d  # (BLOCK_N, BLOCK_DV)
    lo, full_lo, full_hi, hi = bands(start, Lq, Lk, left, right, BLOCK_M, BLOCK_N)
    if left is not None:
        acc, m, l = attend(
            acc, m, l, qt, k, v, k_offsets, v_offsets, k_l, v_l, lo, full_lo, rows, lane_d < D, lane_dv < DV,
            bias, bias_l, bias_k, mask, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap, unit,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, TAIL, FOLD, PRECISION, WIDE,
        )  # fmt: skip
    acc, m, l = attend(
        acc, m, l, qt, k, v, k_offsets, v_offsets, k_l, v_l, full_lo, full_hi, rows, lane_d < D, lane_dv < DV,
        bias, bias_l, bias_k, mask, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap, unit,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, TAIL, FOLD, PRECISION, WIDE,
    )  # fmt: skip
    if TAIL or right is not None:
        acc, m, l = attend(
            acc, m, l, qt, k, v, k_offsets, v_offsets, k_l, v_l, full_hi, hi, rows, lane_d < D, lane_dv < DV,
            bias, bias_l, bias_k, mask, mask_l, mask_k, slope, Lq, Lk, left, right, scale, softcap, unit,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, TAIL, FOLD, PRECISION, WIDE,
        )  # fmt: skip

    m *= unit
    if sinks is not None:
        sink = tl.zeros([BLOCK_M], tl.float32) + widened(tl.load(sinks + h)) * LOG2E
        alpha, _, m, l = merge(m, l, sink, tl.full([BLOCK_M], 1.0, tl.float32))
        acc *= alpha[:, None]
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
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    config: Config | None = None,
    input_precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """o (B, Hq, Lq, Dv) in q's dtype and lse (B, Hq, Lq) float32. The kernel layer: api.py checks arguments.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv); causal is right = 0. slopes (Hq,) or (B, Hq), bias floating
    and mask bool, broadcastable to (B, Hq, Lq, Lk), sinks (Hq,).
    config: None takes the table's. input_precision: how float32 is multiplied, "ieee" or "tf32".
    """
    (batch, heads, lq, d), (lk, dv) = q.shape, v.shape[2:]
    left, right = sides(left, right, lq, lk)
    o = torch.empty((batch, heads, lq, dv), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, lq), dtype=torch.float32, device=q.device)
    plain = softcap is None and slopes is None and bias is None and mask is None
    config = config or config_for("forward", q, max(d, dv), terms=not plain)
    grid = batch * heads * triton.cdiv(lq, config.block_m)
    if grid == 0:
        return o, lse
    terms = feature_arguments(q, k, slopes, bias, mask)
    block_d, block_dv = head_dim_blocks(d, dv)
    forward_kernel[as_grid(grid)](
        q, *q.stride(), k, *k.stride(), v, *v.stride(), o, *o.stride(), lse,
        *terms, sinks, heads, heads // k.shape[1], lq, lk, left, right, abs(scale), softcap,
        D=d, DV=dv, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        NEGATE=scale < 0,
        FOLD=scale != 0 and softcap is None and slopes is None and bias is None,
        TAIL=lk % config.block_n != 0,
        PRECISION=input_precision,
        WIDE=spans_32_bits(max(config.block_m, config.block_n), (q, k, v, o), terms, lq, lk),
        **options(config),
    )  # fmt: skip
    return o, lse


def compile_case(
    dtype: str, d: int, *, causal: bool = False, window: bool = False, features: bool = False, capability: int = 90
) -> CompileCase:
    """The forward kernel for one dtype ("bf16") and head dimension, plain or with options, in the table's tiles."""
    width = torch.float32 if dtype == "fp32" else torch.float16
    config = lookup("forward", capability, width, d, terms=features)
    said = [word for word, on in (("causal", causal), ("window", window), ("features", features)) if on]
    pointers = dict.fromkeys(("q", "k", "v", "o"), dtype) | {"lse": "fp32"}
    absent: dict[str, object] = {"right": None, "left": None, "softcap": None}
    absent |= dict.fromkeys(("slopes", "bias", "mask", "sinks"))
    scalars = {"scale": "fp32"}
    if causal or window or features:
        scalars["right"] = "i32"
    if window or features:
        scalars["left"] = "i32"
    if features:
        scalars["softcap"] = "fp32"
        pointers |= {"slopes": "fp32", "bias": dtype, "mask": "u8", "sinks": "fp32"}
    return specialise(
        "-".join(["forward", dtype, f"d{d}", *said]),
        forward_kernel,
        pointers,
        {name: value for name, value in absent.items() if name not in pointers and name not in scalars}
        | {
            "D": d, "DV": d, "BLOCK_D": triton.next_power_of_2(d), "BLOCK_DV": triton.next_power_of_2(d),
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "NEGATE": False, "FOLD": not features,
            "TAIL": features, "PRECISION": "ieee", "WIDE": False,
        },
        scalars,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def compile_cases(capability: int) -> list[CompileCase]:
    """A representative set in the tiles of `capability`, a second or two each."""
    return [
        compile_case("bf16", 64, capability=capability),
        compile_case("fp16", 128, capability=capability),
        compile_case("bf16", 256, capability=capability),
        compile_case("fp16", 128, features=True, capability=capability),
        compile_case("fp32", 64, capability=capability),
    ]


if __name__ == "__main__":
    from .demo import main

    main("forward")
