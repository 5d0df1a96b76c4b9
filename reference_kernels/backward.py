"""The backward pass by recomputation: P again from the scores and lse, never stored, and no atomics.

With D_i = sum_d O_id dO_id - dlse_i (dlse: the gradient that arrives through the returned lse; d lse / d s = P):

    P  = exp(S - lse)          dP = dO V^T          dS = P o (dP - D)          dX = dS o ds/dx (the softcap's)
    dV = P^T dO                dK = scale dX^T Q                               dQ = scale dX K
    dbias = dS (bias_gradient.py)                   dsink = - sum over batch and rows of exp(sink - lse) D

Three kernels. `delta_kernel`: D. `dkv_kernel` (backward_kv.py): a block of keys resident, the query rows of all heads
of its group streamed past, so that grouped heads are summed in the accumulator. `dq_kernel` (backward_q.py): a block of
rows resident, keys streamed. Each gradient has one writer: the same call gives the same bits. The price is that S and
dP are computed twice, seven products for the five of a single pass that adds to dQ atomically.

Hidden tiles are skipped and full ones need no mask (causal.bands). Where a key is hidden S is -inf; from a
row without keys, whose lse is -inf, 0 is subtracted instead.

Accumulators: dK, dV, dQ, S, dP and D float32; P and dX are rounded to the input dtype for their products; the scale is
applied to the sums in float32; each gradient is rounded once.

    python -m reference_kernels.backward        error against the float64 oracle; on a GPU, TFLOP/s beside PyTorch's
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward_kv import dkv_kernel
from .backward_q import dq_kernel
from .bias_gradient import bias_gradient
from .cases import CompileCase, specialise
from .configs import Config, config_for, lookup
from .launch import as_grid, feature_arguments, head_dim_blocks, options, sides, spans_32_bits
from .tiles import widened

DELTA_ROWS = 32


@triton.jit(do_not_specialize=["heads", "Lq"])
def delta_kernel(
    o, o_b, o_h, o_l, o_d, do, do_b, do_h, do_l, do_d, dlse, dlse_b, dlse_h, dlse_l, delta, heads, Lq,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta (contiguous (B, Hq, Lq)) = rowsum(O o dO) - dlse, in float32. dlse: None is zero."""
    blocks = tl.cdiv(Lq, BLOCK_M)
    b = (tl.program_id(0) // blocks // heads).to(tl.int64)
    h = (tl.program_id(0) // blocks % heads).to(tl.int64)
    rows = ((tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    # (BLOCK_M, BLOCK_DV)
    dims = tl.arange(0, BLOCK_DV)[None, :]
    inside = (rows[:, None] < Lq) & (dims < DV)
    ot = tl.load(o + b * o_b + h * o_h + rows[:, None] * o_l + dims * o_d, mask=inside, other=0.0)
    dot_ = tl.load(do + b * do_b + h * do_h + rows[:, None] * do_l + dims * do_d, mask=inside, other=0.0)
    d = tl.sum(widened(ot) * widened(dot_), 1)  # (BLOCK_M,)
    if dlse is not None:
        d -= tl.load(dlse + b * dlse_b + h * dlse_h + rows * dlse_l, mask=rows < Lq, other=0.0)
    tl.store(delta + (b * heads + h) * Lq + rows, d, mask=rows < Lq)


class Grads(NamedTuple):
    """Each in the shape and dtype of its input; None where it was not wanted."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsinks: Tensor | None


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    want_q: bool = True,
    want_kv: bool = True,
    want_bias: bool = False,
    want_sinks: bool = False,
    kv_config: Config | None = None,
    q_config: Config | None = None,
    input_precision: str = "ieee",
) -> Grads:
    """Gradients of sum(o do) + sum(lse dlse). The kernel layer: arguments as of forward.forward, o and lse its results.

    do (B, Hq, Lq, Dv) and dlse (B, Hq, Lq), any strides. The gradient of sinks is a sum over (B, Hq, Lq) in PyTorch.
    """
    (batch, heads, lq, d), (lk, dv_dim) = q.shape, v.shape[2:]
    left, right = sides(left, right, lq, lk)
    kv_heads = k.shape[1]
    block_d, block_dv = head_dim_blocks(d, dv_dim)
    delta = torch.empty((batch, heads, lq), dtype=torch.float32, device=q.device)
    dims = {"D": d, "DV": dv_dim, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "PRECISION": input_precision}
    terms = feature_arguments(q, k, slopes, bias, mask)
    inputs = (q, *q.stride(), k, *k.stride(), v, *v.stride(), do, *do.stride())
    has_terms = any(x is not None for x in (softcap, slopes, bias, mask))
    numbers = (heads, heads // kv_heads, lq, lk, left, right, scale, softcap)
    if delta.numel():
        delta_kernel[as_grid(batch * heads * triton.cdiv(lq, DELTA_ROWS))](
            o, *o.stride(), do, *do.stride(), dlse, *((0, 0, 0) if dlse is None else dlse.stride()), delta, heads, lq,
            DV=dv_dim, BLOCK_DV=block_dv, BLOCK_M=DELTA_ROWS,
            **options(Config(DELTA_ROWS, 0, 4, 1)),
        )  # fmt: skip

    dq = dk = dv = dbias = dsinks = None
    if want_kv:
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        c = kv_config or config_for("backward_kv", q, max(d, dv_dim), terms=has_terms)
        if grid := batch * kv_heads * triton.cdiv(lk, c.block_n):
            dkv_kernel[as_grid(grid)](
                *inputs, dk, *dk.stride(), dv, *dv.stride(), lse, delta, *terms, *numbers,
                **dims, BLOCK_M=c.block_m, BLOCK_N=c.block_n, TAIL=lq % c.block_m != 0 or lk % c.block_n != 0,
                WIDE=spans_32_bits(max(c.block_m, c.block_n), (q, k, v, do), terms, lq, lk),
                **options(c),
            )  # fmt: skip
    if want_q:
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        c = q_config or config_for("backward_q", q, max(d, dv_dim), terms=has_terms)
        if grid := batch * heads * triton.cdiv(lq, c.block_m):
            dq_kernel[as_grid(grid)](
                *inputs, dq, *dq.stride(), lse, delta, *terms, *numbers,
                **dims, BLOCK_M=c.block_m, BLOCK_N=c.block_n, TAIL=lk % c.block_n != 0,
                WIDE=spans_32_bits(max(c.block_m, c.block_n), (q, k, v, do), terms, lq, lk),
                **options(c),
            )  # fmt: skip
    if want_bias and bias is not None:
        c = q_config or config_for("backward_q", q, max(d, dv_dim), terms=has_terms)
        dbias = bias_gradient(bias, inputs, (lse, delta, *terms, *numbers), dims, c)
    if want_sinks and sinks is not None:
        # exp(sink - lse) is the sink's share of its row; 0 of a row in which even the sink is -inf.
        share = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks.float()[None, :, None] - lse))
        dsinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    return Grads(dq, dk, dv, dbias, dsinks)


def compile_case(
    which: str, dtype: str, d: int, *, causal: bool = False, features: bool = False, capability: int = 90
) -> CompileCase:
    """dkv_kernel or dq_kernel ("kv", "q") for one dtype and head dimension, in the tiles of the table."""
    config = lookup(
        f"backward_{which}", capability, {"fp32": torch.float32}.get(dtype, torch.float16), d, terms=features
    )
    pointers = dict.fromkeys(("q", "k", "v", "do", "dq", "dk", "dv"), dtype) | {"lse": "fp32", "delta": "fp32"}
    absent: dict[str, object] = dict.fromkeys(("left", "right", "softcap", "slopes", "bias", "mask"))
    scalars = {"scale": "fp32"}
    if causal or features:
        scalars["right"] = "i32"
    if features:
        scalars |= {"left": "i32", "softcap": "fp32"}
        pointers |= {"slopes": "fp32", "bias": dtype, "mask": "u8"}
    said = [word for word, on in (("causal", causal), ("features", features)) if on]
    return specialise(
        "-".join([f"backward_{which}", dtype, f"d{d}", *said]),
        dkv_kernel if which == "kv" else dq_kernel,
        pointers,
        {name: value for name, value in absent.items() if name not in pointers and name not in scalars}
        | {
            "D": d, "DV": d, "BLOCK_D": triton.next_power_of_2(d), "BLOCK_DV": triton.next_power_of_2(d),
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "TAIL": features, "PRECISION": "ieee",
            "WIDE": False,
        },
        scalars,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def compile_cases(capability: int) -> list[CompileCase]:
    """A representative set in the tiles of `capability`, a few seconds each."""
    return [
        compile_case(which, dtype, d, causal=causal, features=features, capability=capability)
        for which in ("kv", "q")
        for dtype, d, causal, features in (
            ("bf16", 64, False, False),
            ("fp16", 128, True, False),
            ("bf16", 256, False, False),
            ("bf16", 64, False, True),
            ("fp32", 64, False, False),
        )
    ]


if __name__ == "__main__":
    from .demo import main

    main("backward")
