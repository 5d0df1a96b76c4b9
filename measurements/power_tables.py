"""The tables of docs/power.md, from the files that `python -m pytest_flashattn power` and
`python -m tests.mutants.seeds` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_flashattn.power import tables as shown


def tables(folder: Path) -> dict[str, list[str]]:
    """The lines of each table by marker; folder: measurements/cpu."""
    run, cover, seeds = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("power", "power-smoke", "equivalents")
    )
    found = {
        "levels": shown.levels(run),
        "spent": shown.spent(run),
        "chapters": shown.chapters(run, list(run["levels"])[-1]),
        "rules": shown.rules(run),
        "rules-about": shown.about_rules(run),
        "catalogue": shown.catalogue(run),
        "survivors": shown.survivors(run),
        "matrix": shown.matrix(run),
        "cover": shown.cover(cover),
        "smoke": shown.smoke(cover),
        "equivalents": false_alarms(seeds),
    }
    return {f"power-{name}": shown.markdown(table) for name, table in found.items()}


def false_alarms(seeds: dict[str, Any]) -> shown.Table:
    """How many right implementations met how many seeds, and what came of it."""
    entries = list(seeds["equivalents"].values())
    verified, failed = sum(e["verified"] for e in entries), sum(len(e["failed"]) for e in entries)
    head = ["equivalents", "seeds each, at least", "cases of the pool", "verified", "false alarms"]
    return head, [[len(entries), min(len(e["seeds"]) for e in entries), seeds["pool"], f"{verified:,}", failed]]
