"""Runs cells of a script in a process of their own under a sanitizer, and reads what it says.

memcheck, racecheck    NVIDIA's compute-sanitizer: accesses outside of an allocation, races in shared memory
consan                 Triton's concurrency sanitizer: a kernel compiled with checks of each access against the barriers
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "consan")
ROOT = Path(__file__).resolve().parents[1]

WRONG = {
    ("memcheck", "beyond"): "Invalid __global__ write",
    ("racecheck", "raced"): "Race reported",
    ("racecheck", "unhanded"): "Race reported",
    ("consan", "unhanded"): "outstanding",
    ("consan", "unwaited"): "outstanding",
}
"""What a tool must say of a wrong kernel of faulty.py."""

RIGHT = (
    ("racecheck", "exchanged"), ("racecheck", "handed"), ("racecheck", "waited"),
    ("consan", "handed"), ("consan", "waited"),
)  # fmt: skip
"""The tools and the right kernels of faulty.py in which they must find nothing."""

SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (?P<errors>\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: \d+ hazards? \w+ \((?P<errors>\d+) errors?, (?P<warnings>\d+) w"),
}
ACCESS = re.compile(r"(?:Read|Write) access at (?P<kernel>\w+)\+0x[0-9a-f]+ in (?P<file>\S+):(?P<line>\d+)")


def command_and_environment(tool: str, file: str) -> tuple[list[str], dict[str, str]]:
    """How the worker of a script runs under a tool. memcheck needs an allocation for each tensor, to see its end."""
    command = [sys.executable, file, "--worker"]
    if tool == "consan":
        # Optimising what is little but checks takes ptxas minutes, and 3.9 does without by itself.
        return command, os.environ | {"TRITON_INSTRUMENTATION_MODE": "consan", "DISABLE_PTXAS_OPT": "1"}
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})
    return ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only", *command], environment


def version() -> str:
    """That of compute-sanitizer: what racecheck knows of barriers changes from one to the next."""
    said = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout
    return next((line for line in said.splitlines() if line.startswith("Version")), said.strip())


def races(output: str) -> list[list[str]]:
    """racecheck's reports: each an access and then those that are not ordered with it, as it names them."""
    reports: list[list[str]] = []
    for line in output.splitlines():
        said = line.strip("= ")
        if "Race reported between" in said:
            reports.append([said])
        elif reports and said.startswith(("and Read access", "and Write access")):
            reports[-1].append(said)
    return reports


def of_dispatch(report: Sequence[str]) -> bool:
    """Whether a report is about the words by which Triton starts and ends the partitions of a specialised kernel.

    gl.warp_specialize writes into shared memory which partition a warp is to run, with what arguments, and in the end
    that it shall exit. A `bar.sync` of all warps lies between any two of these accesses that differ, but each partition
    has one of its own, at its own place in the code, and racecheck reports them of right kernels too (faulty.handed).
    The compiler gives them, and no access to a tile, the line of the kernel's `def` or of the call
    (tests/kernels/test_measurements.py looks at the machine code).
    """
    accesses = [ACCESS.search(line) for line in report]
    return all(m and _starts_partitions(m["kernel"], m["file"], int(m["line"])) for m in accesses)


@functools.cache
def _starts_partitions(kernel: str, name: str, line: int) -> bool:
    """Whether that line of the kernel's file is its `def`, or the statement that calls gl.warp_specialize."""
    definition = f"def {kernel}("
    for folder in ("reference_kernels/hopper", "measurements"):
        file = ROOT / folder / Path(name).name
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        if any(text.startswith(definition) for text in lines):
            here = lines[line - 1 : line + 1]  # a constexpr `if` around the call takes its place
            return here[0].startswith(definition) or any("gl.warp_specialize(" in text for text in here)
    return False


def read(tool: str, output: str, expected: int) -> dict[str, Any]:
    """What a run said: "errors" (None: it did not come to its end), "warnings" of racecheck, "said", the first lines.

    Of racecheck also "dispatch", how many of its reports are `of_dispatch`, and "reports", the text of all; "said" has
    the others. ok: no error, no warning, other than those, and every one of the `expected` cells came to its end and
    was good.
    """
    answers = [json.loads(line) for line in output.splitlines() if line.startswith('{"cell"')]
    bad = [f"{a['cell']}: {a.get('error', 'not ok')}" for a in answers if not a["ok"]]
    complete = len(answers) == expected
    if tool == "consan":
        # It ends the kernel, and with that the process's use of the GPU, at the first error.
        found: dict[str, Any] = {"errors": len(bad) if complete or bad else None, "warnings": 0}
    else:
        match = SUMMARIES[tool].search(output)
        counts = match.groupdict() if match else {}
        found = {"errors": int(counts["errors"]) if match else None, "warnings": int(counts.get("warnings") or 0)}
    said = [line.strip("= ") for line in output.splitlines() if line.startswith("========= ") or "Assertion" in line]
    explained = 0
    if tool == "racecheck":
        reports = races(output)
        explained = sum(map(of_dispatch, reports))
        said = [line for report in reports if not of_dispatch(report) for line in report]
        found |= {"dispatch": explained, "reports": ["; ".join(report) for report in reports]}
    clean = found["errors"] is not None and found["errors"] + found["warnings"] == explained and complete and not bad
    return {"ok": clean, **found, "cells": len(answers), "said": [] if clean else [*bad[:3], *said[:6]]}


def under(tool: str, file: str, cells: Sequence[str], limit: float) -> dict[str, Any]:
    """Run cells under a tool; `read` of it. RuntimeError where the tool cannot be started or does not end in time."""
    command, environment = command_and_environment(tool, file)
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not on the PATH: it comes with the CUDA toolkit") from None
    with process:
        try:
            output, errors = process.communicate("\n".join(cells) + "\n", timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the worker under it
            raise RuntimeError(f"{tool} did not end within {limit:g} s") from None
    found = read(tool, output + errors, len(cells))
    if found["errors"] is None and not found["said"]:
        found["said"] = errors.strip().splitlines()[-3:]
    return found
