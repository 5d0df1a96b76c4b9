"""The kill matrix: sends all on trial through the jobs of each level, and one document says who fell where."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..cases import Case
from ..chapters import CHAPTERS
from ..features import FP8
from ..report.json_report import versions
from . import crew, plan, rules
from .cast import HONEST, Cast, Suspect
from .plan import Job
from .worker import Alone, At, Cost, Event, Kill

SCHEMA = 1
Document = dict[str, Any]
Progress = Callable[[str], None]


def run(
    module: str,
    who: Cast,
    mutants: Sequence[str],
    equivalents: Sequence[str],
    levels: Sequence[str],
    say: Progress,
) -> Document:
    """The document of a run: the matrix of every level.

    who: the cast of `module`; mutants and equivalents: the names of those on trial. say: gets lines of progress, and
    "" at the end of each part. Raises CrewError where no process works.
    """
    started = _now()
    books = {level: Book(level, mutants) for level in levels}
    _perform(module, books, [job for level in levels for job in plan.hunts(level, mutants, equivalents)], say)
    for level, book in books.items():
        if left := book.survivors():
            _perform(module, {level: book}, plan.hunts(level, left, (), large=True), say)
    return {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": {"cpu": platform.machine(), "processes": crew.size()},
        **_spent(started),
        "mutants": {n: _about(who.mutants[n], books.values()) for n in mutants},
        "equivalents": {n: who.equivalents[n].about for n in equivalents},
        "absent": absent(who),
        "levels": {level: book.entry() for level, book in books.items()},
    }


def _about(mutant: Suspect, books: Iterable[Book]) -> Document:
    """What it is, and the kill with the least work: first of those that need no other case before them."""
    kills = [{"level": book.level, **kill} for book in books for kill in book.kills(mutant.name).values()]
    cheapest = min(kills, key=lambda kill: (kill.get("alone") is False, kill["work"]), default=None)
    return {"number": mutant.number, "about": mutant.about, "cheapest": cheapest}


def compare(module: str, who: Cast, document: Document, say: Progress) -> Document:
    """What the rules of other projects catch of the mutants of a run, on its small cases.

    Those whom a level kills by nothing but large cases get the cases that killed them as well. Those whom nothing but
    FP8 shows are left out, as FP8 is.
    """
    started = _now()
    levels = document["levels"]
    mutants = [name for name in document["mutants"] if not _in_fp8_alone(name, levels.values())]
    books = {level: Book(level, mutants) for level in levels}
    jobs = [job for level in levels for job in plan.comparisons(level, mutants, who.equivalents)]
    jobs += [job for level, entry in levels.items() for job in _only_by_large(level, entry)]
    _perform(module, books, jobs, say)
    return {
        **_spent(started),
        "about": {name: {"about": rule.about, "source": rule.source} for name, rule in rules.RULES.items()},
        "mutants": mutants,
        "levels": {level: {name: book.caught(name) for name in rules.RULES} for level, book in books.items()},
    }


def _in_fp8_alone(name: str, levels: Iterable[Document]) -> bool:
    cases = [kill["case"] for entry in levels for kill in entry["kills"].get(name, {}).values()]
    return bool(cases) and all(Case.parse(case).dtype in FP8 for case in cases)


def _only_by_large(level: str, entry: Document) -> Iterator[Job]:
    for name, kills in entry["kills"].items():
        if min(kill["work"] for kill in kills.values()) > plan.LARGE:
            for chapter, kill in kills.items():
                yield Job(level, chapter, (plan.Step("", Case.parse(kill["case"])),), (name,), (HONEST,))


def survey(module: str, mutants: Sequence[str], say: Progress) -> dict[plan.Step, set[str]]:
    """Step to the mutants that it kills by itself, over all steps of smoke and the cheap ones of default."""
    kills: dict[plan.Step, set[str]] = {}

    def note(job: Job, event: Event) -> None:
        if isinstance(event, Kill) and event.name in job.mutants:
            kills.setdefault(job.steps[event.step], set()).add(event.name)

    jobs = plan.surveys(mutants)
    crew.perform(jobs, module, _counted(jobs, say, note))
    say("")
    return kills


def text(document: Document) -> str:
    """The document as JSON, with what holds no table or list on one line."""
    return _json(document, "") + "\n"


def _json(value: Any, indent: str) -> str:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(x, dict | list) for x in inside):
        return json.dumps(value, ensure_ascii=False)
    deeper = indent + " "
    if isinstance(value, dict):
        items = [f"{deeper}{json.dumps(key)}: {_json(x, deeper)}" for key, x in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _json(x, deeper) for x in value) + f"\n{indent}]"


def absent(who: Cast) -> dict[str, list[str]]:
    """By status ("later: varlen", "gpu"), the names in the catalogue of mutants that are not here."""
    found: dict[str, list[str]] = {}
    for name, status in who.catalogue.values():
        if status != "here":
            found.setdefault(status, []).append(name)
    return dict(sorted(found.items()))


class Book:
    """What happened at one level."""

    def __init__(self, level: str, mutants: Sequence[str]) -> None:
        self.level, self.mutants = level, list(mutants)
        self._seconds: dict[str, dict[plan.Step, float]] = {chapter: {} for chapter in CHAPTERS}
        self._kills: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in self.mutants}
        self._caught: dict[str, dict[str, tuple[int, str]]] = {name: {} for name in rules.RULES}
        # By rule, "" for our own: (name, step) to the reason. A step is repeated when the process has died in it.
        self._alarms: dict[str, dict[tuple[str, str], str]] = {"": {}, **{name: {} for name in rules.RULES}}

    def note(self, job: Job, event: Event) -> None:
        match event:
            case Cost(number, seconds):
                self._seconds[job.chapter][job.steps[number]] = seconds
            case Kill(name, number, reason, rule) if name not in self._kills:
                self._alarms[rule][name, str(job.steps[number])] = reason
            case Kill(name, number, reason, ""):
                step = job.steps[number]
                entry = {"check": step.check, "case": step.case.id, "work": plan.work(step.case), "reason": reason}
                self._kills[name].setdefault(job.chapter, entry)
            case Kill(name, number, _, rule):
                case = job.steps[number].case
                found = plan.work(case), case.id
                self._caught[rule][name] = min(found, self._caught[rule].get(name, found))
            case Alone(name, _, killed):
                self._kills[name][job.chapter]["alone"] = killed

    def survivors(self) -> list[str]:
        return [name for name in self.mutants if not self._kills[name]]

    def kills(self, name: str) -> dict[str, dict[str, Any]]:
        """By chapter, the step that killed a mutant."""
        return {chapter: self._kills[name][chapter] for chapter in CHAPTERS if chapter in self._kills[name]}

    def caught(self, rule: str) -> Document:
        """The mutants that a rule catches, each with its cheapest case, and how often it refuses who is right."""
        found, refused = self._caught[rule], self._alarms[rule]
        return {
            "caught": {n: found[n][1] for n in self.mutants if n in found},
            "cases": sum(map(len, self._seconds.values())),
            "cases_that_refuse_equivalents": len({step for _, step in refused}),
            "equivalents_refused": dict(Counter(name for name, _ in refused)),
        }

    def entry(self) -> Document:
        """The level in the document."""
        chapters = {}
        for chapter in CHAPTERS:
            tried = self._seconds[chapter]
            killed = [n for n in self.mutants if chapter in self._kills[n]]
            chapters[chapter] = {
                "steps": len(plan.steps_of(self.level, chapter)),
                "tried": len(tried),
                "seconds": round(sum(tried.values()), 2),
                "killed": len(killed),
                "alone": [n for n in killed if len(self._kills[n]) == 1],
            }
        return {
            "killed": len(self.mutants) - len(self.survivors()),
            "survivors": self.survivors(),
            "chapters": chapters,
            "kills": {n: kills for n in self.mutants if (kills := self.kills(n))},
            "false_alarms": [{"name": n, "step": s, "reason": why} for (n, s), why in self._alarms[""].items()],
        }


def _now() -> tuple[float, float]:
    """Seconds on the wall, and CPU seconds of all processes that have ended."""
    spent = os.times()
    return time.monotonic(), spent.children_user + spent.children_system


def _spent(start: tuple[float, float]) -> dict[str, float]:
    wall, cpu = (now - then for now, then in zip(_now(), start, strict=True))
    return {"seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}


def _perform(module: str, books: dict[str, Book], jobs: list[Job], say: Progress) -> None:
    crew.perform(jobs, module, _counted(jobs, say, lambda job, event: books[job.level].note(job, event)))
    say("")


def _counted(jobs: list[Job], say: Progress, note: crew.Listener) -> crew.Listener:
    """`note`, and a line of progress at every run."""
    total, started = sum(len(job.steps) for job in jobs), time.monotonic()
    count: Counter[type] = Counter()

    def listener(job: Job, event: Event) -> None:
        note(job, event)
        count[type(event)] += 1
        if isinstance(event, At):
            seconds = time.monotonic() - started
            where = f"{job.level} {job.chapter}, {event.name}"
            say(f"case {count[Cost]} of {total}, {count[At]} runs, {seconds:.0f} s: {where}")

    return listener
