"""The suite against the mutants: which check is the first to fail each.

`PYTHONPATH=. python -m tests.mutants.trial [name …]` prints the table.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pytest_flashattn import matrices, trial
from pytest_flashattn.cases import Case
from pytest_flashattn.chapters import CHAPTERS
from pytest_flashattn.checks.registry import checks_of
from pytest_flashattn.implementation import Implementation, load
from pytest_flashattn.verdict import Verdict

from .core import Core
from .mutants import MUTANTS, Mutant


@dataclass(frozen=True)
class Kill:
    """The first verdict that failed a mutant."""

    level: str
    check: str
    case: Case
    verdict: Verdict
    tried: int
    core: Core


def implementation(function: object, convention: str | None = None) -> Implementation:
    """`function` on the CPU, as the suite would load it."""
    return load(function, convention=convention, device="cpu")  # type: ignore[arg-type]


def posed(level: str, chapter: str, seed: int = 0) -> Iterator[tuple[str, Case]]:
    """The (check, case) pairs of a chapter, or of one "chapter.check"."""
    for check in checks_of(chapter.partition(".")[0]):
        if chapter in (check.name, check.chapter):
            for case in matrices.cases_for(check.chapter, check.name.partition(".")[2], level, seed):
                yield check.name, case


def first_kill(mutant: Mutant, levels: tuple[str, ...] = ("smoke", "default"), *, thorough: bool = True) -> Kill | None:
    """The first failure in smoke (its killer first, then all chapters), then in the killer's default cases.

    Each level and chapter has a fresh implementation: no order of cases may be needed to see a fault.
    thorough: look in all chapters, not only where the mutant says it dies.
    """
    chapter = mutant.killer.partition(".")[0]
    smoke = list(dict.fromkeys([mutant.killer, chapter, *(CHAPTERS if thorough else ())]))
    tried = 0
    for level, chapters in zip(levels, (smoke, [mutant.killer, chapter]), strict=False):
        for name in chapters:
            core = mutant.make()
            subject = implementation(core)
            for check, case in posed(level, name):
                tried += 1
                verdict = trial.run_check(check, subject, case)
                if verdict.status == "failed":
                    return Kill(level, check, case, verdict, tried, core)
    return None


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    killed = 0
    chosen = [m for m in MUTANTS.values() if not names or m.name in names]
    print("| mutant | no. | killed by | case | level | cases tried | worst | s |\n|---|---|---|---|---|---|---|---|")
    for mutant in chosen:
        started = time.perf_counter()
        kill = first_kill(mutant)
        seconds = f"{time.perf_counter() - started:.1f}"
        if kill is None:
            why = f"SURVIVES: {mutant.about}"
            print(f"| {mutant.name} | {mutant.number or '–'} | {why} | | | | | {seconds} |", flush=True)
            continue
        killed += 1
        failed = [m for m in kill.verdict.measures if not m.ok]
        worst = f"{failed[0].quantity} {failed[0].rule} {failed[0].ratio:.3g}" if failed else kill.verdict.reason[:60]
        print(
            f"| {mutant.name} | {mutant.number or '–'} | {kill.check} | {kill.case.id} | {kill.level} "
            f"| {kill.tried} | {worst} | {seconds} |",
            flush=True,
        )
    print(f"{killed} of {len(chosen)} killed")


if __name__ == "__main__":
    main(sys.argv[1:])
