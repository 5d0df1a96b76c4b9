"""Check and time the Hopper backward on an H100 or H200; one JSON file, one line a cell.

    python measurements/hopper_backward.py --part check --out F.json      errors against the float64 oracle, repeats
    python measurements/hopper_backward.py --part speed --out F.json      TFLOP/s beside SDPA's cuDNN and FA2

check    dq, dk, dv under the suite's bound and noise floor (pytest_flashattn.judge), each form of each head dimension;
         then 200 calls of the deterministic form, bit-identical. o and lse are the plain Triton forward's.
speed    16k tokens, hidden 2048, bf16, D 64, 128, 256, causal and not, N 512 … 16384: medians, the candidates taking
         turns, cold L2, ratios to the peers of the same process.

Cells run in worker processes, which print a line of JSON for each. A cell that fails, dies or exceeds its time limit is
reported as such, and its worker replaced: no cell loses another. The file is written anew after each cell. Workers of
`check` run side by side (--workers), since most of their time is compiling; `speed` has one.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "measurements")]

FORMS = ("onepass", "twopass")
REPEATS = 200

# The fragments of a case's id after its dtype; "dlse": lse has a gradient too.
SHAPES = {
    "even": "b2-h2-q1024-k1024",
    "ragged-1": "b1-h2-q1023-k1023",
    "ragged+1": "b1-h2-q513-k513",
    "one": "b2-h1-q1-k1",
    "q1": "b2-h2-q1-k300",
    "k1": "b2-h2-q300-k1",
    "k63": "b1-h2-q200-k63",
    "q63": "b1-h2-q63-k200",
    "q>k": "b1-h2-q700-k333",
    "q<k": "b1-h2-q333-k700",
    "q<k+64": "b1-h2-q256-k320",
    "gqa8": "b2-h16-kv2-q512-k512",
    "gqa8-ragged": "b1-h8-kv1-q391-k517",
    "gqa3-rows": "b1-h3-kv1-q200-k70",
    "blhd": "b2-h4-q320-k320|swapped-do.swapped",
    "qkv": "b2-h4-q260-k260|qkv",
    "expanded-do": "b2-h2-q320-k320|do.expanded",
    "negoffset": "b1-h2-q300-k300|negoffset",
    "offset": "b1-h2-q300-k300|offset",
    "peaked": "b1-h2-q300-k300|peaked",
    "long": "b1-h2-q4096-k4096",
}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def check_cells() -> list[str]:
    """Of "check form case dlse" every shape × D × causal × form, dtypes and dlse by turns; then repeats.

    Neighbours need different kernels, so that workers side by side do not compile the same one.
    """
    cells = []
    problems = [(d, causal) for d in (64, 128, 256) for causal in ("", "-causal")]
    for number, (name, shape) in enumerate(SHAPES.items()):
        geometry, _, rest = shape.partition("|")
        # Scores of 1e5 are sums of products that fp16 cannot hold.
        dtype = "bf16" if name in ("negoffset", "offset") else ("bf16", "fp16")[number % 2]
        for form in FORMS:
            for d, causal in problems:
                if d < 256 or form == "twopass":
                    case = f"{dtype}-{geometry}-d{d}{causal}" + (f"-{rest}" if rest else "")
                    cells.append(f"check {form} {case} {number % 2}")
    return cells + [f"repeat twopass bf16-b2-h8-kv4-q1000-k1000-d{d}{causal} 1" for d, causal in problems]


def speed_cells() -> list[str]:
    return [f"speed {d} {int(causal)} {n}" for n in reversed(LENGTHS) for d in (64, 128, 256) for causal in (0, 1)]


# What a worker does.


def run_cell(cell: str) -> dict[str, Any]:
    kind, *words = cell.split()
    if kind == "speed":
        return speed(*map(int, words))
    form, case, lse = words
    return {"check": check, "repeat": repeat}[kind](form, case, lse == "1")


def _problem(case_id: str, with_dlse: bool) -> tuple[Any, Any, float, tuple[Any, ...]]:
    """(case, inputs, scale, the tensors that backward takes), o and lse by the plain Triton forward."""
    from pytest_flashattn.cases import Case
    from pytest_flashattn.inputs import make_inputs
    from reference_kernels.forward import forward

    case = Case.parse(case_id)
    x = make_inputs(case, "cuda", "bhsd")
    scale = case.d**-0.5 if case.scale is None else case.scale
    o, lse = forward(x.q, x.k, x.v, scale=scale, right=0 if case.causal else None)
    return case, x, scale, (x.q, x.k, x.v, o, lse, x.dout, x.dlse if with_dlse else None)


def check(form: str, case_id: str, with_dlse: bool) -> dict[str, Any]:
    """Every gradient judged: its worst error as a share of the limit, and of the noise floor."""
    import torch

    import oracles
    from pytest_flashattn.inputs import TORCH_DTYPES
    from pytest_flashattn.judge import against_bound, against_noise
    from pytest_flashattn.tolerances import limits
    from reference_kernels.hopper import backward as hopper

    case, x, scale, tensors = _problem(case_id, with_dlse)
    got = hopper.backward(*tensors, scale=scale, causal=case.causal, deterministic=form == "twopass")
    torch.cuda.synchronize()
    upstream = {"do": x.dout, "dlse": x.dlse if with_dlse else None}
    truth = oracles.evaluate(
        x.q, x.k, x.v, x.spec(), **upstream, arithmetic=oracles.Arithmetic.of(TORCH_DTYPES[case.dtype])
    )
    floor = oracles.emulate(x.q, x.k, x.v, x.spec(), **upstream)
    found: dict[str, Any] = {}
    notes = []
    for name, value in zip(("dq", "dk", "dv"), got, strict=True):
        allowed = limits(name, case)
        measures = [against_bound(name, value, truth[name], allowed.lam)]
        measures += against_noise(name, value, truth[name], floor[name], tensor=allowed.tensor, block=allowed.block)
        found[name] = {m.rule: m.ratio if math.isfinite(m.ratio) else str(m.ratio) for m in measures}
        notes += [f"{name} {m.rule}: {m.note}" for m in measures if not m.ratio <= 1]
    return {"ok": not notes, "ratios": found, "notes": notes}


def repeat(form: str, case_id: str, with_dlse: bool) -> dict[str, Any]:
    """How many of REPEATS calls differ from the first in any bit."""
    import torch

    from reference_kernels.hopper import backward as hopper

    case, _, scale, tensors = _problem(case_id, with_dlse)
    call = partial(hopper.backward, *tensors, scale=scale, causal=case.causal, deterministic=form == "twopass")
    first = call()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        wrong += torch.stack([(a != b).any() for a, b in zip(call(), first, strict=True)]).any().long()
    return {"ok": not int(wrong), "calls": REPEATS, "differing": int(wrong)}


def speed(d: int, causal: int, n: int) -> dict[str, Any]:
    """TFLOP/s of both forms and of the peers, and the ratios."""
    import torch
    from kernels import HIDDEN, TOKENS, Call, Clock, tensors

    from pytest_flashattn import peers
    from reference_kernels.forward import forward
    from reference_kernels.hopper import backward as hopper

    class Ahead(Clock):
        """The GPU waits a moment before the clock starts, so that the launches of a call are queued and not timed."""

        def once(self, call: Call) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.scratch.zero_()
            torch.cuda._sleep(1_000_000)
            start.record()
            call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))

    torch.manual_seed(0)
    q, k, v, do = tensors(n, d)
    scale = d**-0.5
    o, lse = forward(q, k, v, scale=scale, right=0 if causal else None)
    calls: dict[str, Callable[[], object]] = {
        form: partial(
            hopper.backward, q, k, v, o, lse, do, scale=scale, causal=bool(causal), deterministic=form == "twopass"
        )
        for form in FORMS
        if d < 256 or form == "twopass"
    }
    for name, attention in (("cudnn", peers.sdpa_cudnn), ("fa2", peers.sdpa_flash)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, causal=bool(causal))
        calls[name] = partial(torch.autograd.grad, out, leaves, do, retain_graph=True)
    times = Ahead().medians(calls, rounds=3, launches=5)
    flops = 10 * TOKENS * n * HIDDEN * (0.5 if causal else 1.0)
    tflops = {name: round(flops / ms / 1e9, 1) for name, ms in times.items()}
    ratios = {
        f"{form}/{peer}": round(times[peer] / times[form], 3)
        for form in times
        if form in FORMS
        for peer in ("cudnn", "fa2")
    }
    return {"ok": True, "ms": times, "tflops": tflops, "ratios": ratios}


def worker() -> None:
    """Answer cells from stdin, one JSON object each. After an error of the GPU this process is of no more use."""
    for line in sys.stdin:
        cell, started, poisoned = line.strip(), time.monotonic(), False
        try:
            answer = run_cell(cell)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            answer = {"ok": False, "error": message}
            poisoned = "CUDA" in message or "cuda" in message
        print(json.dumps({"cell": cell, **answer, "seconds": round(time.monotonic() - started, 1)}), flush=True)
        if poisoned:
            return


# What the parent does.


class Worker:
    """A worker process and the lines it prints."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, cell: str, limit: float) -> dict[str, Any]:
        """The answer to a cell, or what happened instead; then `alive` says whether the worker can go on."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(cell + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            self.process.kill()
            return {"cell": cell, "ok": False, "error": f"no answer within {limit:g} s"}
        except BrokenPipeError:
            line = ""
        if not line:
            return {"cell": cell, "ok": False, "error": f"the worker died (exit status {self.process.wait()})"}
        answer: dict[str, Any] = json.loads(line)
        if "CUDA" in str(answer.get("error", "")).upper():
            self.process.wait(timeout=30)
        return answer

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def run(cells: list[str], workers: int, limit: float, done: Callable[[dict[str, Any]], None]) -> None:
    """Every cell by one of `workers` processes, `done` with each answer, one at a time."""
    pending = iter(cells)
    lock = threading.Lock()

    def draw() -> Iterator[str]:
        while True:
            with lock:
                cell = next(pending, None)
            if cell is None:
                return
            yield cell

    def serve() -> None:
        process = None
        for cell in draw():
            if process is None or not process.alive:
                process = Worker()
            answer = process.ask(cell, limit)
            with lock:
                done(answer)
        if process is not None:
            process.process.kill()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def line_of(answer: dict[str, Any]) -> str:
    head = f"{'ok  ' if answer['ok'] else 'FAIL'} {answer['cell']}"
    if "error" in answer:
        return f"{head}: {answer['error']}"
    if "tflops" in answer:
        shown = "  ".join(f"{name} {value:6.1f}" for name, value in answer["tflops"].items())
        return f"{head:24} {shown}   " + "  ".join(f"{name} {value:.3f}" for name, value in answer["ratios"].items())
    if "ratios" in answer:
        worst = {
            name: max(float(v) if isinstance(v, str) else v for v in rules.values())
            for name, rules in answer["ratios"].items()
        }
        return f"{head}: " + "  ".join([f"{name} {value:.2f}" for name, value in worst.items()] + answer["notes"])
    return f"{head}: {answer['differing']} of {answer['calls']} calls differ"


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """How many cells are good, and the geometric means of the ratios by form, peer and head dimension."""
    found: dict[str, Any] = {"cells": len(answers), "ok": sum(a["ok"] for a in answers)}
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        if "tflops" in answer:
            for name, value in answer["ratios"].items():
                for group in (name, f"{name} d{answer['cell'].split()[1]}"):
                    ratios.setdefault(group, []).append(value)
    for name, values in sorted(ratios.items()):
        found[name] = {"geometric mean": round(statistics.geometric_mean(values), 3), "least": min(values)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("check", "speed"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cells with all of these words in their name, separated by commas")
    parser.add_argument("--workers", type=int, default=6, help="processes side by side, for check")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one cell, compiling included")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no cell is begun")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker()
        return 0
    if arguments.part is None:
        parser.error("say --part check or --part speed")
    cells = {"check": check_cells, "speed": speed_cells}[arguments.part]()
    cells = [cell for cell in cells if all(word in cell for word in arguments.only.split(","))]
    if arguments.list:
        print("\n".join(cells))
        return 0
    if arguments.out is None:
        parser.error("say --out FILE")
    import torch
    import triton

    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; both parts run on one")
    report: dict[str, Any] = {
        "command": f"python measurements/hopper_backward.py --part {arguments.part}",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
    }
    answers: list[dict[str, Any]] = []
    deadline = time.monotonic() + arguments.budget

    def done(answer: dict[str, Any]) -> None:
        answers.append(answer)
        print(line_of(answer), flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report | {"summary": summary(answers), "cells": answers}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")

    left = (cell for cell in cells if time.monotonic() < deadline)
    run(left, 1 if arguments.part == "speed" else arguments.workers, arguments.limit, done)  # type: ignore[arg-type]
    print(json.dumps(summary(answers), indent=1))
    return 0 if answers and all(a["ok"] for a in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
