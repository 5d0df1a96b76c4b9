"""What the scripts that measure the Hopper kernels share: cells in worker processes, and a JSON file of their answers.

A script names its parts, each a list of cells ("speed 128 0 8192 bf16"), and a function that answers one. Cells run in
worker processes, which print a line of JSON for each. A cell that fails, dies or exceeds its time limit is reported as
such, and its worker replaced: no cell loses another. The file is written anew after each cell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for _folder in (str(ROOT / "measurements"), str(ROOT)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

Answer = dict[str, Any]
"""ok, and what was found; "error" where nothing was."""


@dataclass(frozen=True)
class Script:
    """A script of parts.

    file, doc: its __file__ and __doc__. parts: name to its cells. answer: a cell to what a worker found. summary: of
    all answers, for the file. side_by_side: the parts whose cells may share the GPU; the rest have one worker. ahead:
    cells that are run before a part, all workers side by side, and not kept (compiling). workers, limit: of the
    options.
    """

    file: str
    doc: str
    parts: dict[str, Callable[[], list[str]]]
    answer: Callable[[str], Answer]
    summary: Callable[[list[Answer]], dict[str, Any]]
    side_by_side: frozenset[str] = frozenset()
    ahead: dict[str, Callable[[], list[str]]] = field(default_factory=dict)
    workers: int = 8
    limit: float = 90.0

    @property
    def name(self) -> str:
        return Path(self.file).name


def serve(answer: Callable[[str], Answer]) -> None:
    """Answer cells from stdin, one JSON object each. After an error of the GPU this process is of no more use."""
    for line in sys.stdin:
        cell, started, poisoned = line.strip(), time.monotonic(), False
        try:
            found = answer(cell)
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            found = {"ok": False, "error": message}
            poisoned = "cuda" in message.lower()
        print(json.dumps({"cell": cell, **found, "seconds": round(time.monotonic() - started, 1)}), flush=True)
        if poisoned:
            return


class Worker:
    """A worker process and the lines it prints."""

    def __init__(self, file: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, file, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print too
                self.lines.put(line)
        self.lines.put("")

    def ask(self, cell: str, limit: float) -> Answer:
        """The answer to a cell, or what happened instead; then `alive` says whether the worker can go on."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(cell + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            self.kill()
            return {"cell": cell, "ok": False, "error": f"no answer within {limit:g} s"}
        except BrokenPipeError:
            line = ""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)  # for its own exit status, not that of being killed
            self.kill()
            return {"cell": cell, "ok": False, "error": f"the worker died (exit status {self.process.returncode})"}
        answer: Answer = json.loads(line)
        if "cuda" in answer.get("error", "").lower():
            self.kill()
        return answer

    def kill(self) -> None:
        """End the process, unless it has ended by itself, and wait for it."""
        self.process.kill()
        self.process.wait()
        self._reader.join(timeout=1)
        for pipe in (self.process.stdin, self.process.stdout):
            # A process that it left behind may still hold the other end.
            if pipe is not None and not self._reader.is_alive():
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def run(file: str, cells: Iterable[str], workers: int, limit: float, done: Callable[[Answer], None]) -> None:
    """Every cell by one of `workers` processes, `done` with each answer, one at a time."""
    pending = iter(cells)
    lock = threading.Lock()

    def work() -> None:
        process = None
        while True:
            with lock:
                cell = next(pending, None)
            if cell is None:
                break
            if process is None or not process.alive:
                process = Worker(file)
            answer = process.ask(cell, limit)
            with lock:
                done(answer)
        if process is not None:
            process.kill()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def line_of(answer: Answer) -> str:
    """An answer as one line of text."""
    head = f"{'ok  ' if answer['ok'] else 'FAIL'} {answer['cell']}"
    if "error" in answer:
        return f"{head}: {answer['error']}"
    if "tflops" in answer:
        shown = "  ".join(f"{name} {value:6.1f}" for name, value in answer["tflops"].items())
        return f"{head:24} {shown}   " + "  ".join(f"{name} {value:.3f}" for name, value in answer["ratios"].items())
    if "ratios" in answer:
        shown = "  ".join(f"{name} {_worst(value):.2f}" for name, value in answer["ratios"].items())
        return "  ".join([f"{head}: {shown}", *answer["notes"]])
    rest = {name: value for name, value in answer.items() if name not in ("cell", "ok")}
    return f"{head}: " + "  ".join(f"{name} {value}" for name, value in rest.items())


def _worst(ratio: Any) -> float:
    """A ratio, which JSON writes as text where it is not finite, or the largest of several by rule."""
    return max(map(float, ratio.values())) if isinstance(ratio, dict) else float(ratio)


def counted(answers: list[Answer], ratios: dict[str, list[float]]) -> dict[str, Any]:
    """How many cells are good; the geometric mean and the least of ratios by group."""
    found: dict[str, Any] = {"cells": len(answers), "ok": sum(a["ok"] for a in answers)}
    for name, values in sorted(ratios.items()):
        found[name] = {"geometric mean": round(statistics.geometric_mean(values), 3), "least": round(min(values), 3)}
    return found


def main(script: Script, arguments: Sequence[str] | None = None) -> int:
    """Run a part as the command line says: 0 if every cell is good, 1 if not, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(description=script.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(script.parts))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cells with all of these words in their name, separated by commas")
    parser.add_argument("--workers", type=int, default=script.workers, help="processes side by side, where they may be")
    parser.add_argument("--limit", type=float, default=script.limit, help="seconds for one cell, compiling included")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no cell is begun")
    if script.ahead:
        parser.add_argument("--cold", action="store_true", help="do not compile ahead")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.worker:
        serve(script.answer)
        return 0
    if asked.part is None:
        parser.error("say " + " or ".join(f"--part {part}" for part in script.parts))
    cells = [cell for cell in script.parts[asked.part]() if all(word in cell for word in asked.only.split(","))]
    if asked.list:
        print("\n".join(cells))
        return 0
    if not cells:
        parser.error(f"no cell of --part {asked.part} has --only {asked.only} in its name; see --list")
    if asked.out is None:
        parser.error("say --out FILE")
    import torch
    import triton

    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; all parts run on one")
    report: dict[str, Any] = {
        "command": f"python measurements/{script.name} --part {asked.part}",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
    }
    answers: list[Answer] = []
    deadline = time.monotonic() + asked.budget

    def done(answer: Answer) -> None:
        answers.append(answer)
        print(line_of(answer), flush=True)
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report | {"summary": script.summary(answers), "cells": answers}, indent=1)
        asked.out.write_text(text + "\n", encoding="utf-8")

    def in_time(cells: list[str]) -> Iterable[str]:
        return (cell for cell in cells if time.monotonic() < deadline)

    if asked.part in script.ahead and not asked.cold:
        ahead = script.ahead[asked.part]()
        run(script.file, in_time(ahead), asked.workers, asked.limit, lambda a: print(line_of(a), flush=True))
    workers = asked.workers if asked.part in script.side_by_side else 1
    run(script.file, in_time(cells), workers, asked.limit, done)
    print(json.dumps(script.summary(answers), indent=1))
    return 0 if len(answers) == len(cells) and all(a["ok"] for a in answers) else 1
