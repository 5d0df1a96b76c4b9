"""How long a diagnosis may take: seconds of this thread, and never so long that the watchdog takes it for a hang."""

from __future__ import annotations

import time

from .. import watchdog

SECONDS = 2.0
"""Of this thread, for the comparisons of one diagnosis."""

PATIENCE = 10.0
"""Seconds: a check that took longer so far is too slow to repeat its calls."""


class Budget:
    """started: when the check began, by time.perf_counter(). Time of the thread: others cost nothing."""

    def __init__(self, started: float, seconds: float = SECONDS) -> None:
        self._started = started
        self._end = time.thread_time() + seconds

    def renewed(self) -> Budget:
        return Budget(self._started)

    @property
    def spent(self) -> bool:
        return time.thread_time() > self._end or watchdog.remaining() < self._so_far()

    @property
    def allows_a_call(self) -> bool:
        """A call takes at most what the check has taken so far: there must be time for several."""
        return self._so_far() < PATIENCE and watchdog.remaining() > 4 * self._so_far() + SECONDS

    def _so_far(self) -> float:
        return time.perf_counter() - self._started
