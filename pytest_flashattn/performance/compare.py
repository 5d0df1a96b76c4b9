"""Two runs of the lane compared: did anything become slower? Torch-free.

First by the ratio to the baseline that each run measured in turns with the implementation, since a machine that is
slower today slows both; by the time itself where a run has no baseline, or another one. Either way between intervals:
"slower" only when the whole interval of the change lies beyond the limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine
from .interval import Interval

VERDICTS: dict[str, str] = {
    "slower": "slower than the limit allows",
    "gone": "measured before and not now: it failed, or was left out",
    "undecided": "the interval holds the limit: lengthen both runs (--benchmark-max-time)",
    "same": "within the limit",
    "faster": "faster by more than the limit",
    "new": "not measured before",
}
"""What a comparison says of a point, from the worst to the best."""
STATUS = {"slower": 1, "gone": 1, "undecided": 3}
"""Exit status; 0 for the others. 2 is bad input: files that cannot be compared."""


class Incomparable(ValueError):
    """A file that is none of the lane's, or two that must not be compared; one sentence."""


@dataclass(frozen=True)
class Point:
    """What a run measured at one node id. ratio: to `reference`, if it had one; seconds: of the call itself."""

    id: str
    seconds: Interval
    tflops: float
    ratio: Interval | None
    reference: str | None
    reference_seconds: float


@dataclass(frozen=True)
class Run:
    """One file. machine: pytest-benchmark's machine_info, the lane's section of it. clocks: device, wall."""

    machine: dict[str, Any]
    clocks: frozenset[str]
    points: dict[str, Point]


@dataclass(frozen=True)
class Row:
    """A point in both runs. change: new divided by old; by: "ratio" or "time", whichever decides; verdict: one of
    VERDICTS. time: the change of the time itself; baseline: that of the baseline's. note: what a reader should know.
    """

    id: str
    verdict: str
    old: Point | None = None
    new: Point | None = None
    change: Interval | None = None
    by: str = ""
    time: float | None = None
    baseline: float | None = None
    note: str = ""


def read(path: Path) -> Run:
    """The run in a file of --benchmark-json or of pytest-benchmark's storage. Raises Incomparable."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Incomparable(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    except json.JSONDecodeError as error:
        raise Incomparable(f"{path} is no JSON: {error}") from None
    try:
        own = document["machine_info"][machine.SECTION]
        timed = [b for b in document["benchmarks"] if "clock" in b["extra_info"]]
        points = {b["fullname"]: _point(b["fullname"], b["extra_info"]) for b in timed}
    except (KeyError, TypeError, ValueError) as error:
        raise Incomparable(
            f"{path} is no measurement of chapter performance (no {error}): write it with "
            "pytest flashattn-suite/performance --benchmark-json=PATH"
        ) from None
    if not timed:
        raise Incomparable(f"{path} holds no measurement of chapter performance")
    return Run(own, frozenset(b["extra_info"]["clock"] for b in timed), points)


def _point(name: str, info: dict[str, Any]) -> Point:
    ratio = info.get("ratio")
    return Point(
        name,
        Interval(*map(float, info["seconds"])),
        float(info["tflops"]),
        None if ratio is None else Interval(*map(float, ratio)),
        info.get("reference"),
        float(info.get("reference_seconds", 0)),
    )


def reasons_against(old: Run, new: Run) -> list[str]:
    """Why the two must not be compared, each as a clause; empty when they may."""
    found = machine.differences(old.machine, new.machine)
    if old.clocks != new.clocks:
        found.append(f"clock {', '.join(sorted(old.clocks))} against {', '.join(sorted(new.clocks))}")
    return found


def compare(old: Run, new: Run, limit: float) -> list[Row]:
    """A row for every point of either run, in the order of the old; limit: the largest change, 0.05 for 5 %."""
    rows = []
    for name, before in old.points.items():
        after = new.points.get(name)
        rows.append(Row(name, "gone", old=before) if after is None else _row(before, after, limit))
    return rows + [Row(name, "new", new=point) for name, point in new.points.items() if name not in old.points]


def _row(old: Point, new: Point, limit: float) -> Row:
    time = new.seconds.over(old.seconds)
    by, change, note, moved = "time", time, "", None
    if old.ratio is not None and new.ratio is not None and old.reference == new.reference:
        by, change = "ratio", new.ratio.over(old.ratio)
        moved = new.reference_seconds / old.reference_seconds
        if abs(moved - 1) > limit:
            note = "the baseline itself changed by more than the limit: the machine's state, or the baseline"
    elif old.reference or new.reference:
        note = f"baselines differ ({old.reference or 'none'}, {new.reference or 'none'}): times compared"
    verdict = {"verified": "same", "failed": "slower"}.get(change.at_most(1 + limit), "undecided")
    if change.high < 1 - limit:
        verdict = "faster"
    return Row(old.id, verdict, old, new, change, by, time.value, moved, note)


def status(rows: Iterable[Row]) -> int:
    """The exit status: 1 if anything is slower or gone, 3 if nothing is but something is undecided, else 0."""
    found = {STATUS.get(row.verdict, 0) for row in rows}
    return 1 if 1 in found else max(found, default=0)


def markdown(rows: list[Row], old: Run, new: Run, limit: float) -> str:
    """The comparison as Markdown: a headline, a table with the worst first, notes."""
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    counted = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number) or "nothing measured"
    where = f"limit {100 * limit:g} %, {new.machine.get('device')}"
    head = f"**Attention performance: {counted}** ({where})"
    columns = [
        "point",
        "old TFLOP/s",
        "new TFLOP/s",
        "time",
        "baseline",
        "decides",
        "change",
        "99 % interval",
        "verdict",
    ]
    table = [f"| {' | '.join(columns)} |", "|---|--:|--:|--:|--:|---|--:|---|---|"]
    order = list(VERDICTS)
    notes: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: order.index(row.verdict)):
        table.append(f"| {' | '.join(_cells(row))} |")
        if row.note:
            notes.setdefault(row.note, []).append(_short(row.id))
    said = [f"{verdict}: {VERDICTS[verdict]}" for verdict in VERDICTS if count[verdict] and verdict != "same"]
    said += [f"{note} ({', '.join(ids[:3])}{', …' if len(ids) > 3 else ''})" for note, ids in notes.items()]
    return "\n".join([head, "", *table, *(f"\n{line}" for line in said)])


def _cells(row: Row) -> list[str]:
    speeds = ["" if point is None else f"{point.tflops:.4g}" for point in (row.old, row.new)]
    if row.change is None:
        return [_short(row.id), *speeds, "", "", "", "", "", row.verdict]
    changes = [_percent(x) for x in (row.time, row.baseline)]
    interval = f"{_percent(row.change.low)} … {_percent(row.change.high)}"
    return [_short(row.id), *speeds, *changes, row.by, _percent(row.change.value), interval, row.verdict]


def _percent(change: float | None) -> str:
    return "" if change is None else f"{change - 1:+.1%}"


def _short(name: str) -> str:
    return name.partition("::test_")[2] or name
