"""CUDA graphs and torch.compile of flash_attention on Hopper, against eager calls: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference_kernels import flash_attention

Answer = dict[str, Any]


def _leaves(d: str, n: int = 1000) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, 8, n, int(d), device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], do


def renew(tensors: list[Tensor]) -> None:
    """New N(0, 1) values into the same memory."""
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))


def captured(call: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A CUDA graph of a call that has run before, on a stream of its own, and the memory of its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = call()
    return graph, static


def graph(d: str, causal: str) -> Answer:
    """A graph of the forward and the deterministic backward, replayed three times, each on new inputs."""
    leaves, do = _leaves(d)

    def call() -> tuple[Tensor, ...]:
        o = flash_attention(*leaves, causal=causal == "1", kernel="hopper", deterministic=True)
        return (o.detach(), *torch.autograd.grad(o, leaves, do))

    replayed, static = captured(call)
    same = []
    for _ in range(3):
        renew([*leaves, do])
        replayed.replay()
        same.append(all(torch.equal(a, b) for a, b in zip(static, call(), strict=True)))
    return {"ok": all(same), "replays": len(same), "equal_to_eager": same}


def compiled(d: str, causal: str) -> Answer:
    """torch.compile(mode="reduce-overhead"), which replays CUDA graphs: outputs, then outputs and gradients."""
    from torch._dynamo.utils import counters

    leaves, do = _leaves(d)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # A product of torch's own before and after, so that there is something to compile.
        return flash_attention(2 * q, k, v, causal=causal == "1", kernel="hopper", deterministic=True) * 0.5

    function = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    same = []
    for step in range(8):
        renew([*leaves, do])
        torch.compiler.cudagraph_mark_step_begin()
        if step < 4:
            with torch.no_grad():
                same.append(torch.equal(function(*leaves), attend(*leaves)))
            continue
        results = []
        for f in (function, attend):
            o = f(*leaves)
            results.append([o.detach().clone(), *(x.clone() for x in torch.autograd.grad(o, leaves, do))])
        same.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    skipped = counters["inductor"]["cudagraph_skips"]
    return {"ok": all(same) and not skipped, "equal_to_eager": same, "graphs_skipped": skipped}


def unseen(d: str, causal: str) -> Answer:
    """Under capture, with a shape that the Hopper kernel has not run: kernel=None is plain Triton, bit by bit."""
    (q, k, v), _ = _leaves(d, 760)
    masked = causal == "1"
    with torch.no_grad():
        want = flash_attention(q, k, v, causal=masked, kernel="triton")
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            static = flash_attention(q, k, v, causal=masked)
        recorded.replay()
        torch.cuda.synchronize()
    return {"ok": torch.equal(static, want)}
