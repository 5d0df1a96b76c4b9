"""The clocks of the lane: device time by CUDA events with a cold L2 cache, wall time on a CPU.

A clock is handed three things: what to do ahead of time, how to put fresh values into the inputs, and the call. On a
GPU the order in the stream is

    spin, fresh inputs, L2 flush, [start] the call [end], copies of its results

and each step is there for a reason. The spin lasts longer than the host takes to launch everything behind it, so that
no launch gap is measured. The inputs change after the spin: work that an implementation starts on a stream of its own,
without waiting for the caller's, runs during the spin and reads the values of the round before. The results are copied
in the caller's stream at once, as a caller would read them: work that has not come back by then is not in the copies.

The functions that tell the time are taken when this module is imported, which the plugin does before it imports an
implementation: one that replaces them later changes nothing here, and `tampered` names them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

FLUSH_BYTES = 256 << 20
"""Several times the L2 cache of any GPU."""
SPIN_SECONDS, LONGEST_SPIN = 5e-4, 2e-2
CYCLES_A_SECOND = 2e9
"""At least the clock of an SM, so that a spin lasts no less than asked for."""
LATE_SECONDS, LATE_SHARE = 1e-4, 0.2

Call = Callable[[], Sequence[Tensor]]

_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time")
_EVENT = ("record", "elapsed_time", "synchronize")
_now = time.perf_counter
_record, _elapsed, _wait = (getattr(torch.cuda.Event, name) for name in _EVENT)
_wait_for_device = torch.cuda.synchronize
_watched: list[tuple[Any, str, str]] = [
    *((time, name, f"time.{name}") for name in _CLOCKS),
    *((torch.cuda.Event, name, f"torch.cuda.Event.{name}") for name in _EVENT),
    (torch.cuda, "Event", "torch.cuda.Event"),
    (torch.cuda, "synchronize", "torch.cuda.synchronize"),
]
_originals = [getattr(owner, name) for owner, name, _ in _watched]


def tampered() -> list[str]:
    """The functions that tell the time and are no longer those that were there when this module was imported."""
    return [
        label
        for (owner, name, label), original in zip(_watched, _originals, strict=True)
        if getattr(owner, name) is not original
    ]


@dataclass(frozen=True)
class Timing:
    """One call. seconds: of the call; results: copies of what it returned, as the caller's stream saw them at its end;
    late: seconds for which the device was busy after that; host: seconds that it kept the host.
    """

    seconds: float
    results: list[Tensor]
    late: float = 0.0
    host: float | None = None

    @property
    def is_late(self) -> bool:
        return self.late > max(LATE_SECONDS, LATE_SHARE * self.seconds)


class Clock(Protocol):
    """kind: "device" or "wall"; says: what is measured, for a header; shortest: seconds below which it is no use."""

    kind: str
    says: str
    shortest: float

    def time(self, refresh: Callable[[], None], call: Call) -> Timing: ...

    def wait(self) -> None: ...


class WallClock:
    """Wall time of a call on a CPU; the caches are as the fresh inputs leave them."""

    kind = "wall"
    says = "wall clock, which says nothing of a GPU"
    shortest = 0.0

    def time(self, refresh: Callable[[], None], call: Call) -> Timing:
        refresh()
        began = _now()
        returned = call()
        seconds = _now() - began
        return Timing(seconds, [x.detach().clone() for x in returned])

    def wait(self) -> None:
        """A CPU is never behind."""


class DeviceClock:
    """Device time between two CUDA events around a call, L2 cold."""

    kind = "device"
    says = "device time by CUDA events, L2 flushed"
    shortest = 5e-5

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spin = SPIN_SECONDS
        self._scratch = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def time(self, refresh: Callable[[], None], call: Call) -> Timing:
        start, end, read = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(self._spin * CYCLES_A_SECOND))
            began = _now()
            refresh()
            self._scratch.zero_()
            _record(start)
            launched = _now()
            returned = call()
            host = _now() - launched
            _record(end)
            results = [x.detach().clone() for x in returned]
            self._spin = min(max(self._spin, 2 * (_now() - began)), LONGEST_SPIN)
            _record(read)
            _wait(read)
            done = _now()
            self.wait()
            late = _now() - done
        return Timing(1e-3 * float(_elapsed(start, end)), results, late, host)

    def wait(self) -> None:
        _wait_for_device(self.device)


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return DeviceClock(device) if device.type == "cuda" else WallClock()


def stopwatch() -> float:
    """Wall seconds, from the clock that was there first."""
    return _now()
