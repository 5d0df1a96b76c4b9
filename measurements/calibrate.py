"""How much of the bounds real implementations use: the evidence behind pytest_flashattn/tolerances.toml.

    python measurements/calibrate.py --impl torch.nn.functional:scaled_dot_product_attention --seeds 20 --out FILE.json

Runs every check on every case of a matrix with each seed and keeps, for each quantity, dtype, grouping and input
family, the largest lambda that the element bound would have needed and the largest noise-floor ratios, with the case;
and every failure. Passing checks only enter the maxima, so a faulty case does not widen the evidence.

A case has all of its seeds in one process, which compiles it once; those that compile longest come last. A case that a
limit cut short, or whose process died, is listed as such and enters nothing else. After a seed that breaks the CUDA
context the case ends, and another process goes on with the next.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import shlex
import sys
import threading
import time
from collections import Counter
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
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
    """totals: verdicts by status. maxima: by rule, quantity, dtype, grouping, family. failures: by check and case.

    unmet: why a case could not be judged here. broken: whether the last seed broke the CUDA context.
    """

    totals: Counter[str] = field(default_factory=Counter)
    maxima: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)
    unmet: dict[str, str] = field(default_factory=dict)
    broken: bool = False

    def add(self, other: Findings) -> None:
        self.totals += other.totals
        for key, entry in other.maxima.items():
            if key not in self.maxima or entry["value"] > self.maxima[key]["value"]:
                self.maxima[key] = entry
        for key, entry in other.failures.items():
            self.failures.setdefault(key, {"seeds": [], "text": entry["text"]})["seeds"] += entry["seeds"]
        self.unmet |= other.unmet


_subject: Implementation


def _start(spec: str) -> None:
    global _subject
    torch.set_num_threads(1)  # as many processes as cores
    _subject = load(spec)


def judged(check: str, text: str, seeds: int) -> Findings:
    """One check on one case with each seed, in a process of its own."""
    found = Findings()
    for seed in range(seeds):
        case = Case.parse(text, seed=seed)
        verdict = trial.run_check(check, _subject, case, diagnose=False)
        found.totals[verdict.status] += 1
        if verdict.status == "unmet":
            found.unmet[f"{check}[{text}]"] = verdict.reason
        if verdict.status == "failed":
            entry = found.failures.setdefault(f"{check}[{text}]", {"seeds": [], "text": verdict.text()})
            entry["seeds"].append(seed)
            if trial.poisoned():
                found.broken = True
                break
            continue
        group = "grouped" if case.kv_heads != case.heads else "plain"
        for m in verdict.measures:
            value = m.needed if m.rule == "bound" else m.ratio * m.limit
            if value is None or m.rule == "exact":
                continue
            key = f"{m.rule} {m.quantity} {case.dtype} {group} {case.family}"
            if key not in found.maxima or value > found.maxima[key]["value"]:
                found.maxima[key] = {"value": round(value, 4), "case": text, "check": check, "seed": seed}
    if torch.cuda.is_initialized() and not found.broken:
        torch.cuda.empty_cache()  # many processes share the GPU
    return found


def longest_last(pair: tuple[str, str]) -> tuple[bool, int]:
    case = Case.parse(pair[1])
    return case.dtype == "fp32", max(case.d, case.dv)


class Run:
    """The pairs of check and case, judged by `jobs` processes side by side until `limit` seconds have gone."""

    def __init__(self, spec: str, pairs: list[tuple[str, str]], seeds: int, jobs: int, limit: float) -> None:
        self.found, self.done = Findings(), 0
        self.unfinished, self.died, self.broke = list[str](), list[str](), list[str]()
        self._spec, self._seeds, self._of = spec, seeds, len(pairs)
        self._pending: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        for pair in sorted(pairs, key=longest_last):
            self._pending.put(pair)
        self._started, self._limit, self._lock = time.monotonic(), limit, threading.Lock()
        threads = [threading.Thread(target=self._work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def _work(self) -> None:
        pool: ProcessPoolExecutor | None = None
        while not self._pending.empty():
            try:
                check, text = self._pending.get_nowait()
            except queue.Empty:
                break
            left = self._limit - self.seconds
            if left <= 0:
                self.unfinished.append(f"{check}[{text}]")
                continue
            pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start, (self._spec,))
            task: Future[Findings] = pool.submit(judged, check, text, self._seeds)
            try:
                found = task.result(timeout=left if left < threading.TIMEOUT_MAX else None)
            except TimeoutError:
                self.unfinished.append(f"{check}[{text}]")
                _kill(pool)
                pool = None
                continue
            except BrokenExecutor:
                self.died.append(f"{check}[{text}]")
                pool = None
                continue
            if found.broken:
                self.broke.append(f"{check}[{text}]")
                _kill(pool)
                pool = None
            with self._lock:
                self.found.add(found)
                self.done += 1
                if self.done % 50 == 0 or self.done == self._of:
                    print(
                        f"{self.done} of {self._of} cases: {dict(self.found.totals)}, {self.seconds:.0f} s", flush=True
                    )
        if pool:
            pool.shutdown()


def _kill(pool: ProcessPoolExecutor) -> None:
    """A process that compiles does not hear a polite request."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", required=True, help="module:attribute")
    parser.add_argument("--matrix", default="default", choices=matrices.LEVELS)
    parser.add_argument(
        "--only", nargs="*", default=["*"], metavar="GLOB", help="only cases whose id matches one of these"
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds a case, from 0")
    parser.add_argument("--limit", type=float, default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()

    pairs = [
        (check.name, case.id)
        for chapter in CHAPTERS
        for check in checks_of(chapter)
        for case in matrices.cases_for(chapter, check.name.partition(".")[2], arguments.matrix, 0)
        if any(fnmatch(case.id, glob) for glob in arguments.only)
    ]
    run = Run(arguments.impl, pairs, arguments.seeds, arguments.jobs, arguments.limit)
    found = run.found
    totals, maxima, failures = found.totals, found.maxima, found.failures
    implementation = load(arguments.impl)
    device = implementation.device
    only = "" if arguments.only == ["*"] else f" --only {shlex.join(arguments.only)}"
    report = {
        "command": f"python measurements/calibrate.py --impl {arguments.impl} "
        f"--matrix {arguments.matrix} --seeds {arguments.seeds}" + only,
        "date": date.today().isoformat(),
        "implementation": implementation.describe(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(run.seconds, 1),
        "seeds": arguments.seeds,
        "cases": run.done,
        "unmet": dict(sorted(found.unmet.items())),
        "unfinished": sorted(run.unfinished),
        "died": sorted(run.died),
        "broke the context": sorted(run.broke),
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
    for what, cases in (
        ("unmet", list(found.unmet)),
        ("unfinished", run.unfinished),
        ("died", run.died),
        ("broke", run.broke),
    ):
        print(f"{len(cases)} {what}: {', '.join(sorted(cases)[:5])}" if cases else f"none {what}")
    print(f"{len(failures)} checks failed in some seed; written to {arguments.out}")


if __name__ == "__main__":
    main()
