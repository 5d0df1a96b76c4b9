"""One process of the power command: it performs jobs and tells everything as it happens, as events in a pipe.

It says whom it puts on trial before it does, so that whoever reads knows who hung or crashed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from ..implementation import Implementation
from ..implementation import load as load_implementation
from . import cast, memo, reach
from .judges import judge_of, names
from .plan import Job


@dataclass(frozen=True)
class At:
    """The run of `name` on step number `step` begins."""

    name: str
    step: int


@dataclass(frozen=True)
class Cost:
    """CPU seconds that the step took on the honest implementation, oracle included."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Kill:
    """The step failed a mutant, or an equivalent: then it is a false alarm. rule: whose verdict it is, "" for ours."""

    name: str
    step: int
    reason: str
    rule: str = ""


@dataclass(frozen=True)
class Alone:
    """Whether the step that killed `name` also kills a fresh one, to which no other step came before."""

    name: str
    step: int
    killed: bool


@dataclass(frozen=True)
class Done:
    """The job has ended."""


Event = At | Cost | Kill | Alone | Done


def serve(channel: Connection, module: str) -> None:
    """Perform jobs from the pipe until it closes."""
    torch.set_num_threads(1)  # a process a core: threads would only get in each other's way
    stage = Stage(cast.load(module))
    _be_quiet()
    with memo.oracles_remembered() as answers, contextlib.suppress(EOFError):
        while True:
            for event in perform(channel.recv(), stage, answers):
                channel.send(event)
            channel.send(Done())


def _be_quiet() -> None:
    """What those on trial print, or their libraries and last words, would run through the table of the parent."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


class Stage:
    """The implementations of a cast: each loaded once, and made as often as it is asked for."""

    def __init__(self, who: cast.Cast) -> None:
        self._suspects = who.mutants | who.equivalents
        self._device = who.device
        self._honest = who.honest.make()
        self._loaded: dict[str, Implementation] = {}
        self.overridden: dict[str, frozenset[str] | None] = {}

    def fresh(self, name: str) -> Implementation:
        suspect = self._suspects[name]
        function = suspect.make()
        if name not in self._loaded:
            self._loaded[name] = load_implementation(function, convention=suspect.convention, device=self._device)
            self.overridden[name] = reach.overridden(function, self._honest)
        return replace(self._loaded[name], function=function)


def perform(job: Job, stage: Stage, answers: memo.Memo) -> Iterator[Event]:
    """The events of a job but for its end."""
    subjects = {name: stage.fresh(name) for name in [*job.equivalents, *job.mutants]}
    alive = {name: set(names(job.steps[0])) for name in job.mutants}
    for number, step in enumerate(job.steps[job.start :], job.start):
        answers.forget()
        judge = judge_of(step)
        honest = stage.fresh(cast.HONEST)
        read = reach.watched(honest.function)
        yield At(cast.HONEST, number)
        started = time.process_time()
        accused = judge.base(honest)
        yield Cost(number, time.process_time() - started)
        if accused:
            yield Kill(cast.HONEST, number, accused)
            continue  # what accuses the honest one convicts nobody
        if job.again and number == job.start:
            yield At(job.again, number)
            yield Alone(job.again, number, bool(judge.faults(stage.fresh(job.again))))
        for name in [*job.equivalents, *alive]:
            right = name not in alive
            met = number == job.start and name in job.done and not right  # a judge wants to see all who are right
            if met or not reach.reaches(stage.overridden[name], read):
                continue
            yield At(name, number)
            faults = judge.faults(stage.fresh(name) if job.every else subjects[name], right=right)
            yield from (Kill(name, number, why, rule) for rule, why in faults.items())
            if right or job.every:
                continue
            if "" in faults:
                yield At(name, number)
                yield Alone(name, number, bool(judge.faults(stage.fresh(name))))
            alive[name] -= faults.keys()
            if not alive[name]:
                del alive[name]
