"""Mutants of state between calls, of the contract, and cheats."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_flashattn.support import Support

from .core import Core, Problem
from .mutants_mask import EVERYTHING
from .registry import mutant

Output = tuple[Tensor, Tensor]


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


@mutant(84, "forward")
class FwdRace(Core):
    """One tile in fifty is lost from the forward, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        for j in super().key_tiles(p, i):
            if self.random.random() < 0.02:
                self.reached = True
            else:
                yield j

    def backward_tiles(self, p: Problem, i: int) -> Iterable[int]:
        return super().key_tiles(p, i)


@mutant(86, "contract.same_call_twice")
class DeterministicIgnored(Core):
    """Declared as deterministic, yet tiles are added up in another order at every call."""

    __flashattn__ = Support(features=EVERYTHING, deterministic=True)

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        tiles = list(super().key_tiles(p, i))
        order = self.random.sample(tiles, len(tiles))
        self.reached |= order != tiles
        return order


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
        o = p.q.new_empty(*p.q.shape[:3], p.v.shape[3])  # first: later, it would be the memory of the right output
        return o, super().forward(p)[1]


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


@mutant(136, "contract.content_is_read")
class BatchAndSkip(_PerShape):
    """One call in three computes; the next two of the same shapes get its result again."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[Any, Output] = {}

    def run(self, p: Problem) -> Output:
        if torch.is_grad_enabled():
            return super().run(p)
        key = (p.q.shape, p.k.shape, p.v.shape, p.q.dtype, p.scale, p.causal, p.window, p.softcap)
        if self.count(p) % 3 == 1 or key not in self.last:
            self.last[key] = super().run(p)
        else:
            self.reached = True
        o, lse = self.last[key]
        return o.clone(), lse.clone()


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
