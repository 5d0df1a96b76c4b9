"""The table of docs/accuracy.md: the largest lambda and noise that real implementations needed, from calibration files.

python measurements/evidence.py measurements/*/calibration-*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

QUANTITIES = ("o", "lse", "dq", "dk", "dv")


def table(paths: list[Path]) -> list[str]:
    """The lines of the table, a row for each implementation, rule and width of dtype."""
    lines = ["| implementation, device, seeds | rule | " + " | ".join(QUANTITIES) + " |"]
    lines.append("|---|---|" + "---|" * len(QUANTITIES))
    maxima: dict[str, dict[str, float]] = {}
    for path in paths:
        report = json.loads(path.read_text(encoding="utf-8"))
        name = report["implementation"].partition(",")[0].rpartition(":")[2]
        # Several files of one implementation on one device have different cases of the matrix.
        found = maxima.setdefault(f"{name}, {report['device']}, {report['seeds']}", {})
        for key, entry in report["maxima"].items():
            found[key] = max(found.get(key, 0.0), entry["value"])
    for label, values in maxima.items():
        for rule, title in (("bound", "λ"), ("noise", "noise"), ("noise-block", "noise, block")):
            for dtypes in (("bf16", "fp16"), ("fp32",)):
                largest: dict[str, float] = {}
                for key, value in values.items():
                    kind, quantity, dtype, _, family = key.split()
                    # Underflow in fp16 and equal scores have rows of their own in tolerances.toml.
                    special = family in ("tiny", "constant") and rule != "bound"
                    if kind == rule and dtype in dtypes and not special:
                        largest[quantity] = max(largest.get(quantity, 0.0), value)
                if largest:
                    cells = " | ".join(f"{largest[q]:.2f}" if q in largest else "–" for q in QUANTITIES)
                    lines.append(f"| {label} | {title}, {'/'.join(dtypes)} | {cells} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table([Path(path) for path in sys.argv[1:]])))
