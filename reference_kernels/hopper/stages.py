"""What the three stages share on the host: what they serve, their launch, and what `python -m` prints of each."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..demo import LAMBDA, median_seconds
from .launch import LOG2E, descriptor, supports

HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Stage:
    """A kernel, launched with num_warps, and its tile: block_m query rows (q_rows to a TMA block) by block_n keys."""

    name: str
    kernel: Any
    block_m: int
    q_rows: int
    block_n: int
    num_warps: int


def refusal(
    stage: Stage, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> str | None:
    """Why a stage cannot run on q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D); None if it can.

    Stages have no code for tails: Lq must be a multiple of block_m and Lk of block_n, and positive. Nor have they code
    for D 256 and, causal, for rows that see no key. The rest is as for the full kernel (launch.supports).
    """
    lq, lk = q.shape[2], k.shape[2]
    if q.shape[3] not in HEAD_DIMS:
        return f"D {q.shape[3]}: {stage.name} is written for {' and '.join(map(str, HEAD_DIMS))}"
    if lq % stage.block_m or lk % stage.block_n:
        return (
            f"Lq {lq}, Lk {lk}: {stage.name} takes multiples of its tile, {stage.block_m} queries by {stage.block_n} "
            "keys; reference_kernels.hopper.forward takes any lengths"
        )
    if causal and lq > lk:
        return f"causal with Lq {lq} and Lk {lk}: {stage.name} has no code for rows that see no key"
    return supports(q, k, v, scale=scale)


def attention(
    stage: Stage, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """o (B, Hq, Lq, D) in q's dtype and lse (B, Hq, Lq) float32, natural log, by one stage's kernel.

    Query head h reads kv head h // (Hq // Hkv); causal is bottom-right; scale: None takes D ** -0.5.
    Raises NotImplementedError with the reason of `refusal`.
    """
    reason = refusal(stage, q, k, v, causal=causal, scale=scale)
    if reason:
        raise NotImplementedError(reason)
    (batch, heads, lq, d), (kv_heads, lk) = q.shape, k.shape[1:3]
    o = torch.empty((batch, heads, lq, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, lq), dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device):
        stage.kernel[(lq // stage.block_m * heads * batch,)](
            descriptor(q, stage.q_rows), descriptor(k, stage.block_n), descriptor(v, stage.block_n),
            descriptor(o, stage.q_rows), lse, (d**-0.5 if scale is None else scale) * LOG2E,
            heads, heads // kv_heads, lq, lk,
            D=d, CAUSAL=causal, num_warps=stage.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return o, lse


def demonstrate(stage: Stage) -> None:
    """Print the error against the float64 oracle, and TFLOP/s beside PyTorch's SDPA. A quick look, no measurement.

    Exits with 1 where there is no Hopper GPU, or an error is beyond its bound.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit(
            f"{stage.name} needs a GPU of compute capability 9.0 (H100, H200); without one it can be compiled: "
            f"python -m reference_kernels.compiling --capability 90 --kernel hopper-{stage.name}"
        )
    worst = max(
        accuracy(stage, dtype, d, causal=causal)
        for dtype in (torch.bfloat16, torch.float16)
        for d in HEAD_DIMS
        for causal in (False, True)
    )
    for length in (2048, 8192):
        for causal in (False, True):
            speed(stage, length, causal=causal)
    raise SystemExit(0 if worst <= 1 else 1)


def accuracy(stage: Stage, dtype: torch.dtype, d: int, *, causal: bool) -> float:
    """Print the worst error of o and lse as a share of its limit, for 4 heads on 2 kv heads; return the worse one."""
    # By name: the package imports torch and triton only, and works where the oracles are not installed.
    oracles = importlib.import_module("oracles")

    torch.manual_seed(0)
    q = torch.randn(2, 4, 512, d, device="cuda").to(dtype)
    k, v = (torch.randn(2, 2, 640, d, device="cuda").to(dtype) for _ in "kv")
    o, lse = attention(stage, q, k, v, causal=causal)
    truth = oracles.evaluate(q, k, v, oracles.AttentionSpec(causal=causal), arithmetic=oracles.Arithmetic.of(dtype))
    shares = {
        name: float(((value - truth[name].value).abs() / truth[name].limit(LAMBDA)).max())
        for name, value in (("o", o), ("lse", lse))
    }
    sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}{', causal' if causal else ''}"
    print(f"{stage.name} {str(dtype).removeprefix('torch.'):8} {sizes:48} error/limit", end=" ")
    print("  ".join(f"{name} {share:.2f}" for name, share in shares.items()), flush=True)
    # A NaN must not pass: it is no larger than anything.
    return max(share if share >= 0 else torch.inf for share in shares.values())


def speed(stage: Stage, length: int, *, causal: bool) -> None:
    """Print TFLOP/s of a stage and of PyTorch's SDPA on 16384 tokens of bf16, hidden 2048, D 128; causal is half."""
    q, k, v = (torch.randn(16384 // length, 16, length, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    flops = 4.0 * q.numel() * length * (0.5 if causal else 1.0)
    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=causal)
    ours = functools.partial(attention, stage, q, k, v, causal=causal)
    rates = [flops / median_seconds(call) / 1e12 for call in (ours, sdpa)]
    print(f"bf16 D 128 N {length}{' causal' if causal else ''}: {rates[0]:.0f} TFLOP/s, SDPA {rates[1]:.0f}")
