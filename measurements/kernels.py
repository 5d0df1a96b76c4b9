"""Measure the plain Triton kernels on a GPU against PyTorch's SDPA backends in the same process; one JSON file.

    python measurements/kernels.py --out measurements/h200/kernels.json [--only speed,memory]

speed    forward and backward, 16k tokens, hidden 2048, N 512 … 16384, D 64 and 128, causal and not: TFLOP/s and ratios
memory   peak memory of naive against flash over N (the chapter's table)
repeats  1000 calls, forward and backward, bit-identical
offsets  tensors past 2**31 elements, checked on sampled rows against the streaming oracle
exp2     a register-bound loop of exp against exp2 with log2(e) folded into the scale
graphs   a CUDA graph replayed, and torch.compile with Inductor, against eager calls
launch   microseconds that one forward call keeps the host busy

Each launch is timed alone with CUDA events after the L2 cache was flushed and a spin that hides the host's share; all
candidates of a cell take turns, round by round, and the median of each counts. The ratio to a peer of the same run is
the result, since absolute numbers vary.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from graphs import captured, renew

import oracles
from pytest_flashattn import peers
from reference_kernels.naive import naive_attention
from reference_kernels.variants import triton as flash_attention

TOKENS, HIDDEN = 16384, 2048
FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU
SPIN_CYCLES = 1_000_000  # about half a millisecond: longer than a call takes on most hosts
CYCLES_PER_SECOND = 2e9  # of a GPU, at most
Call = Callable[[], object]


class Clock:
    """Device time of single launches, cold L2."""

    def __init__(self) -> None:
        self.scratch = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def once(self, call: Call, spin: int = SPIN_CYCLES) -> float:
        """Milliseconds of one call, which the host makes within `spin` cycles of the GPU."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.scratch.zero_()
        torch.cuda._sleep(spin)  # the launch is in the queue before its turn comes: device time alone
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def medians(self, calls: dict[str, Call], rounds: int = 5, launches: int = 7) -> dict[str, float]:
        """Milliseconds by name: the median of round medians, all candidates taking turns."""
        spins = {}
        for name, call in calls.items():  # compile, and warm up
            for _ in range(3):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                call()
                host = time.perf_counter() - begun
            spins[name] = max(SPIN_CYCLES, int(3 * host * CYCLES_PER_SECOND))
        torch.cuda.synchronize()
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                found[name].append(statistics.median(self.once(call, spins[name]) for _ in range(launches)))
        return {name: statistics.median(values) for name, values in found.items()}


def tensors(n: int, d: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v and dO (B, H, N, D) ~ N(0, 1) with 16k tokens and hidden 2048: zeros would run up to 13 % faster."""
    shape = (TOKENS // n, HIDDEN // d, n, d)
    return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4)]


def speed(clock: Clock) -> list[dict[str, Any]]:
    """A row for each direction and cell of the grid."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    cells = [(d, causal, n) for d in (64, 128) for causal in (False, True) for n in lengths]
    rows = [row for cell in cells for row in _cell(clock, *cell)]
    for direction in ("forward", "backward"):
        for peer in ("fa2", "cudnn"):
            ratios = [r[f"x_{peer}"] for r in rows if r["direction"] == direction]
            print(f"{direction}: geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f} x {peer}")
    return rows


def _cell(clock: Clock, d: int, causal: bool, n: int) -> list[dict[str, Any]]:
    q, k, v, do = tensors(n, d)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    implementations = {"flash_attention": flash_attention, "fa2": peers.sdpa_flash, "cudnn": peers.sdpa_cudnn}
    forward: dict[str, Call] = {name: partial(f, q, k, v, causal=causal) for name, f in implementations.items()}
    outputs = {name: f(*leaves, causal=causal) for name, f in implementations.items()}
    backward: dict[str, Call] = {
        name: partial(torch.autograd.grad, o, leaves, do, retain_graph=True) for name, o in outputs.items()
    }
    flops = 4 * TOKENS * n * HIDDEN * (0.5 if causal else 1.0)
    rows = []
    for direction, calls, factor in (("forward", forward, 1.0), ("backward", backward, 2.5)):
        times = clock.medians(calls)
        tflops = {name: factor * flops / ms / 1e9 for name, ms in times.items()}
        row = {"direction": direction, "d": d, "causal": causal, "n": n, "tflops": tflops}
        row |= {f"x_{peer}": round(tflops["flash_attention"] / tflops[peer], 4) for peer in ("fa2", "cudnn")}
        rows.append(row)
        shown = "  ".join(f"{name} {value:6.1f}" for name, value in tflops.items())
        print(f"{direction:8s} d{d} {'causal' if causal else 'dense ':6s} n{n:<6d} {shown}", flush=True)
    return rows


def memory() -> list[dict[str, Any]]:
    """Peak bytes above the inputs, forward and backward, one batch, 32 heads, D = 64, fp16."""
    rows = []
    for n in (512, 1024, 2048, 4096, 8192):
        row: dict[str, Any] = {"n": n}
        for name, f in (("naive", naive_attention), ("flash_attention", flash_attention)):
            q, k, v, do = (torch.randn(1, 32, n, 64, device="cuda", dtype=torch.float16) for _ in range(4))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(f(*leaves), leaves, do)
            row[name] = torch.cuda.max_memory_allocated() - before
        row["ratio"] = round(row["naive"] / row["flash_attention"], 2)
        rows.append(row)
        print(
            f"n{n:<6d} naive {row['naive']:>14,d}  flash {row['flash_attention']:>14,d}  {row['ratio']} x", flush=True
        )
    return rows


def repeats(times: int = 1000) -> dict[str, Any]:
    """How many of `times` calls, forward and backward, differ from the first in any bit."""
    differing = {}
    for causal in (False, True):
        q, k, v, do = (torch.randn(4, 16, 1000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def call(causal: bool = causal, leaves: list[Tensor] = leaves, do: Tensor = do) -> tuple[Tensor, ...]:
            o = flash_attention(*leaves, causal=causal)
            return (o.detach(), *torch.autograd.grad(o, leaves, do))

        first = call()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(times):
            wrong += sum((a != b).any().long() for a, b in zip(call(), first, strict=True))
        differing["causal" if causal else "dense"] = int(wrong)
    print(f"repeats: {differing} of {times} calls differ")
    return {"calls": times, "differing": differing}


def offsets() -> dict[str, Any]:
    """q, k, v past 2**31 elements each; sampled rows of the last head against the streaming oracle."""
    b, h, n, d = 1, 160, 131072, 128  # 2.7e9 elements, 5.4 GB a tensor
    q, k, v = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    o = flash_attention(q, k, v, causal=True)
    rows = torch.tensor([0, 1, 63, 64, n // 2, n - 65, n - 2, n - 1], device="cuda")
    last = [x[:, -1:] for x in (q, k, v)]
    spec = oracles.AttentionSpec(causal=True)
    want = oracles.streaming.forward(*last, spec, rows=rows).o
    error = float((o[:, -1:, rows].double() - want).abs().max())
    limit = 2.0**-8 * float(want.abs().max())
    print(f"offsets: {q.numel():,} elements a tensor, worst error {error:.2e} (an output rounding is {limit:.2e})")
    return {"elements": q.numel(), "rows": rows.tolist(), "error": error, "rounding": limit, "ok": error <= 2 * limit}


@triton.jit
def _exponentials(out, scale, STEPS: tl.constexpr, BLOCK: tl.constexpr, BASE2: tl.constexpr):
    # (BLOCK,): float32
    x = tl.arange(0, BLOCK).to(tl.float32) * -1e-3
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(STEPS):
        y = x * scale - step * 1e-3
        total += tl.exp2(y) if BASE2 else tl.exp(y)
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def exp2(clock: Clock) -> dict[str, Any]:
    """Milliseconds of 4096 exponentials an element: exp multiplies by log2(e) each time, exp2 has it in the scale."""
    out = torch.empty(132 * 16 * 1024, device="cuda")
    grid = (132 * 16,)
    calls: dict[str, Call] = {
        "exp": lambda: _exponentials[grid](out, 0.125, 4096, 1024, False),
        "exp2": lambda: _exponentials[grid](out, 0.125 * math.log2(math.e), 4096, 1024, True),
    }
    times = clock.medians(calls)
    print(f"exp {times['exp']:.3f} ms, exp2 {times['exp2']:.3f} ms: {times['exp'] / times['exp2']:.3f} x")
    return times | {"ratio": times["exp"] / times["exp2"]}


def launch(calls: int = 200) -> dict[str, float]:
    """Microseconds of host time of a forward call on a small problem: the median of `calls`, nothing waited for."""
    q, k, v = (torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = {}
    for name, function in (
        ("flash_attention", flash_attention),
        ("fa2", peers.sdpa_flash),
        ("cudnn", peers.sdpa_cudnn),
    ):
        taken = []
        for repeat in range(calls + 20):
            began = time.perf_counter()
            function(q, k, v, causal=True)
            if repeat >= 20:
                taken.append(1e6 * (time.perf_counter() - began))
            torch.cuda.synchronize()
        found[name] = round(statistics.median(taken), 1)
    print("host time of a forward call, us:", found, flush=True)
    return found


def graphs() -> dict[str, Any]:
    """A CUDA graph of forward and backward, replayed on new inputs: bit-identical to eager calls?"""
    q, k, v, do = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def call() -> tuple[Tensor, ...]:
        o = flash_attention(*leaves, causal=True)
        return (o.detach(), *torch.autograd.grad(o, leaves, do))

    graph, static = captured(call)
    renew([*leaves, do])
    graph.replay()
    same = [torch.equal(a, b) for a, b in zip(static, call(), strict=True)]
    compiled = torch.compile(flash_attention, fullgraph=True)
    inductor = torch.equal(compiled(*leaves, causal=True), flash_attention(*leaves, causal=True))
    print(f"graphs: replay equals eager {same}; torch.compile with Inductor equals eager {inductor}", flush=True)
    return {"replay_equals_eager": all(same), "inductor_equals_eager": inductor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--only", default="speed,memory,repeats,offsets,exp2,launch,graphs", help="parts, separated by commas"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; every part measures one")
    torch.manual_seed(0)
    clock = Clock()
    parts: dict[str, Callable[[], Any]] = {
        "speed": lambda: speed(clock),
        "memory": memory,
        "repeats": repeats,
        "offsets": offsets,
        "exp2": lambda: exp2(clock),
        "launch": launch,
        "graphs": graphs,
    }
    report: dict[str, Any] = {
        "command": f"python measurements/kernels.py --only {arguments.only}",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
    }
    for name in arguments.only.split(","):
        if name not in parts:
            parser.error(f"no part {name!r}; parts: {', '.join(parts)}")
        report[name] = parts[name]()
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")  # a later part may not end


if __name__ == "__main__":
    main()
