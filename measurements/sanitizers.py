"""Runs cells of a script in a process of their own under a sanitizer, and reads what it says.

memcheck, racecheck    NVIDIA's compute-sanitizer: accesses outside of an allocation, races in shared memory
consan                 Triton's concurrency sanitizer: a kernel compiled with checks of each access against the barriers
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

TOOLS = ("memcheck", "racecheck", "consan")

FAULTS = {"beyond": "Invalid __global__ write", "unwaited": "outstanding"}
"""What a tool must say of each kernel of faulty.py."""

SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (?P<errors>\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: \d+ hazards? \w+ \((?P<errors>\d+) errors?, (?P<warnings>\d+) w"),
}


def command_and_environment(tool: str, file: str) -> tuple[list[str], dict[str, str]]:
    """How the worker of a script runs under a tool. memcheck needs an allocation for each tensor, to see its end."""
    command = [sys.executable, file, "--worker"]
    if tool == "consan":
        # Optimising what is little but checks takes ptxas minutes, and 3.9 does without by itself.
        return command, os.environ | {"TRITON_INSTRUMENTATION_MODE": "consan", "DISABLE_PTXAS_OPT": "1"}
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})
    return ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only", *command], environment


def read(tool: str, output: str, expected: int) -> dict[str, Any]:
    """What a run said: "errors" (None: it did not come to its end), "warnings" of racecheck, "said", the first lines.

    ok: no error, no warning, and every one of the `expected` cells came to its end and was good.
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
    clean = found["errors"] == found["warnings"] == 0 and complete and not bad
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
