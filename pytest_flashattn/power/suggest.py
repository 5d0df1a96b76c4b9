"""The smallest matrix that kills the most: a greedy cover of the mutants by cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cases import Case
from . import plan


@dataclass(frozen=True)
class Choice:
    """A case for a set of matrices.toml. new: the mutants that no earlier choice kills."""

    set: str
    case: Case
    new: tuple[str, ...]


def by_entry(kills: Mapping[plan.Step, set[str]]) -> dict[tuple[str, Case], set[str]]:
    """(set of matrices.toml, case) to the mutants killed there: a case of a set is posed to all checks of the set."""
    found: dict[tuple[str, Case], set[str]] = {}
    for step, names in kills.items():
        found.setdefault((step.set, step.case), set()).update(names)
    return found


def cover(kills: Mapping[plan.Step, set[str]]) -> list[Choice]:
    """Cases until all mutants that can be killed are: each kills the most that are left, at the least work.

    Greedy: at most ln(mutants) + 1 times as many cases as the fewest possible (Chvátal, 1979).
    """
    entries = by_entry(kills)
    left = set().union(*entries.values())
    choices = []
    while left:
        best = min(entries, key=lambda entry: (-len(entries[entry] & left), plan.work(entry[1]), entry[0], entry[1].id))
        choices.append(Choice(*best, tuple(sorted(entries[best] & left))))
        left -= entries[best]
    return choices


def document(kills: Mapping[plan.Step, set[str]], mutants: Sequence[str], smoke: Iterable[plan.Step]) -> dict[str, Any]:
    """The cover, what today's smoke kills, and who is killed by no case alone, for JSON."""
    today = set(smoke)
    killed, ever = (set().union(*(kills.get(step, set()) for step in steps)) for steps in (today, kills))
    return {
        "mutants": len(mutants),
        "cover": [{"set": c.set, "case": c.case.id, "new": list(c.new)} for c in cover(kills)],
        "smoke": {
            "cases": len({(step.set, step.case) for step in today}),
            "killed": len(killed),
            "missed": [name for name in mutants if name in ever - killed],
        },
        "never": [name for name in mutants if name not in ever],
    }
