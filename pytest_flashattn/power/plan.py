"""What is to be run: every check on every case of a level, the cheap ones first, in jobs for processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .. import matrices
from ..cases import Case
from ..chapters import CHAPTERS
from ..checks.registry import checks_of
from ..features import FP8

TILE = 64
"""Rows and keys of a tile: a kernel computes whole tiles, so one row costs as much as 64."""

LARGE = 2**27
"""Work beyond which a case is put only to mutants that no smaller case of its level kills."""


CHEAP = 2**25
"""Work up to which a case is suggested for smoke: some hundredths of a second on a CPU core."""


@dataclass(frozen=True)
class Step:
    """A check on a case. check: "chapter.name", or "" where not a check but other people's rules judge the case."""

    check: str
    case: Case

    def __str__(self) -> str:
        return f"{self.check}[{self.case.id}]"

    @property
    def set(self) -> str:
        """The set of matrices.toml that the case is in."""
        chapter, _, name = self.check.partition(".")
        return matrices.set_of(chapter, name)


@dataclass(frozen=True)
class Job:
    """Steps for one process, in order, with those on trial by name.

    every: put each step to all mutants, each time to a fresh one; otherwise a mutant is made once, and is done with the
    job when a step has killed it. start, done: where to resume after the process has died: at this step, without these.
    again: who died there, to be tried once more, alone.
    """

    level: str
    chapter: str
    steps: tuple[Step, ...]
    mutants: tuple[str, ...]
    equivalents: tuple[str, ...] = ()
    every: bool = False
    start: int = 0
    done: frozenset[str] = frozenset()
    again: str = ""

    @property
    def size(self) -> int:
        """About how long it takes, to start long jobs first; 2**22: what is the same in all runs."""
        suspects = len(self.mutants) + len(self.equivalents) + 1
        return suspects * sum(2**22 + work(step.case) for step in self.steps)


def work(case: Case) -> int:
    """Multiply-adds of both products over the whole score matrix, in whole tiles: what a case costs, on any machine."""
    rows, keys = (-(-n // TILE) * TILE for n in (case.q, case.k))
    return case.batch * case.heads * rows * keys * (case.d + case.dv)


def steps_of(level: str, chapter: str, seed: int = 0) -> list[Step]:
    """The steps of a chapter by rising work; those that cost the same in the order of the table."""
    found = [
        Step(check.name, case)
        for check in checks_of(chapter)
        for case in matrices.cases_for(chapter, check.name.partition(".")[2], level, seed)
    ]
    return sorted(found, key=lambda step: work(step.case))


def all_steps(level: str) -> list[Step]:
    return [step for chapter in CHAPTERS for step in steps_of(level, chapter)]


def hunts(level: str, mutants: Iterable[str], equivalents: Iterable[str], *, large: bool = False) -> list[Job]:
    """A job a chapter, of its small cases or of its large ones."""
    jobs = []
    for chapter in CHAPTERS:
        steps = tuple(s for s in steps_of(level, chapter) if (work(s.case) > LARGE) == large)
        if steps:
            jobs.append(Job(level, chapter, steps, tuple(mutants), tuple(equivalents)))
    return jobs


def surveys(mutants: Iterable[str]) -> list[Job]:
    """Jobs that look for all steps that kill a mutant instead of the first: smoke, and what of default is as cheap."""
    jobs = [job for level in ("smoke", "default") for job in hunts(level, mutants, ())]
    cheap = [tuple(s for s in job.steps if job.level == "smoke" or work(s.case) <= CHEAP) for job in jobs]
    return [replace(job, steps=steps, every=True) for job, steps in zip(jobs, cheap, strict=True) if steps]


def comparisons(level: str, mutants: Iterable[str], equivalents: Iterable[str]) -> list[Job]:
    """Jobs over the distinct small cases of a level, each in the chapter that poses it first, for rules to judge.

    None of FP8: the rules compare with a call in float32 or in another implementation, on the same tensors.
    """
    seen: set[str] = set()
    jobs = []
    for job in hunts(level, mutants, equivalents):
        fair = (step.case for step in job.steps if step.case.dtype not in FP8)
        cases = dict.fromkeys(case for case in fair if case.id not in seen)
        seen |= {case.id for case in cases}
        if cases:
            jobs.append(replace(job, steps=tuple(Step("", case) for case in cases)))
    return jobs
