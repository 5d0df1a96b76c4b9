"""Equivalents over many seeds, spread over runs: how often the suite accuses an honest kernel.

    python -m tests.mutants.seeds --seeds 0:200 [--only NAME …] --out measurements/cpu/equivalents.json

Every seed draws new tensors for its share of the smoke and default cases; the shares of SLICES seeds in a row make up
the whole. The file is written after each seed, and what it holds is not run again. Ends with 1 after a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from pytest_flashattn import trial
from pytest_flashattn.cases import Case
from pytest_flashattn.chapters import CHAPTERS
from pytest_flashattn.power import plan

from .equivalents import EQUIVALENTS, Equivalent
from .trial import implementation, posed

SLICES = 53
"""Seeds that make up the whole matrix; a prime, so a slice has no rhythm in common with the axes of a design."""


def pool(seed: int) -> list[tuple[str, Case]]:
    """(check, case) of smoke and default, each once, with this seed; not the large ones: a seed must cost a second."""
    pairs = (pair for level in ("smoke", "default") for chapter in CHAPTERS for pair in posed(level, chapter, seed))
    return [pair for pair in dict.fromkeys(pairs) if plan.work(pair[1]) <= plan.LARGE]


def share(seed: int) -> list[tuple[str, Case]]:
    return pool(seed)[seed % SLICES :: SLICES]


def digest() -> str:
    """What the shares depend on: results of another matrix do not add up with these."""
    ids = "\n".join(f"{check} {case.id}" for check, case in pool(0))
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def run_seed(equivalent: Equivalent, seed: int) -> dict[str, Any]:
    """Counts by status, and each false alarm with its text."""
    subject = implementation(equivalent.make(), equivalent.convention)
    found: dict[str, Any] = {"verified": 0, "declared": 0, "unmet": 0, "failed": []}
    for check, case in share(seed):
        verdict = trial.run_check(check, subject, case)
        if verdict.status == "failed":
            found["failed"].append({"seed": seed, "check": check, "case": case.id, "text": verdict.text()})
        else:
            found[verdict.status] += 1
    return found


def seeds_of(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last)) if last else range(int(first), int(first) + 1)


def read(path: Path, matrix: str) -> dict[str, Any]:
    """The file so far, or an empty one. Raises SystemExit, one sentence, for a file of another matrix."""
    if not path.exists():
        return {"matrix": matrix, "pool": len(pool(0)), "slices": SLICES, "most_work": plan.LARGE, "equivalents": {}}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document["matrix"] != matrix:
        raise SystemExit(
            f"{path} holds results of another matrix ({document['matrix']}, now {matrix}): name a new file"
        )
    return document


def work(document: dict[str, Any], seeds: range, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """What is still to do, seed by seed, so that a run cut short has all equivalents at the same seed."""
    for seed in seeds:
        for name in names:
            if seed not in document["equivalents"].get(name, {}).get("seeds", []):
                yield name, seed


def book(document: dict[str, Any], name: str, seed: int, found: dict[str, Any]) -> None:
    entry = document["equivalents"].setdefault(
        name, {"seeds": [], "verified": 0, "declared": 0, "unmet": 0, "failed": []}
    )
    entry["seeds"].append(seed)
    for status, value in found.items():
        entry[status] += value


def table(document: dict[str, Any]) -> str:
    lines = ["| equivalent | seeds | cases verified | false alarms |", "|---|---|---|---|"]
    for name, entry in document["equivalents"].items():
        lines.append(f"| {name} | {len(entry['seeds'])} | {entry['verified']} | {len(entry['failed'])} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.seeds", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=seeds_of, default=range(200), help="first:last, last not included")
    parser.add_argument("--only", nargs="+", choices=EQUIVALENTS, default=list(EQUIVALENTS), metavar="NAME")
    parser.add_argument("--out", type=Path, required=True, help="JSON that is read, added to and written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    document = read(options.out, digest())
    with contextlib.suppress(KeyboardInterrupt):
        for name, seed in work(document, options.seeds, options.only):
            found = run_seed(EQUIVALENTS[name], seed)
            for alarm in found["failed"]:
                print(f"{name}: {alarm['check']}[{alarm['case']}] seed {seed}\n{alarm['text']}", flush=True)
            book(document, name, seed, found)
            # One file at a time under this name: a run that is cut short leaves the file before or the one after.
            draft = options.out.with_suffix(".part")
            draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            draft.replace(options.out)
    print(table(document))
    return int(any(entry["failed"] for entry in document["equivalents"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
