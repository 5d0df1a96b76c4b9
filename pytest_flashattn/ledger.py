"""The controller's book: every record of the run, what is missing, and whether the run may end with exit status 0."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from .collection import BY_NAME_ONLY
from .verdict import STATUSES

if TYPE_CHECKING:
    from .state import State

Record = dict[str, Any]


@dataclass(frozen=True)
class Closing:
    """The last line of a run. ok: nothing stands against exit status 0."""

    text: str
    ok: bool


@dataclass
class Ledger:
    """records: the last word on each test, by node id. own_passed: own tests that use us but ran no check."""

    records: dict[str, Record] = field(default_factory=dict)
    own_passed: int = 0
    covered: set[str] = field(default_factory=set)
    device: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def enter(self, report: pytest.TestReport) -> Record | None:
        """Book a report that carries a record; returns it when there is one to keep."""
        record: Record = report.flashattn
        self.device = self.device or record["device"]
        if record["status"] in ("passed", "verified"):
            self.covered.update(record["covers"])
        if record["status"] == "passed":
            self.own_passed += 1
            return None
        earlier = self.records.get(record["id"])
        if earlier is not None and earlier["status"] == "failed":
            return None  # the first failure of a test is its cause; a failing teardown only follows from it
        self.records[record["id"]] = record
        return record

    def totals(self, implementation: str | None = None) -> dict[str, int]:
        count = Counter(r["status"] for r in self.of(implementation))
        return {status: count[status] for status in STATUSES}

    def of(self, implementation: str | None) -> list[Record]:
        return [r for r in self.records.values() if implementation in (None, r["implementation"])]

    @property
    def touched(self) -> bool:
        """Whether the run had anything to do with us: otherwise it is left alone entirely."""
        return bool(self.records or self.own_passed or self.problems)

    def audit(self, run: State, *, finished: bool) -> None:
        """Note what no single test can: requirements nothing covered, and expectations that match nothing."""
        if not finished:
            return
        for word in run.settings.require:
            if word not in self.covered:
                self.problems.append(f"required {word}, but nothing that covers it was verified")
        if not _narrowed(run.config) and run.selection.whole:
            self.problems += [
                f"expectation {entry.id!r} matches no test: remove it, or correct it ({entry.reason})"
                for entry in _stale(self, run)
            ]

    def closing(self, run: State, *, finished: bool) -> list[Closing]:
        """The closing line, one an implementation."""
        specs = run.settings.impl
        if len(specs) < 2:
            return [self._closing(None, bool(specs), finished, run.others_passed)]
        names = {spec: name for name, spec in run.settings.names().items()}
        lines = [(names[spec], self._closing(spec, True, finished, 0)) for spec in specs if self.of(spec)]
        named = [Closing(f"{name}: {line.text}", line.ok) for name, line in lines]
        return named or [self._closing(None, True, finished, 0)]

    def _closing(self, spec: str | None, named: bool, finished: bool, others_passed: int) -> Closing:
        total = self.totals(spec)
        failed = total["failed"]
        counts = ", ".join(self._counts(spec, total, named))
        if failed or self.problems:
            why = f"; {'; '.join(self.problems)}" if self.problems else ""
            return Closing(f"not conformant: {counts}{why}" if named else f"flashattn: {counts}{why}", False)
        if not finished:
            return Closing(f"not judged: the run was cut short after {counts}", False)
        if total["verified"]:
            return Closing(f"conformant: {counts}" if named else f"flashattn: {counts}", True)
        if self.own_passed:
            return Closing(f"flashattn: {counts}", True)
        if not self.records:
            return Closing("not judged: nothing was verified: no test ran", False)
        # A laptop that runs a whole repository has passed its other tests: only a run of nothing else is red.
        return Closing(f"not judged: nothing was verified: {self._missing(spec)}", not named and others_passed > 0)

    def _counts(self, spec: str | None, total: dict[str, int], named: bool) -> list[str]:
        parts = [f"{total['failed']} failed"] if total["failed"] else []
        parts += [f"{total['verified']} verified"] if named or total["verified"] else []
        parts += [f"{self.own_passed} of your own tests passed"] if self.own_passed else []
        for status in ("declared", "unmet"):
            what = self._what(spec, status)
            parts.append(f"{total[status]} {status}" + (f" ({what})" if what else ""))
        return parts + ([f"{total['excused']} excused"] if total["excused"] else [])

    def _what(self, spec: str | None, status: str) -> str:
        """What was lacking, in a few words: "window, dtype fp32"."""
        words: Counter[str] = Counter()
        for record in self.of(spec):
            if record["status"] == status:
                reason = record["reason"]
                words.update(reason[6:].split(", ") if reason.startswith("lacks ") else [_brief(reason)])
        names = [word for word, _ in words.most_common(4)]
        return ", ".join(names) + (f" and {len(words) - 4} more" if len(words) > 4 else "")

    def _missing(self, spec: str | None) -> str:
        reasons = Counter((r["reason"], r["status"]) for r in self.of(spec))
        parts = [f"{reason} ({count} {status})" for (reason, status), count in reasons.most_common(3)]
        return "; ".join(parts) + ("; …" if len(reasons) > 3 else "")


def _brief(reason: str) -> str:
    match = re.match(r"(sm\d+|fp8) needs|(undecided|not measured|too [^:]+):", reason)
    return match[1] or match[2] if match else reason if len(reason) <= 40 else reason[:39] + "…"


def _narrowed(config: pytest.Config) -> bool:
    # Read off the options, since a controller of xdist workers never sees what they deselect.
    names = ("keyword", "markexpr", "deselect", "lf", "stepwise")
    return any(config.getoption(name, None) for name in names)


def _stale(ledger: Ledger, run: State) -> list[Any]:
    """The entries that match no test of this run, nor any case of another matrix: none of them holds all the others."""
    from .collection import ROOT, catalogue
    from .matrices import LEVELS

    where = (ledger.device[0], ledger.device[1]) if ledger.device else ("cpu", "CPU")
    names = [*run.settings.impl, *run.settings.names()]
    given = run.config.args_source is pytest.Config.ArgsSource.ARGS
    left = [
        entry
        for entry in run.expectations
        if not entry.expired
        and entry.applies_to(where, names)
        and not any(entry.matches_id(nodeid) for nodeid in ledger.records)
        # With paths given, the user's own tests are not all there: say nothing of entries about them.
        and not (given and "::" in entry.id and not entry.id.startswith(ROOT))
        # What is drawn depends on the seed, and what is timed was perhaps not asked for: neither need match.
        and not any(entry.id.startswith(f"{ROOT}/{chapter}") for chapter in BY_NAME_ONLY)
    ]
    known = [nodeid for level in LEVELS for nodeid in catalogue(level, run.settings.seed)] if left else []
    return [entry for entry in left if not any(entry.matches_id(nodeid) for nodeid in known)]
