"""Mutants of memory layouts, state between calls, and cheats."""

from __future__ import annotations

import gc
import math
import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_flashattn.support import Support

from .core import Core, Problem
from .mutants_mask import EVERYTHING
from .registry import misread, mutant
from .split import SplitCore

Output = tuple[Tensor, Tensor]


# -- strides ----------------------------------------------------------------------------------------------------------


@mutant(63, "layout")
class AssumeContigQ(Core):
    """q is read as contiguous."""

    def prepare(self, p: Problem) -> Problem:
        self.reached |= not p.q.is_contiguous()
        return replace(p, q=misread(p.q))


@mutant(64, "layout")
class AssumeContigKv(Core):
    """k and v are read as contiguous."""

    def prepare(self, p: Problem) -> Problem:
        self.reached |= not p.k.is_contiguous()
        return replace(p, k=misread(p.k), v=misread(p.v))


@mutant(65, "layout")
class VUsesKStrides(Core):
    """V is read with the strides of K."""

    def prepare(self, p: Problem) -> Problem:
        if p.v.shape != p.k.shape or p.v.stride() == p.k.stride() or not p.v.numel():
            return p
        self.reached = True
        return replace(p, v=p.v.as_strided(p.v.shape, p.k.stride()))


@mutant(68, "layout")
class Stride0Expand(Core):
    """K and V expanded over the batch are misread in the tail tile."""

    def prepare(self, p: Problem) -> Problem:
        if p.k.stride(0) or len(p.k) < 2 or not p.lk % self.block_k:
            return p
        self.reached = True
        v = p.v.clone()
        v[1:, :, p.lk // self.block_k * self.block_k :] = 0
        return replace(p, v=v)


@mutant(0, "layout")
class Stride0Heads(Core):
    """K expanded over the heads is read as if its heads lay one after the other."""

    def prepare(self, p: Problem) -> Problem:
        if p.k.stride(1) or p.k.shape[1] < 2:
            return p
        self.reached = True
        return replace(p, k=misread(p.k))


@mutant(0, "metamorphic.split_and_merge")
class HeadPitchFromLength(Core):
    """Heads of (B, H, L, D) memory are taken to lie L rows apart."""

    def prepare(self, p: Problem) -> Problem:
        pitch = p.lk * p.k.stride(2)
        if p.k.shape[1] == 1 or p.k.stride(1) <= p.k.stride(2) or p.k.stride(1) == pitch or p.k.stride(3) != 1:
            return p
        self.reached = True
        return replace(p, k=p.k.as_strided(p.k.shape, (p.k.stride(0), pitch, p.k.stride(2), 1)))


@mutant(72, "layout")
class BaseRoundedDown(Core):
    """Vector loads round the base address of k down to 16 bytes."""

    def prepare(self, p: Problem) -> Problem:
        odd = p.k.storage_offset() % 8
        self.reached |= odd > 0
        return replace(p, k=p.k.as_strided(p.k.shape, p.k.stride(), p.k.storage_offset() - odd))


@mutant(73, "features.bias")
class BiasRowpitchAlign(Core):
    """The rows of a bias are taken to lie a multiple of 8 elements apart."""

    def prepare(self, p: Problem) -> Problem:
        if p.bias is None or not p.bias.shape[-1] % 8 or p.bias.shape[-1] == 1:
            return p
        self.reached = True
        rows, pitch = p.bias.numel() // p.bias.shape[-1], -(-p.bias.shape[-1] // 8) * 8
        at = (torch.arange(rows)[:, None] * pitch + torch.arange(p.bias.shape[-1])) % p.bias.numel()
        return replace(p, bias=p.bias.flatten()[at].view(p.bias.shape))


@mutant(80, "layout")
class PadPoison(Core):
    """Tiles reach past D into the padding of a row and multiply it by zero: NaN there is NaN here."""

    def prepare(self, p: Problem) -> Problem:
        if p.k.stride(3) != 1 or p.k.stride(2) != p.k.shape[3] + 8:
            return p
        self.reached = True
        shape = (*p.k.shape[:3], 1)
        return replace(p, k=p.k + 0 * p.k.as_strided(shape, p.k.stride(), p.k.storage_offset() + p.k.shape[3]))


# -- state ------------------------------------------------------------------------------------------------------------


@mutant(102, "contract")
class StickyMaskState(Core):
    """The causal flag and the window of the previous call still apply."""

    before: dict[str, Any] | None = None

    def prepare(self, p: Problem) -> Problem:
        used = p if self.before is None else replace(p, **self.before)
        self.reached |= (used.causal, used.window) != (p.causal, p.window)
        self.before = {"causal": p.causal, "window": p.window}
        return used


@mutant(103, "forward")
class StickyCompileCache(Core):
    """The kernel that was built for the first head dim is used for all larger ones."""

    dim: int | None = None

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        self.dim = self.dim or q.shape[-1]
        self.reached |= q.shape[-1] > self.dim
        return super().scaled(p, q[..., : self.dim], k[..., : self.dim])


class _PerShape(Core):
    """Counts the calls of each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[Any, ...], int] = {}

    def count(self, p: Problem) -> int:
        key = (p.q.shape, p.k.shape, p.v.shape, p.q.dtype)
        self.calls[key] = self.calls.get(key, 0) + 1
        return self.calls[key]


@mutant(120, "contract")
class FirstCallAccumulates(_PerShape):
    """The first call of a new shape, which tunes, adds up two runs."""

    def forward(self, p: Problem) -> Output:
        o, lse = super().forward(p)
        if self.count(p) > 1:
            return o, lse
        self.reached = True
        return o * 2, lse


@mutant(121, "contract.inputs_unchanged")
class MutatesInputFirstCall(_PerShape):
    """The first call of a new shape changes v in place before it computes."""

    def forward(self, p: Problem) -> Output:
        if self.count(p) == 1:
            self.reached = True
            with torch.no_grad():
                p.v.mul_(0.5)
        return super().forward(p)


@mutant(128, "contract")
class NanWhenFast(_PerShape):
    """The third call of a shape takes a fast path, and gives NaN."""

    def forward(self, p: Problem) -> Output:
        o, lse = super().forward(p)
        if self.count(p) < 3:
            return o, lse
        self.reached = True
        return o.fill_(math.nan), lse


@mutant(85, "contract.same_call_twice")
class PvRace(Core):
    """The output varies by an ulp from run to run."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def forward(self, p: Problem) -> Output:
        o, lse = super().forward(p)
        if o.numel():
            self.reached = True
            at = self.random.randrange(o.numel())
            o.view(-1)[at] = torch.nextafter(o.view(-1)[at], o.new_tensor(9.0))
        return o, lse


@mutant(0, "contract.output_is_fresh")
class StaticOutputBuffer(Core):
    """Calls of one shape share one output buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[Any, Tensor] = {}

    def run(self, p: Problem) -> Output:
        o, lse = super().run(p)
        if o.requires_grad:
            return o, lse
        self.reached = True
        return self.buffers.setdefault((o.shape, o.dtype), torch.empty_like(o)).copy_(o), lse


@mutant(0, "contract.output_is_fresh")
class OneKeyReturnsV(Core):
    """With one key the output is v itself, not a copy."""

    def run(self, p: Problem) -> Output:
        o, lse = super().run(p)
        if p.lk != 1 or p.lq != 1 or p.k.shape[1] != p.heads or p.sinks is not None or p.bias is not None:
            return o, lse
        self.reached = True
        return (o, lse) if o.requires_grad else (p.v, lse)


@mutant(0, "contract.undeclared_features_raise")
class UndeclaredAccepted(Core):
    """ALiBi is not declared, yet accepted, and has no effect."""

    __flashattn__ = Support(features=EVERYTHING - {"alibi"})

    def prepare(self, p: Problem) -> Problem:
        self.reached |= p.slopes is not None
        return replace(p, slopes=None)


@mutant(0, "contract")
class ReturnsFloat32(Core):
    """The output is float32 whatever the inputs are."""

    def run(self, p: Problem) -> Output:
        o, lse = super().run(p)
        self.reached |= o.dtype != torch.float32
        return o.float(), lse


# -- splits -----------------------------------------------------------------------------------------------------------


@mutant(90, "causal")
class SplitCombineWrong(SplitCore):
    """Splits are weighted by their number of keys, not by their log-sum-exp."""

    def weights(self, lse: Tensor, counts: Tensor) -> Tensor:
        self.reached = True
        share = (counts / counts.sum()).to(lse.dtype)
        return share[:, None, None, None].expand_as(lse)


@mutant(91, "causal")
class SplitEmptyChunkNan(SplitCore):
    """An empty split gives 0 / 0, and NaN survives its weight of zero."""

    def part(self, p: Problem, dtype: torch.dtype) -> Output:
        o, lse = super().part(p, dtype)
        self.reached |= p.lk == 0
        return (o, lse) if p.lk else (o * math.nan, lse)


# -- cheats -----------------------------------------------------------------------------------------------------------


@mutant(129, "forward")
class ReturnZeros(Core):
    """Zeros."""

    def forward(self, p: Problem) -> Output:
        self.reached = True
        o, lse = super().forward(p)
        return torch.zeros_like(o), lse


@mutant(130, "forward")
class ReturnMeanV(Core):
    """The mean of V."""

    def forward(self, p: Problem) -> Output:
        self.reached = True
        o, lse = super().forward(p)
        return p.v.mean(2, keepdim=True)[:, self.head_map(p)].expand_as(o).clone(), lse


@mutant(131, "contract.inputs_unchanged")
class MutateInputs(Core):
    """v is zeroed before it is used: a reference computed afterwards is zero too."""

    def forward(self, p: Problem) -> Output:
        self.reached = True
        with torch.no_grad():
            p.v.zero_()
        return super().forward(p)


@mutant(132, "forward")
class EmptyAlias(Core):
    """Freshly allocated memory, in the hope that it holds the reference."""

    def forward(self, p: Problem) -> Output:
        self.reached = True
        lse = super().forward(p)[1]
        return p.q.new_empty(*p.q.shape[:3], p.v.shape[3]), lse


@mutant(134, "contract.content_is_read")
class CacheById(Core):
    """Results are looked up by the identity of q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, tuple[Any, ...]] = {}

    def key(self, p: Problem) -> Any:
        return id(p.q), id(p.k), id(p.v), p.causal, p.window, p.softcap, p.scale, id(p.bias), id(p.slopes), id(p.sinks)

    def run(self, p: Problem) -> Output:
        key = self.key(p)
        if key in self.known and not torch.is_grad_enabled():
            self.reached = True
            return self.known[key][0].clone(), self.known[key][1].clone()
        o, lse = super().run(p)
        self.known[key] = (o.detach(), lse.detach(), p)  # p keeps the objects alive, and so their ids
        return o, lse


@mutant(135, "contract.content_is_read")
class CacheByContent(CacheById):
    """Results are looked up by shapes and a checksum of q and k."""

    def key(self, p: Problem) -> Any:
        sums = tuple(float(x.detach().double().nan_to_num().sum()) for x in (p.q, p.k))
        return sums, p.q.shape, p.v.shape, p.causal, p.window, p.softcap, p.scale, p.bias, p.slopes, p.sinks


class LazyTensor(Tensor):
    """A tensor that could compute on first read."""


@mutant(137, "contract")
class LazyTensorOutput(Core):
    """A subclass of Tensor, which could do its work after the clock has stopped."""

    def run(self, p: Problem) -> Output:
        self.reached = True
        o, lse = super().run(p)
        return o.as_subclass(LazyTensor), lse


@mutant(139, "forward")
class GcCopyExpected(Core):
    """Copies any float64 tensor of the output's shape that lives in this process; zeros if there is none."""

    def forward(self, p: Problem) -> Output:
        self.reached = True
        o, lse = super().forward(p)
        found = (x for x in gc.get_objects() if type(x) is Tensor and x.dtype == torch.float64 and x.shape == o.shape)
        return next(found, torch.zeros_like(o)).to(o.dtype), lse
