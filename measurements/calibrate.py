"""How much of the bounds real implementations use: the evidence behind pytest_flashattn/tolerances.toml.

    python measurements/calibrate.py --impl torch.nn.functional:scaled_dot_product_attention --seeds 20 --out FILE.json

Runs every check on every case of a matrix for each seed and keeps, for each quantity, dtype, grouping and input family,
the largest lambda that the element bound would have needed and the largest noise-floor ratios, with the case; and every
failure. Passing checks only enter the maxima, so a faulty case does not widen the evidence.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from datetime import date
from fnmatch import fnmatch
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from condense import ABSOLUTE

from pytest_flashattn import matrices, trial
from pytest_flashattn.chapters import CHAPTERS
from pytest_flashattn.checks.registry import checks_of
from pytest_flashattn.implementation import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", required=True, help="module:attribute")
    parser.add_argument("--matrix", default="default", choices=matrices.LEVELS)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--limit", type=float, default=float("inf"), help="stop after this many seconds (whole seeds)")
    parser.add_argument("--skip", default="", help="glob over case ids to leave out, which break the context")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()

    implementation = load(arguments.impl)
    totals: Counter[str] = Counter()
    maxima: dict[str, dict[str, object]] = {}
    failures: dict[str, dict[str, object]] = {}
    started = time.monotonic()
    seeds = 0
    for seed in range(arguments.seeds):
        if time.monotonic() - started > arguments.limit:
            break
        for chapter in CHAPTERS:
            for check in checks_of(chapter):
                for case in matrices.cases_for(chapter, check.name.partition(".")[2], arguments.matrix, seed):
                    if fnmatch(case.id, arguments.skip):
                        continue
                    verdict = trial.run_check(check.name, implementation, case)
                    totals[verdict.status] += 1
                    if verdict.status == "failed":
                        entry = failures.setdefault(f"{check.name}[{case.id}]", {"seeds": [], "text": verdict.text()})
                        entry["seeds"].append(seed)  # type: ignore[attr-defined]
                        continue
                    group = "grouped" if case.kv_heads != case.heads else "plain"
                    for m in verdict.measures:
                        value = m.needed if m.rule == "bound" else m.ratio * m.limit
                        if value is None or m.rule == "exact":
                            continue
                        key = f"{m.rule} {m.quantity} {case.dtype} {group} {case.family}"
                        if key not in maxima or value > maxima[key]["value"]:  # type: ignore[operator]
                            maxima[key] = {"value": round(value, 4), "case": case.id, "check": check.name, "seed": seed}
        seeds += 1
        print(f"seed {seed}: {dict(totals)}, {time.monotonic() - started:.0f} s", flush=True)
    device = implementation.device
    report = {
        "command": f"python measurements/calibrate.py --impl {arguments.impl} "
        f"--matrix {arguments.matrix} --seeds {seeds}" + (f" --skip '{arguments.skip}'" if arguments.skip else ""),
        "date": date.today().isoformat(),
        "implementation": implementation.describe(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(time.monotonic() - started, 1),
        "seeds": seeds,
        "totals": dict(totals),
        "maxima": dict(sorted(maxima.items())),
        "failures": failures,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(ABSOLUTE.sub(r"\1", json.dumps(report, indent=1)) + "\n", encoding="utf-8")
    overall: dict[str, float] = {}
    for key, entry in maxima.items():
        rule, quantity, dtype, group, _ = key.split()
        short = f"{rule} {quantity} {dtype} {group}"
        overall[short] = max(overall.get(short, 0.0), entry["value"])  # type: ignore[call-overload]
    for short, value in sorted(overall.items()):
        print(f"{short:40s} {value:.3f}")
    print(f"{len(failures)} checks failed in some seed; written to {arguments.out}")


if __name__ == "__main__":
    main()
