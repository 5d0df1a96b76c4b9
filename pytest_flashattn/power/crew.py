"""Processes that perform jobs. One that hangs or crashes is replaced, and whoever it had on trial counts as failed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import connection

from . import judges, worker
from .cast import HONEST
from .plan import Job
from .worker import Alone, At, Cost, Done, Event, Kill

PATIENCE = 10.0
"""Seconds that a mutant may take on top of 20 times what the step took on the honest implementation."""

LONG_PATIENCE = 600.0
"""Seconds that equivalents may take, which may compile, and the honest one: nothing is known of the step then."""

Listener = Callable[[Job, Event], None]


class CrewError(RuntimeError):
    """No process can be brought to work; one sentence."""


def size() -> int:
    """Processes that fit: one for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def perform(jobs: Iterable[Job], module: str, tell: Listener) -> None:
    """Perform all jobs, the long ones first, on as many processes as there are cores, and tell every event.

    Raises CrewError when a process dies before it has put anyone on trial.
    """
    waiting = deque(sorted(jobs, key=lambda job: -job.size))
    hands: list[_Hand] = []
    try:
        while waiting or any(hand.job for hand in hands):
            idle = [hand for hand in hands if hand.job is None]
            while waiting and (idle or len(hands) < size()):
                if not idle:
                    hands.append(_Hand(module))
                    idle = [hands[-1]]
                idle.pop().take(waiting.popleft())
            busy = [hand for hand in hands if hand.job]
            ready = connection.wait([hand.channel for hand in busy], timeout=1.0)
            for hand in busy:
                rest = hand.listen(tell) if hand.channel in ready else hand.check(tell)
                if rest is not None:
                    waiting.appendleft(rest)
                    hands.remove(hand)
    finally:
        for hand in hands:
            hand.dismiss()


@dataclass
class _Hand:
    """A process, the job it is at, and how far it has come."""

    module: str
    job: Job | None = None
    at: At | None = None
    since: float = 0.0
    honest_seconds: float = 0.0
    done: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process that has used torch may hang
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=worker.serve, args=(theirs, self.module), daemon=True)
        self.process.start()
        theirs.close()

    def take(self, job: Job) -> None:
        self.job, self.at, self.dead = job, None, set()
        self.channel.send(job)

    def listen(self, tell: Listener) -> Job | None:
        """Pass the next event on. The rest of the job when the process has died, which leaves this hand without use."""
        assert self.job is not None
        try:
            event = self.channel.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            return self._lost(f"the process died ({f'signal {-code}' if code < 0 else f'exit status {code}'})", tell)
        self._note(event)
        tell(self.job, event)
        if isinstance(event, Done):
            self.job = None
        return None

    def check(self, tell: Listener) -> Job | None:
        """As `listen`, when nothing was heard: the rest of the job if the run has taken too long."""
        if self.at is None:
            return None
        mutant = self.job is not None and self.at.name in (*self.job.mutants, self.job.again)
        limit = PATIENCE + 20 * self.honest_seconds if mutant else LONG_PATIENCE
        if time.monotonic() - self.since <= limit:
            return None
        self.dismiss()
        return self._lost(f"did not return within {limit:.0f} s", tell)

    def dismiss(self) -> None:
        self.process.kill()
        self.process.join()

    def _note(self, event: Event) -> None:
        match event:
            case At(_, step):
                self.done = {self.at.name, *self.done} if self.at and self.at.step == step else set()
                self.at, self.since = event, time.monotonic()
            case Cost(_, seconds):
                self.honest_seconds = seconds
            case Kill(name, _, _, ""):
                self.dead.add(name)

    def _lost(self, reason: str, tell: Listener) -> Job:
        """Book the one on trial as failed and give the job back without it."""
        job, at = self.job, self.at
        if job is None or at is None:
            raise CrewError(f"a process of the crew ended before its first run: {reason}")
        if at.name == HONEST:
            self._book(at, reason, tell)
            return replace(job, start=at.step + 1, done=frozenset(), again="")
        again = ""
        if at.name == job.again or at.name in self.dead:  # it was being tried alone
            tell(job, Alone(at.name, at.step, True))
        else:
            self._book(at, reason, tell)
            own, mutant = bool(job.steps[0].check), at.name in job.mutants
            again = at.name if own and mutant and not job.every else ""
        gone = {at.name} if job.every else self.dead | {at.name}
        mutants, equivalents = (tuple(n for n in x if n not in gone) for x in (job.mutants, job.equivalents))
        done = frozenset(self.done | {at.name})
        return replace(job, mutants=mutants, equivalents=equivalents, start=at.step, done=done, again=again)

    def _book(self, at: At, reason: str, tell: Listener) -> None:
        assert self.job is not None
        for rule in judges.names(self.job.steps[0]):
            tell(self.job, Kill(at.name, at.step, reason, rule))
