"""Shorten JSON reports of the suite for keeping: full records of failures, one line of each verified case.

    python measurements/condense.py OUT.json REPORT.json [REPORT.json.partial …]

Several reports of one implementation are joined, the later one deciding a case that both have; `.partial` is the
journal that a cut-short run leaves (one JSON record a line).
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

KEPT = ("id", "status", "reason")
ABSOLUTE = re.compile(r"/(?:[\w.+-]+/)+([\w.+-]+/[\w.+-]+\.(?:py|cpp|cu))")
"""Where on some machine a file lay; its folder and name say enough."""


def main(out: str, *sources: str) -> None:
    merged: dict[str, Any] = {}
    records: dict[str, dict[str, Any]] = {}
    for source in sources:
        text = Path(source).read_text(encoding="utf-8")
        if source.endswith(".partial"):
            found = [json.loads(line) for line in text.splitlines()]
            found = [record for record in found if "status" in record and "id" in record]
        else:
            document = json.loads(text)
            found = document.pop("results")
            merged |= document
        records |= {record["id"]: record for record in found}
    merged["totals"] = dict(Counter(record["status"] for record in records.values()))
    merged["results"] = [_short(record) for record in records.values()]
    lines = ",\n".join(json.dumps(record) for record in merged.pop("results"))
    head = json.dumps(merged, indent=1)[:-2]
    text = f'{head},\n "results": [\n{lines}\n]\n}}\n'
    Path(out).write_text(ABSOLUTE.sub(r"\1", text), encoding="utf-8")
    print(out, merged["totals"])


def _short(record: dict[str, Any]) -> dict[str, Any]:
    if record["status"] == "failed":
        return {key: record[key] for key in (*KEPT, "measures", "replay") if key in record}
    short = {key: record[key] for key in KEPT if record.get(key)}
    ratios = [float(measure["ratio"]) for measure in record["measures"]]
    return short | ({"worst": round(max(ratios), 4)} if ratios else {})


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
