"""Time the sensible tiles of the plain kernels on this GPU: what reference_kernels/configs.py is chosen by.

    python measurements/tune.py --out measurements/h200/tune.json [--kernels forward,backward_q] [--dims 64,128]

For each kernel and head dimension, all candidates in turn on causal and dense problems of 16k tokens and hidden 2048
(bf16, cold L2, device time); the score is the geometric mean of the time over the cells as a share of the best
candidate's in that cell. Candidates are compiled first, on all cores; those that exceed shared memory are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels import Clock, tensors

from reference_kernels.backward import backward
from reference_kernels.configs import Config, lookup
from reference_kernels.forward import forward

KERNELS = ("forward", "backward_kv", "backward_q")
LENGTHS = (1024, 4096, 16384)
LAUNCHES = 5


def candidates(kernel: str, d: int) -> list[Config]:
    """Tiles whose accumulators and operands have a chance to fit into 255 registers a thread."""
    resident, streamed = (64, 128), (32, 64) if d > 128 else (64, 128) if kernel == "forward" else (32, 64, 128)
    depths = (1, 2, 3) if d > 128 else (2, 3, 4) if kernel == "forward" else (2, 3)
    found = []
    for own, other, warps, stages in itertools.product(resident, streamed, (4, 8), depths):
        m, n = (other, own) if kernel == "backward_kv" else (own, other)
        accumulators = own * d * (2 if kernel == "backward_kv" else 1) + m * n * (1 if kernel == "forward" else 2)
        if accumulators / (32 * warps) <= 288 and other * d * 2 * max(stages - 1, 1) <= 200_000:
            found.append(Config(m, n, warps, stages))
    return found


def call(kernel: str, config: Config, n: int, d: int, causal: bool) -> Callable[[], object]:
    """One launch of `kernel`; for the backward kernels with the delta kernel, which is the same for all candidates."""
    q, k, v, do = tensors(n, d)
    scale, right = d**-0.5, 0 if causal else None
    if kernel == "forward":
        return lambda: forward(q, k, v, scale=scale, right=right, config=config)
    o, lse = forward(q, k, v, scale=scale, right=right)
    wants: dict[str, Any] = {"want_kv": kernel == "backward_kv", "want_q": kernel == "backward_q"}
    wants["kv_config" if kernel == "backward_kv" else "q_config"] = config
    return lambda: backward(do, None, q, k, v, o, lse, scale=scale, right=right, **wants)


def compiles(task: tuple[str, Config, int, bool]) -> str:
    """Compile one candidate into the cache on disk. Empty, or why it cannot run."""
    kernel, config, d, causal = task
    try:
        call(kernel, config, 1024, d, causal)()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler says: the candidate is out
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def tune(clock: Clock, kernel: str, d: int, runnable: dict[tuple[Config, bool], str]) -> dict[str, Any]:
    """Times of all candidates of one table row, best first."""
    times: dict[Config, list[float]] = {c: [] for c in candidates(kernel, d)}
    cells = list(itertools.product((False, True), LENGTHS))
    for causal, n in cells:
        calls = {c: call(kernel, c, n, d, causal) for c in times if not any(runnable[c, x] for x in (False, True))}
        for launch in calls.values():
            launch()
        for config, launch in calls.items():
            times[config].append(statistics.median(clock.once(launch) for _ in range(LAUNCHES)))
    times = {c: row for c, row in times.items() if row}
    best = [min(row[i] for row in times.values()) for i in range(len(cells))]
    score = {
        c: math.exp(statistics.fmean(math.log(t / b) for t, b in zip(row, best, strict=True)))
        for c, row in times.items()
    }
    order = sorted(times, key=lambda c: score[c])
    now = lookup(kernel, 90, torch.bfloat16, d)
    print(f"{kernel} d{d}: now {tuple(now)} {score.get(now, math.nan):.3f}; best", end=" ")
    print(*(f"{tuple(c)} {score[c]:.3f}" for c in order[:4]), flush=True)
    return {
        "kernel": kernel,
        "d": d,
        "cells": [f"{'causal' if causal else 'dense'} n{n}" for causal, n in cells],
        "candidates": [
            {"config": tuple(c), "score": round(score[c], 4), "ms": [round(t, 4) for t in times[c]]} for c in order
        ],
        "refused": {str(tuple(c)): why for (c, causal), why in runnable.items() if why and not causal},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--dims", default="64,128,256")
    arguments = parser.parse_args()
    kernels, dims = arguments.kernels.split(","), [int(d) for d in arguments.dims.split(",")]
    tasks = [
        (kernel, c, d, causal)
        for kernel in kernels
        for d in dims
        for c in candidates(kernel, d)
        for causal in (False, True)
    ]
    print(f"compiling {len(tasks)} candidates", flush=True)
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        said = dict(zip(tasks, pool.map(compiles, tasks, chunksize=2), strict=True))
    clock = Clock()
    report: dict[str, Any] = {
        "command": f"python measurements/tune.py --kernels {arguments.kernels} --dims {arguments.dims}",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "rows": [],
    }
    for kernel, d in itertools.product(kernels, dims):
        runnable = {(c, causal): why for (k, c, dim, causal), why in said.items() if (k, dim) == (kernel, d)}
        report["rows"].append(tune(clock, kernel, d, runnable))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
