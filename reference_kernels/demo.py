"""What `python -m reference_kernels.<kernel>` prints: the error against the float64 oracle and, on a GPU, the speed.

Without a GPU the process starts itself again in Triton's interpreter, on a small problem, and says so. A quick look,
not a measurement: the suite and its performance lane are that.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LAMBDA = 3.0
"""The share of the oracle's random error that is accepted, as in the suite's tolerances."""


def main(kernel: str, note: Callable[[], object] | None = None) -> None:
    """kernel: "naive", "forward", "causal" or "backward". note: prints what there is to say before.

    Exits with 1 when an error is beyond its bound.
    """
    gpu = torch.cuda.is_available()
    if not gpu and kernel != "naive" and os.environ.get("TRITON_INTERPRET") != "1":
        print("no GPU: running in Triton's interpreter, a small problem, for correctness only", flush=True)
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", f"reference_kernels.{kernel}"]
        raise SystemExit(subprocess.run(command, env=environment).returncode)
    if note is not None:
        note()
    causal, gradients = kernel == "causal", kernel == "backward"
    device = "cuda" if gpu else "cpu"
    worst = max(
        accuracy(kernel, dtype, shape, causal=causal, gradients=gradients, device=device)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for shape in ((1, 2, 2, 128, 128, 64), (2, 4, 2, 100, 170, 80))
    )
    if gpu and kernel != "naive":
        for d, length in ((64, 4096), (128, 4096), (128, 16384)):
            speed(d, length, causal=causal, gradients=gradients)
    raise SystemExit(0 if worst <= 1 else 1)


def accuracy(
    kernel: str, dtype: torch.dtype, shape: tuple[int, ...], *, causal: bool, gradients: bool, device: str
) -> float:
    """Print the worst error of each output as a share of its limit; return the worst. shape: B, Hq, Hkv, Lq, Lk, D."""
    # By name: the package imports torch and triton only, and works where the oracles are not installed.
    oracles = importlib.import_module("oracles")

    batch, heads, kv_heads, lq, lk, d = shape
    torch.manual_seed(0)
    q = torch.randn(batch, heads, lq, d, device=device).to(dtype).requires_grad_(gradients)
    k, v = (torch.randn(batch, kv_heads, lk, d, device=device).to(dtype).requires_grad_(gradients) for _ in "kv")
    do = torch.randn(batch, heads, lq, d, device=device).to(dtype)
    o, lse = _function(kernel)(q, k, v, causal=causal, return_lse=True)
    got = {"o": o, "lse": lse}
    if gradients:
        got |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do), strict=True))
    spec = oracles.AttentionSpec(causal=causal)
    truth = oracles.evaluate(q, k, v, spec, do=do if gradients else None, arithmetic=oracles.Arithmetic.of(dtype))
    shares = {}
    for name, value in got.items():
        error = (value.detach() - truth[name].value).abs() / truth[name].limit(LAMBDA)
        shares[name] = float(error.nan_to_num(posinf=0.0).max())  # lse of a row without keys: -inf on both sides
    sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    print(f"{kernel:9} {str(dtype).removeprefix('torch.'):9} {sizes:40} error/limit", end=" ")
    print("  ".join(f"{name} {share:.2f}" for name, share in shares.items()), flush=True)
    return max(shares.values())


def speed(d: int, length: int, *, causal: bool, gradients: bool) -> None:
    """Print TFLOP/s of this kernel and of PyTorch's on 16384 tokens of bf16, hidden 2048; causal counted as half."""
    shape = (16384 // length, 2048 // d, length, d)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=gradients) for _ in "qkv")
    do = torch.randn_like(q)
    flops = 4.0 * shape[0] * shape[1] * length**2 * d * (0.5 if causal else 1.0) * (2.5 if gradients else 1.0)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    rates = []
    for function in (_function("forward"), sdpa):
        call = functools.partial(function, q, k, v, causal=causal)
        if gradients:
            call = functools.partial(torch.autograd.grad, call(), (q, k, v), do, retain_graph=True)
        rates.append(flops / median_seconds(call) / 1e12)
    what = "backward" if gradients else "forward"
    print(f"{what} bf16 D {d} N {length}{' causal' if causal else ''}: {rates[0]:.0f} TFLOP/s, SDPA {rates[1]:.0f}")


def median_seconds(call: Callable[[], Any]) -> float:
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times: list[float] = []
    for repeat in range(25):
        flush.zero_()  # a cold L2, as in a model
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if repeat >= 5:
            times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def _function(kernel: str) -> Callable[..., Any]:
    from .naive import naive_attention
    from .variants import triton

    return naive_attention if kernel == "naive" else triton
