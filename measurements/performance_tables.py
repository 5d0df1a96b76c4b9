"""The tables of docs/performance.md, from the file that measurements/performance.py wrote."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def tables(path: Path) -> dict[str, list[str]]:
    """The lines of each table by marker."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return {
        "performance-side-by-side": side_by_side(report["table"]),
        "performance-believed": believed(report),
    }


def side_by_side(table: dict[str, Any]) -> list[str]:
    """TFLOP/s: a row a case and direction, a column an implementation; empty where it was not measured."""
    specs = table["implementations"]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in table["rows"]:
        speed = f"{row['tflops']:.0f}" if "tflops" in row else ""
        cells.setdefault((row["check"], row["case"]), {})[row["implementation"]] = speed
    names = [f"`{spec.rpartition(':')[2]}`" for spec in specs]
    head = [f"| direction | case | {' | '.join(names)} |", f"|---|---|{'--:|' * len(names)}"]
    body = [[check, f"`{case}`", *(of.get(spec, "") for spec in specs)] for (check, case), of in cells.items()]
    return [*head, *(f"| {' | '.join(row)} |" for row in body)]


def believed(report: dict[str, Any]) -> list[str]:
    """What the lane says of itself: false and missed regressions, spread between runs, seconds of a run."""
    rows = []
    if found := report.get("compare"):
        rows.append(
            [f"{found['comparisons']} times itself, limit {found['limit']}", _counted(found["same"]["verdicts"])]
        )
        slower = f"{found['comparisons']} times {found['slowdown']:.0%} slower"
        rows.append([slower, _counted(found["slower"]["verdicts"])])
    tables = [  # measured the implementation of the lane once more
        {"implementation": spec, "rows": [row for row in report["table"]["rows"] if row["implementation"] == spec]}
        for spec in dict.fromkeys(run["implementation"] for run in report["lane"])
    ]
    for spec, of in spread([*report["lane"], *tables]).items():
        said = f"spread of the ratio over {of['runs']} runs, `{spec}`, {of['points']} points"
        rows.append([said, f"at most {of['worst']:.1%}"])
    for run in report["lane"]:
        rows.append([f"{len(run['rows'])} measurements of `{run['implementation']}`", f"{run['seconds']:.0f} s"])
    return ["| what | found |", "|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def _counted(verdicts: list[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).most_common())


def spread(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By implementation: the largest ratio of any run divided by the smallest, minus 1, worst and median point."""
    found: dict[str, Any] = {}
    for spec in {run["implementation"] for run in runs}:
        own = [{(r["check"], r["case"]): r["ratio"][0] for r in run["rows"] if "ratio" in r} for run in runs
               if run["implementation"] == spec]  # fmt: skip
        points = set(own[0]).intersection(*own)
        spreads = sorted(max(run[at] for run in own) / min(run[at] for run in own) - 1 for at in points)
        if spreads:
            median = spreads[len(spreads) // 2]
            found[spec] = {"runs": len(own), "points": len(spreads), "worst": spreads[-1], "median": median}
    return found
