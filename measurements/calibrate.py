"""How much of the bounds real implementations use: the evidence behind pytest_flashattn/tolerances.toml.

    python measurements/calibrate.py --impl torch.nn.functional:scaled_dot_product_attention --seeds 20 --out FILE.json

Runs every check on every case of a matrix for each seed and keeps, for each quantity, dtype, grouping and input family,
the largest lambda that the element bound would have needed and the largest noise-floor ratios, with the case; and every
failure. Passing checks only enter the maxima, so a faulty case does not widen the evidence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from condense import ABSOLUTE

from pytest_flashattn import matrices, trial
from pytest_flashattn.cases import Case
from pytest_flashattn.chapters import CHAPTERS
from pytest_flashattn.checks.registry import checks_of
from pytest_flashattn.implementation import Implementation, load


@dataclass
class Findings:
    """totals: verdicts by status. maxima: by rule, quantity, dtype, grouping, family. failures: by check and case."""

    totals: Counter[str] = field(default_factory=Counter)
    maxima: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, other: Findings) -> None:
        self.totals += other.totals
        for key, entry in other.maxima.items():
            if key not in self.maxima or entry["value"] > self.maxima[key]["value"]:
                self.maxima[key] = entry
        for key, entry in other.failures.items():
            self.failures.setdefault(key, {"seeds": [], "text": entry["text"]})["seeds"] += entry["seeds"]


_subject: Implementation


def _start(spec: str) -> None:
    global _subject
    torch.set_num_threads(1)  # as many processes as cores
    _subject = load(spec)


def judged(pairs: list[tuple[str, str]], seed: int) -> Findings:
    """The checks on these cases with this seed, in a process of its own."""
    found = Findings()
    for check, text in pairs:
        case = Case.parse(text, seed=seed)
        verdict = trial.run_check(check, _subject, case, diagnose=False)
        found.totals[verdict.status] += 1
        if verdict.status == "failed":
            found.failures[f"{check}[{text}]"] = {"seeds": [seed], "text": verdict.text()}
            continue
        group = "grouped" if case.kv_heads != case.heads else "plain"
        for m in verdict.measures:
            value = m.needed if m.rule == "bound" else m.ratio * m.limit
            if value is None or m.rule == "exact":
                continue
            key = f"{m.rule} {m.quantity} {case.dtype} {group} {case.family}"
            if key not in found.maxima or value > found.maxima[key]["value"]:
                found.maxima[key] = {"value": round(value, 4), "case": text, "check": check, "seed": seed}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", required=True, help="module:attribute")
    parser.add_argument("--matrix", default="default", choices=matrices.LEVELS)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--limit", type=float, default=float("inf"), help="stop after this many seconds (whole seeds)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    parser.add_argument("--skip", default="", help="glob over case ids to leave out, which break the context")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()

    pairs = [
        (check.name, case.id)
        for chapter in CHAPTERS
        for check in checks_of(chapter)
        for case in matrices.cases_for(chapter, check.name.partition(".")[2], arguments.matrix, 0)
        if not fnmatch(case.id, arguments.skip)
    ]
    # Dealt out like cards, and the same to each process for every seed: what a kernel compiles is compiled once.
    shares = [pairs[start :: arguments.jobs] for start in range(arguments.jobs)]
    found = Findings()
    started = time.monotonic()
    seeds = 0
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(ProcessPoolExecutor(1, spawn, _start, (arguments.impl,))) for _ in range(arguments.jobs)
        ]
        for seed in range(arguments.seeds):
            if time.monotonic() - started > arguments.limit:
                break
            tasks = [process.submit(judged, share, seed) for process, share in zip(processes, shares, strict=True)]
            for task in tasks:
                found.add(task.result())
            seeds += 1
            print(f"seed {seed}: {dict(found.totals)}, {time.monotonic() - started:.0f} s", flush=True)
    totals, maxima, failures = found.totals, found.maxima, found.failures
    implementation = load(arguments.impl)
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
        overall[short] = max(overall.get(short, 0.0), entry["value"])
    for short, value in sorted(overall.items()):
        print(f"{short:40s} {value:.3f}")
    print(f"{len(failures)} checks failed in some seed; written to {arguments.out}")


if __name__ == "__main__":
    main()
