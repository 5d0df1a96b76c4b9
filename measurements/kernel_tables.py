"""The tables of docs/kernels.md, from a file that measurements/kernels.py wrote.

python measurements/kernel_tables.py measurements/h200/kernels.json
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any


def speed(report: dict[str, Any]) -> list[str]:
    """TFLOP/s of this kernel by length, and the geometric mean of the ratio to each peer, a row for each setting."""
    rows = report["speed"]
    lengths = sorted({row["n"] for row in rows})
    lines = ["| direction, D | " + " | ".join(f"N {n}" for n in lengths) + " | × FA2 | × cuDNN |"]
    lines.append("|---|" + "---|" * (len(lengths) + 2))
    settings = dict.fromkeys((row["direction"], row["d"], row["causal"]) for row in rows)
    for direction, d, causal in sorted(settings, key=lambda s: (s[0] != "forward", s[1], s[2])):
        found = [r for r in rows if (r["direction"], r["d"], r["causal"]) == (direction, d, causal)]
        by_length = {row["n"]: row["tflops"]["flash_attention"] for row in found}
        cells = [f"{by_length[n]:.0f}" for n in lengths]
        cells += [f"{_mean(row[f'x_{peer}'] for row in found):.2f}" for peer in ("fa2", "cudnn")]
        lines.append(f"| {direction}, {d}{', causal' if causal else ''} | " + " | ".join(cells) + " |")
    for direction in ("forward", "backward"):
        found = [row for row in rows if row["direction"] == direction]
        means = [f"**{_mean(row[f'x_{peer}'] for row in found):.2f}**" for peer in ("fa2", "cudnn")]
        lines.append(f"| {direction}, all | " + " | ".join([""] * len(lengths) + means) + " |")
    return lines


def memory(report: dict[str, Any]) -> list[str]:
    """Peak bytes of naive and flash attention by length."""
    lines = ["| N | naive, MiB | flash_attention, MiB | ratio |", "|---|---|---|---|"]
    for row in report["memory"]:
        naive, flash = row["naive"] / 2**20, row["flash_attention"] / 2**20
        lines.append(f"| {row['n']} | {naive:,.0f} | {flash:,.0f} | {row['ratio']:.0f} |")
    return lines


def _mean(ratios: Any) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join([*speed(report), "", *memory(report)]))
