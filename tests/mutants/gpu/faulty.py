"""The implementations of the lane, as a command line names them: `--flashattn-impl=mutants.gpu.faulty:NAME`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_flashattn.support import Support

from . import kernels

FEATURES = frozenset({"causal", "cross", "gqa", "scale", "lse", "backward"})


class Kernel:
    """The Triton kernels behind the contract, with `switches` of the forward on."""

    __flashattn__ = Support(features=FEATURES, max_head_dim=128)

    def __init__(self, **switches: bool) -> None:
        self.switches = switches

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        o, lse = _Attention.apply(self, q, k, v, causal, scale)
        return (o, lse) if return_lse else o

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(q.device):  # Triton launches on the current one
            return kernels.forward(q, k, v, causal, scale, **self.switches)

    race = False


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        o, lse = kernel.forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.kernel, ctx.causal, ctx.scale = kernel, causal, scale
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        delta = (o.float() * do.float()).sum(-1)
        dq, dk, dv = kernels.add_up(q, k, v, lse, ctx.causal, ctx.scale, race=ctx.kernel.race, do=do, delta=delta)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


class _AddsUp(Kernel):
    """o is added up by atomics, tile by tile, in the order in which they come; lse is not."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        lse = kernels.forward(q, k, v, causal, scale)[1]
        return kernels.add_up(q, k, v, lse, causal, scale, race=self.race)[0].to(q.dtype), lse


class _AddsUpRacing(_AddsUp):
    """The same without atomics: what two programs add at a time, one of them loses."""

    race = True


class _BackwardRace(Kernel):
    """Gradients are added up without atomics."""

    race = True


class _EmptyAlias(Kernel):
    """Freshly allocated memory, in the hope that it holds the expected output."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = kernels.forward(q, k, v, causal, scale)
        return torch.empty_like(o), lse  # o is alive still: its memory, which is right, is not the fresh one


class _SideStream(Kernel):
    """Works on a stream of its own, late, and returns at once."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = (
            torch.empty_like(q, memory_format=torch.contiguous_format),
            q.new_empty(q.shape[:3], dtype=torch.float32),
        )
        stream = torch.cuda.Stream(q.device)
        stream.wait_stream(torch.cuda.current_stream(q.device))
        with torch.cuda.stream(stream):
            late = kernels.forward(q, k, v, causal, scale)  # first: compiling lasts longer than the sleep
            torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
            for x, right in zip((o, lse), late, strict=True):
                x.copy_(right)
        for x in (q, k, v, o, lse):
            x.record_stream(stream)
        return o, lse


class _Device0Launch(Kernel):
    """Launches on GPU 0 whatever GPU the tensors are on."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(0):
            torch.cuda._sleep(20_000_000)  # where GPU 0 can reach the tensors its work is late, elsewhere it is lost
            return kernels.forward(q, k, v, causal, scale)


def _definition(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """Attention in plain PyTorch; when traced it loses the first head dim."""
    heads = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        q, k = q[..., 1:], k[..., 1:]
    s = q.float() @ k.float()[:, heads].mT * scale
    if causal:
        rows, keys = (torch.arange(n, device=q.device) for n in s.shape[2:])
        s = s.masked_fill(keys > rows[:, None] + s.shape[3] - s.shape[2], -torch.inf)
    p = torch.softmax(s, -1).nan_to_num()
    return (p @ v.float()[:, heads]).to(q.dtype)


_definition.__flashattn__ = Support(features={"causal", "cross", "gqa", "scale", "dv"}, p_dtype="fp32")  # type: ignore[attr-defined]

honest = Kernel()
definition = _definition
int32_offset = Kernel(NARROW=True)
int16_seqlen = Kernel(SHORT=True)
grid_limit_raises = Kernel(TWO_AXES=True)
pad_poison = Kernel(READ_ON=True)
fwd_race = _AddsUpRacing()
bwd_race = _BackwardRace()
pv_race = _AddsUp()
empty_alias = _EmptyAlias()
side_stream = _SideStream()
device0_launch = _Device0Launch()
compiled_differs = torch.compile(_definition)
