"""Implementations that cheat on the clock; each returns right results to whoever only checks results, or nearly so.

On a CUDA device and on a CPU alike: what a stream is there, a thread is here. `honest` is what they pretend to be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_flashattn.support import Support
from reference_kernels.naive import naive_attention

SUPPORT = Support(features=frozenset({"causal", "scale", "backward"}))
HONEST_CALLS = 4
"""Calls for which those behave that wait: longer than a check of correctness watches."""


def honest(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    o = naive_attention(q, k, v, causal=causal, scale=scale)
    assert isinstance(o, Tensor)
    return o


class Cheat:
    """honest, with one step replaced. calls: how often it was called."""

    __flashattn__ = SUPPORT

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        self.calls += 1
        return self.result(q, k, v, lambda *inputs: honest(*(inputs or (q, k, v)), causal=causal, scale=scale))

    def result(self, q: Tensor, k: Tensor, v: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        return compute()


class SideStream(Cheat):
    """The work goes on after the call has returned, where its caller does not wait. joins: it waits for its caller."""

    def __init__(self, *, joins: bool) -> None:
        super().__init__()
        self.joins = joins

    def result(self, q: Tensor, k: Tensor, v: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        if q.device.type != "cuda":

            def later() -> None:
                time.sleep(0.005)
                out.copy_(compute().detach())

            threading.Thread(target=later, daemon=True).start()
            return out
        side = torch.cuda.Stream()
        if self.joins:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out.copy_(compute().detach())
        return out


class CachedByAddress(Cheat):
    """What was computed for this memory once is returned whenever it comes again."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Tensor] = {}

    def result(self, q: Tensor, k: Tensor, v: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        if q.data_ptr() not in self.known:
            self.known[q.data_ptr()] = compute()
        return self.known[q.data_ptr()].clone()


class CachedByCount(Cheat):
    """After a few calls the last result is the result."""

    last: Tensor | None = None

    def result(self, q: Tensor, k: Tensor, v: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        if self.last is None or self.calls <= HONEST_CALLS:
            self.last = compute()
        return self.last


class _Promise(Tensor):
    """A tensor that is computed when something is done with it."""

    todo: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = [x.todo() if isinstance(x, _Promise) and "todo" in vars(x) else x for x in args]
        return super().__torch_function__(function, types, made, kwargs or {})


class Lazy(Cheat):
    """A tensor subclass that looks like the result and computes it when it is read."""

    def result(self, q: Tensor, k: Tensor, v: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3]).as_subclass(_Promise)
        out.todo = compute
        return out


class PatchedClock(Cheat):
    """After a few calls the functions that tell the time tell less of it."""

    def result(self, q: Tensor, k: Tensor, v: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        if self.calls == HONEST_CALLS:
            patch_clocks()
        return compute()


def patch_clocks() -> None:
    true, elapsed = time.perf_counter, torch.cuda.Event.elapsed_time
    time.perf_counter = lambda: true() / 10
    torch.cuda.Event.elapsed_time = lambda *events: elapsed(*events) / 10  # type: ignore[method-assign]


class Skipping(Cheat):
    """After a few calls every other one reads half of the keys."""

    def result(self, q: Tensor, k: Tensor, v: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        if self.calls > HONEST_CALLS and self.calls % 2:
            half = k.shape[2] // 2
            return compute(q, k[:, :, :half], v[:, :, :half])
        return compute()


class Overwriting(Cheat):
    """Its output takes the place of q."""

    def result(self, q: Tensor, k: Tensor, v: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        out = compute()
        with torch.no_grad():
            q.copy_(out)
        return out


class Slower(Cheat):
    """Honest, and takes `share` longer: waits on a CPU, and on a GPU keeps the stream busy."""

    def __init__(self, share: float, inner: Callable[..., Tensor] = honest) -> None:
        super().__init__()
        self.share, self.inner = share, inner
        self._cycles: dict[tuple[int, ...], int] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        if q.device.type != "cuda":
            began = time.perf_counter()
            out = self.inner(q, k, v, causal=causal, scale=scale)
            until = began + (1 + self.share) * (time.perf_counter() - began)
            while time.perf_counter() < until:
                pass
            return out
        torch.cuda._sleep(self._cycles_for(q, k, v, causal, scale))
        return self.inner(q, k, v, causal=causal, scale=scale)

    def _cycles_for(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> int:
        """Cycles that last `share` of a forward call: both are timed on the first call of a shape."""
        key = (*q.shape, *k.shape, causal)
        if key not in self._cycles:
            with torch.no_grad():
                for _ in range(5):
                    self.inner(q, k, v, causal=causal, scale=scale)
                call = _device_seconds(lambda: self.inner(q, k, v, causal=causal, scale=scale))
            unit = _device_seconds(lambda: torch.cuda._sleep(1_000_000))
            self._cycles[key] = int(1_000_000 * self.share * call / unit)
        return self._cycles[key]


def _device_seconds(call: Callable[[], object], times: int = 20) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / times


honest.__flashattn__ = SUPPORT  # type: ignore[attr-defined]

WRONG = ("wrong",)
LATE = ("wrong", "the device went on working")  # what is seen first depends on how long the device is at it
CHEATS: dict[str, tuple[Callable[[], Cheat], tuple[str, ...]]] = {
    "side_stream": (lambda: SideStream(joins=True), LATE),
    "side_stream_ahead": (lambda: SideStream(joins=False), LATE),
    "cached_by_address": (CachedByAddress, WRONG),
    "cached_by_count": (CachedByCount, WRONG),
    "lazy": (Lazy, ("expected a plain tensor",)),
    "patched_clock": (PatchedClock, ("replaced time.perf_counter",)),
    "skipping": (Skipping, WRONG),
    "overwriting": (Overwriting, ("changed its inputs",)),
}
"""By name: how to make one, and what its verdict must say, one of these."""
