"""`pytest_flashattn.run()`: the verdicts of the suite without pytest, for notebooks and scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import matrices, trial
from .cases import Case
from .chapters import CHAPTERS
from .checks.registry import Check, checks_of, find
from .implementation import Implementation, load
from .support import Support
from .verdict import STATUSES, Verdict


@dataclass(frozen=True)
class Result:
    """One verdict: which check, on which case."""

    check: str
    case: Case
    verdict: Verdict

    def __str__(self) -> str:
        text = self.verdict.text() or self.verdict.reason
        return f"{self.verdict.status}: {self.check}[{self.case.id}]" + (f"\n{text}" if text else "")


@dataclass(frozen=True)
class Report:
    """What `run` found. `conformant`: something was verified and nothing failed. Printing it gives the table."""

    implementation: str
    results: tuple[Result, ...]

    @property
    def totals(self) -> dict[str, int]:
        count = Counter(r.verdict.status for r in self.results)
        return {status: count[status] for status in STATUSES}

    @property
    def failures(self) -> list[Result]:
        return [r for r in self.results if r.verdict.status == "failed"]

    @property
    def conformant(self) -> bool:
        return self.totals["verified"] > 0 and not self.failures

    def __str__(self) -> str:
        from .report.terminal import table

        records = [
            {"chapter": r.check.partition(".")[0], "case": r.case.id, **r.verdict.to_dict()} for r in self.results
        ]
        counts = ", ".join(f"{count} {status}" for status, count in self.totals.items() if count)
        verdict = "conformant" if self.conformant else "not conformant" if self.failures else "not judged"
        return "\n".join([self.implementation, table(records, 120), *map(str, self.failures), f"{verdict}: {counts}"])


def run(
    implementation: str | Callable[..., Any] | Implementation,
    *,
    matrix: str = "smoke",
    chapters: Iterable[str] = tuple(CHAPTERS),
    cases: Iterable[str | Case] | None = None,
    seed: int = 0,
    convention: str | None = None,
    support: str | Support | None = None,
    device: str = "auto",
    progress: Callable[[Result], object] | None = None,
) -> Report:
    """Put `implementation` (a function of the contract, or "module:attribute") on trial; the same verdicts as pytest's.

    matrix: "smoke", "default" or "full". chapters: names of chapters ("forward") or single checks
    ("causal.future_keys_have_no_effect"). cases: ids or `Case`s to use instead of the matrix. progress: called with
    each result as it comes.
    Raises UnknownImplementation, KeyError or ValueError, one sentence each, for an implementation, check or case that
    does not exist; never for what the implementation does.
    """
    if not isinstance(implementation, Implementation):
        implementation = load(implementation, convention=convention, support=support, device=device)
    given = None if cases is None else [Case.parse(c, seed=seed) if isinstance(c, str) else c for c in cases]
    results = []
    for check in _checks(chapters):
        name = check.name.partition(".")[2]
        for case in given or matrices.cases_for(check.chapter, name, matrix, seed):
            result = Result(check.name, case, trial.run_check(check.name, implementation, case))
            results.append(result)
            if progress is not None:
                progress(result)
    return Report(implementation.describe(), tuple(results))


def _checks(names: Iterable[str]) -> list[Check]:
    found: list[Check] = []
    for name in names:
        if "." not in name and name not in CHAPTERS:
            raise KeyError(f"no chapter {name!r}; known: {', '.join(CHAPTERS)}")
        found += [find(name)] if "." in name else checks_of(name)
    return found
