"""Check and time the Hopper forward on an H100 or H200; one JSON file, one line a cell.

    python measurements/hopper.py --part check --out F.json      o and lse against the float64 oracle, repeats
    python measurements/hopper.py --part speed --out F.json      TFLOP/s beside SDPA's cuDNN and FA2 (and FA3, if there)
    python measurements/hopper.py --part stages --out F.json     the three stages that lead to it, checked and timed

check    o and lse under the suite's bound and noise floor (pytest_flashattn.judge): head dims, masks, dtypes, both
         forms, ragged and unequal lengths, groups, rows without keys, layouts, scores that outgrow a frozen maximum;
         then 200 calls, bit-identical. The output's memory held NaN before.
speed    16k tokens, hidden 2048, D 64, 128, 256, causal and not, N 512 … 16384: medians, the candidates taking turns,
         cold L2, ratios to the peers of the same process; what ragged lengths and groups lose; what a call costs the
         host; what the frozen maximum costs where all must be repeated.
stages   stage1, stage2, stage3 and the full kernel in both forms: two shapes under the same rules as check; then bf16,
         D 128, N 2048 and 8192, causal and not, taking turns with cuDNN.

Cells run in worker processes, which print a line of JSON for each. A cell that fails, dies or exceeds its time limit is
reported as such, and its worker replaced: no cell loses another. The file is written anew after each cell. Workers of
`check`, and those that compile ahead of `speed`, run side by side (--workers); `speed` and `stages` have one.
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
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "measurements")]

Answer = dict[str, Any]
FORMS = ("online", "freeze")
STAGES = ("stage1", "stage2", "stage3")
REPEATS = 200
LENGTHS = (8192, 2048, 512, 16384, 4096, 1024)

# The fragments of a case's id around its head dim, by name.
SHAPES = {
    "even": "b2-h4-q1024-k1024",
    "ragged-1": "b1-h3-q1023-k1023",
    "ragged+1": "b1-h3-q513-k513",
    "wide": "b1-h2-q2048-k2048",
    "wide-ragged": "b1-h2-q2049-k2113",
    "one": "b2-h2-q1-k1",
    "q1": "b2-h2-q1-k300",
    "k1": "b2-h2-q300-k1",
    "63": "b2-h2-q63-k63",
    "k63": "b1-h2-q200-k63",
    "q>k": "b1-h2-q700-k333",
    "q>k+128": "b1-h2-q640-k384",
    "q<k": "b1-h2-q333-k700",
    "q<k+64": "b1-h2-q256-k320",
    "gqa8": "b2-h16-kv2-q512-k512",
    "gqa8-ragged": "b2-h8-kv1-q391-k517",
    "swapped": "b2-h4-q320-k320|swapped",
    "qkv": "b2-h4-kv2-q260-k260|qkv",
    "padded": "b2-h4-q200-k330|padded",
    "cache": "b2-h4-q200-k330|cache",
    "ascending": "b1-h2-q400-k900|ascending",
    "descending": "b1-h2-q400-k900|descending",
    "peaked": "b1-h2-q500-k500|peaked",
    "offset": "b1-h2-q300-k300|offset",
    "negoffset": "b1-h2-q300-k300|negoffset",
    "sinktoken": "b1-h2-q500-k500|sinktoken",
    "many": "b33-h8-q130-k130",
    "long": "b1-h2-q4096-k4096",
}
BF16_ONLY = {"offset", "negoffset"}  # scores of 1e5 are sums of products that fp16 cannot hold


def check_cells() -> list[str]:
    """check FORM CASE INPUTS: every shape × D × causal, bf16 in both forms and fp16; then repeats."""
    problems = [(d, causal) for d in (128, 64, 256) for causal in ("", "-causal")]
    cells = []
    for name, shape in SHAPES.items():
        geometry, _, rest = shape.partition("|")
        for dtype, form in (("bf16", "freeze"), ("bf16", "online"), ("fp16", "online")):
            if dtype == "fp16" and name in BF16_ONLY:
                continue
            for d, causal in problems:
                cells.append(f"check {form} {dtype}-{geometry}-d{d}{causal}{'-' + rest if rest else ''} drawn")
    for d, causal in problems:
        cells += [f"check freeze bf16-b2-h4-q1100-k1100-d{d}{causal} {inputs}" for inputs in ("late", "huge")]
        cells += [f"repeat {form} bf16-b4-h8-kv4-q1000-k1000-d{d}{causal} drawn" for form in FORMS]
        cells.append(f"repeat freeze bf16-b2-h4-q1000-k1000-d{d}{causal} late")
    return cells


def warm_cells() -> list[str]:
    """warm D CAUSAL N DTYPE FORM: one for each kernel that the speed cells need."""
    problems = [(d, causal, n) for d in (128, 64, 256) for causal in (0, 1) for n in (8192, 8191, 512)]
    cells = [f"warm {d} {causal} {n} bf16 {form}" for d, causal, n in problems for form in FORMS]
    return cells + [f"warm {d} {causal} {n} fp16 online" for d, causal, n in problems if n != 8191]


def speed_cells() -> list[str]:
    problems = [(d, causal) for d in (128, 64, 256) for causal in (0, 1)]
    cells = [f"speed {d} {causal} {n} bf16" for n in LENGTHS for d, causal in problems]
    cells += [f"loss {d} {causal} {n} bf16" for n in (8192, 2048) for d, causal in problems]
    cells += [f"speed {d} {causal} {n} fp16" for n in (8192, 2048) for d, causal in problems]
    return [*cells, *(f"late {d} {causal} 8192 bf16" for d, causal in problems), "host 128 1 512 bf16"]


def stage_cells() -> list[str]:
    """stage NAME CASE: each at two shapes; then staged D CAUSAL N DTYPE."""
    shapes = ("bf16-b2-h4-q1024-k1024-d128-causal", "fp16-b1-h8-kv2-q512-k768-d64")
    cells = [f"stage {name} {case}" for case in shapes for name in (*STAGES, *FORMS)]
    cells.remove(f"stage freeze {shapes[1]}")  # the frozen maximum is for bf16
    return cells + [f"staged 128 {causal} {n} bf16" for n in (2048, 8192) for causal in (0, 1)]


# What a worker does.


def run_cell(cell: str) -> Answer:
    kind, *words = cell.split()
    if kind in ("check", "repeat", "stage"):
        return {"check": check, "repeat": repeat, "stage": stage}[kind](*words)
    d, causal, n, dtype, *rest = words
    what: dict[str, Callable[..., Answer]] = {
        "warm": warm, "speed": speed, "loss": loss, "late": late, "host": host, "staged": staged
    }  # fmt: skip
    return what[kind](int(d), bool(int(causal)), int(n), dtype, *rest)


def _problem(case_id: str, inputs: str) -> tuple[Any, Any]:
    """(case, its tensors). "late": all keys but the last 256 score up to 60 times higher, so that a frozen maximum must
    be given up. "huge": by 2^65 only, but products with v then overflow."""
    from pytest_flashattn.cases import Case
    from pytest_flashattn.inputs import make_inputs

    case = Case.parse(case_id)
    x = make_inputs(case, "cuda", "bhsd")
    if inputs != "drawn":
        factor, size = {"late": (60, 1.0), "huge": (15, 2.0**70)}[inputs]
        k = x.k.clone()
        k[:, :, :-256] *= factor
        x = x.with_(k=k, v=x.v * size)
    return case, x


def kernel_named(name: str) -> Callable[..., tuple[Any, Any]]:
    """One of STAGES, or the full kernel in one of FORMS: (q, k, v, causal=, scale=) -> o, lse."""
    import importlib

    from reference_kernels.hopper import forward, stages

    if name in FORMS:
        return partial(forward, form=name)  # type: ignore[arg-type]
    return partial(stages.attention, importlib.import_module(f"reference_kernels.hopper.{name}").STAGE)


def stage(name: str, case_id: str) -> Answer:
    return check(name, case_id, "drawn")


def check(kernel: str, case_id: str, inputs: str) -> Answer:
    """o and lse judged: the worst error as a share of the limit, and of the noise floor. kernel: as kernel_named."""
    import torch

    import oracles
    from pytest_flashattn.judge import against_bound, against_noise
    from pytest_flashattn.tolerances import limits

    case, x = _problem(case_id, inputs)
    poison = [torch.full_like(x.q, math.nan), torch.full(x.q.shape[:3], math.nan, device="cuda")]
    del poison  # the allocator hands the same memory to o and lse
    o, lse = kernel_named(kernel)(x.q, x.k, x.v, scale=case.scale, causal=case.causal)
    torch.cuda.synchronize()
    truth = oracles.evaluate(x.q, x.k, x.v, x.spec(), arithmetic=oracles.Arithmetic.of(x.q.dtype))
    allowed = limits("o", case)
    measures = [against_bound("o", o, truth["o"], allowed.lam)]
    measures.append(against_bound("lse", lse, truth["lse"], limits("lse", case).lam))
    if inputs == "drawn":  # the emulator knows neither outsized inputs nor how they round
        floor = oracles.emulate(x.q, x.k, x.v, x.spec())
        measures += against_noise("o", o, truth["o"], floor["o"], tensor=allowed.tensor, block=allowed.block)
    return {
        "ok": all(m.ratio <= 1 for m in measures),
        "ratios": {f"{m.quantity} {m.rule}": m.ratio if math.isfinite(m.ratio) else str(m.ratio) for m in measures},
        "notes": [f"{m.quantity} {m.rule}: {m.note}" for m in measures if not m.ratio <= 1],
    }


def repeat(form: str, case_id: str, inputs: str) -> Answer:
    """How many of REPEATS calls differ from the first in any bit."""
    import torch

    from reference_kernels.hopper import forward

    case, x = _problem(case_id, inputs)
    call = partial(forward, x.q, x.k, x.v, causal=case.causal, form=form)  # type: ignore[arg-type]
    o, lse = call()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        again, lse_again = call()
        wrong += ((again != o).any() | (lse_again != lse).any()).long()
    return {"ok": not int(wrong), "calls": REPEATS, "differing": int(wrong)}


def _tensors(d: int, n: int, dtype: str, *, group: int = 1, batch: int | None = None) -> list[Any]:
    import torch
    from kernels import HIDDEN, TOKENS

    torch.manual_seed(0)
    batch = batch or max(1, TOKENS // n)
    heads = HIDDEN // d
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return [torch.randn(batch, h, n, d, device="cuda", dtype=kind) for h in (heads, heads // group, heads // group)]


def _flops(q: Any, causal: bool) -> float:
    batch, heads, n, d = q.shape
    return 4.0 * batch * heads * n * n * d * (0.5 if causal else 1.0)


def warm(d: int, causal: bool, n: int, dtype: str, form: str) -> Answer:
    """Compile a kernel, into the cache on disk, by one small call in the tile of length n."""
    import torch

    from reference_kernels.hopper import forward
    from reference_kernels.hopper.configs import lookup

    q, k, v = _tensors(d, 256 if n % 2 == 0 else 255, dtype, batch=1)
    forward(q, k, v, causal=causal, form=form, config=lookup(d, causal=causal, lq=n, lk=n))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    return {"ok": True}


def speed(d: int, causal: bool, n: int, dtype: str) -> Answer:
    """TFLOP/s of the forms and of the peers, and the ratios; all outputs must agree with cuDNN's."""
    import torch
    from kernels import Clock

    from pytest_flashattn import peers
    from reference_kernels.hopper import forward

    q, k, v = _tensors(d, n, dtype)
    calls: dict[str, Callable[[], Any]] = {
        form: partial(forward, q, k, v, causal=causal, form=form)  # type: ignore[arg-type]
        for form in FORMS
        if dtype == "bf16" or form == "online"
    }
    peer_calls: dict[str, Callable[[], Any]] = {
        "cudnn": partial(peers.sdpa_cudnn, q, k, v, causal=causal),
        "fa2": partial(peers.sdpa_flash, q, k, v, causal=causal),
    }
    try:
        from flash_attn_interface import flash_attn_func

        swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        peer_calls["fa3"] = partial(flash_attn_func, *swapped, causal=causal)
        peer_calls["fa3"]()
    except Exception as error:
        peer_calls.pop("fa3", None)
        print(f"no FA3: {error}", file=sys.stderr)
    want = peer_calls["cudnn"]()
    off = {name: float((call()[0].float() - want.float()).abs().max()) for name, call in calls.items()}
    calls |= peer_calls
    times = Clock().medians(calls)
    tflops = {name: round(_flops(q, causal) / ms / 1e9, 1) for name, ms in times.items()}
    ratios = {
        f"{form}/{peer}": round(times[peer] / times[form], 4) for form in times if form in FORMS for peer in peer_calls
    }
    torch.cuda.synchronize()
    return {"ok": all(x < 5e-2 for x in off.values()), "tflops": tflops, "ratios": ratios, "off": off, "ms": times}


def staged(d: int, causal: bool, n: int, dtype: str) -> Answer:
    """TFLOP/s of the stages, the full kernel and cuDNN, taking turns, and what each stage gains on the one before."""
    import torch
    from kernels import Clock

    from pytest_flashattn import peers

    q, k, v = _tensors(d, n, dtype)
    names = (*STAGES, *FORMS)
    calls: dict[str, Callable[[], Any]] = {name: partial(kernel_named(name), q, k, v, causal=causal) for name in names}
    peer = partial(peers.sdpa_cudnn, q, k, v, causal=causal)
    want = peer()
    off = {name: float((call()[0].float() - want.float()).abs().max()) for name, call in calls.items()}
    times = Clock().medians(calls | {"cudnn": peer})
    tflops = {name: round(_flops(q, causal) / ms / 1e9, 1) for name, ms in times.items()}
    pairs = [(name, "cudnn") for name in names] + list(zip(names[1:], names[:-1], strict=True))
    ratios = {f"{name}/{other}": round(times[other] / times[name], 4) for name, other in pairs}
    torch.cuda.synchronize()
    return {"ok": all(x < 5e-2 for x in off.values()), "tflops": tflops, "ratios": ratios, "off": off, "ms": times}


def loss(d: int, causal: bool, n: int, dtype: str) -> Answer:
    """Share of the even, ungrouped problem's TFLOP/s that ragged lengths and 8 heads to a kv head reach."""
    from kernels import TOKENS, Clock

    from reference_kernels.hopper import forward

    batch = TOKENS // n
    problems = {
        "even": _tensors(d, n, dtype),
        "minus": _tensors(d, n - 1, dtype, batch=batch),
        "plus": _tensors(d, n + 1, dtype, batch=batch),
        "gqa8": _tensors(d, n, dtype, group=8),
    }
    times = Clock().medians({name: partial(forward, *x, causal=causal) for name, x in problems.items()})
    tflops = {name: round(_flops(problems[name][0], causal) / ms / 1e9, 1) for name, ms in times.items()}
    return {"ok": True, "tflops": tflops, "ratios": {f"{x}/even": round(tflops[x] / tflops["even"], 4) for x in times}}


def late(d: int, causal: bool, n: int, dtype: str) -> Answer:
    """What the frozen maximum costs where every CTA must repeat its tiles, and where none must."""
    from kernels import Clock

    from reference_kernels.hopper import forward

    q, k, v = _tensors(d, n, dtype)
    bad = k.clone()
    bad[:, :, :-256] *= 60
    calls: dict[str, Callable[[], Any]] = {
        "online": partial(forward, q, bad, v, causal=causal, form="online"),
        "freeze": partial(forward, q, k, v, causal=causal, form="freeze"),
        "repeated": partial(forward, q, bad, v, causal=causal, form="freeze"),
    }
    times = Clock().medians(calls)
    tflops = {name: round(_flops(q, causal) / ms / 1e9, 1) for name, ms in times.items()}
    return {"ok": True, "tflops": tflops, "ratios": {"repeated/online": round(times["online"] / times["repeated"], 4)}}


def host(d: int, causal: bool, n: int, dtype: str) -> Answer:
    """Microseconds of one call on the host, the device idle, without waiting for it."""
    import torch

    from reference_kernels.hopper import forward

    q, k, v = _tensors(d, n, dtype, batch=1)
    times = []
    for _ in range(200):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        forward(q, k, v, causal=causal)
        times.append(1e6 * (time.perf_counter() - begin))
    return {"ok": True, "microseconds": round(statistics.median(times[20:]), 1)}


def worker() -> None:
    """Answer cells from stdin, one JSON object each. After an error of the GPU this process is of no more use."""
    for line in sys.stdin:
        cell, started, poisoned = line.strip(), time.monotonic(), False
        try:
            answer = run_cell(cell)
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            answer = {"ok": False, "error": message}
            poisoned = "cuda" in message.lower()
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
            self.process.kill()
            self.process.wait()
            return {"cell": cell, "ok": False, "error": f"no answer within {limit:g} s"}
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.kill()
            return {"cell": cell, "ok": False, "error": f"the worker died (exit status {self.process.wait()})"}
        answer: Answer = json.loads(line)
        if "cuda" in answer.get("error", "").lower():
            self.process.kill()
            self.process.wait()
        return answer

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def run(cells: Iterable[str], workers: int, limit: float, done: Callable[[Answer], None]) -> None:
    """Every cell by one of `workers` processes, `done` with each answer, one at a time."""
    pending = iter(cells)
    lock = threading.Lock()

    def serve() -> None:
        process = None
        while True:
            with lock:
                cell = next(pending, None)
            if cell is None:
                break
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


def line_of(answer: Answer) -> str:
    head = f"{'ok  ' if answer['ok'] else 'FAIL'} {answer['cell']}"
    if "error" in answer:
        return f"{head}: {answer['error']}"
    if "tflops" in answer:
        shown = "  ".join(f"{name} {value:6.1f}" for name, value in answer["tflops"].items())
        return f"{head:24} {shown}   " + "  ".join(f"{name} {value:.3f}" for name, value in answer["ratios"].items())
    if "ratios" in answer:
        shown = "  ".join(f"{name} {float(value):.2f}" for name, value in answer["ratios"].items())
        return "  ".join([f"{head}: {shown}", *answer["notes"]])
    rest = {name: value for name, value in answer.items() if name not in ("cell", "ok")}
    return f"{head}: " + "  ".join(f"{name} {value}" for name, value in rest.items())


def summary(answers: list[Answer]) -> dict[str, Any]:
    """How many cells are good; the geometric mean and the least of the ratios, by dtype, form and peer."""
    found: dict[str, Any] = {"cells": len(answers), "ok": sum(a["ok"] for a in answers)}
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        if "tflops" in answer:
            kind, d, _, _, dtype = answer["cell"].split()
            for name, value in answer["ratios"].items():
                for group in (f"{kind} {dtype} {name}", f"{kind} {dtype} {name} d{d}"):
                    ratios.setdefault(group, []).append(value)
            if kind == "speed":
                best = max(answer["tflops"][peer] for peer in ("cudnn", "fa3") if peer in answer["tflops"])
                for form in FORMS:
                    if form in answer["tflops"]:
                        ratios.setdefault(f"{dtype} {form}/better peer", []).append(answer["tflops"][form] / best)
    for name, values in sorted(ratios.items()):
        found[name] = {"geometric mean": round(statistics.geometric_mean(values), 3), "least": round(min(values), 3)}
    return found


PARTS: dict[str, Callable[[], list[str]]] = {"check": check_cells, "speed": speed_cells, "stages": stage_cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cells with all of these words in their name, separated by commas")
    parser.add_argument("--workers", type=int, default=8, help="processes side by side, for check and for compiling")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one cell, compiling included")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no cell is begun")
    parser.add_argument("--cold", action="store_true", help="speed: do not compile ahead")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker()
        return 0
    if arguments.part is None:
        parser.error("say --part check, --part speed or --part stages")
    cells = PARTS[arguments.part]()
    cells = [cell for cell in cells if all(word in cell for word in arguments.only.split(","))]
    if arguments.list:
        print("\n".join(cells))
        return 0
    if arguments.out is None:
        parser.error("say --out FILE")
    import torch
    import triton

    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; all parts run on one")
    report: dict[str, Any] = {
        "command": f"python measurements/hopper.py --part {arguments.part}",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
    }
    answers: list[Answer] = []
    deadline = time.monotonic() + arguments.budget

    def done(answer: Answer) -> None:
        answers.append(answer)
        print(line_of(answer), flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report | {"summary": summary(answers), "cells": answers}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")

    def in_time(cells: list[str]) -> Iterable[str]:
        return (cell for cell in cells if time.monotonic() < deadline)

    if arguments.part == "speed" and not arguments.cold:
        run(in_time(warm_cells()), arguments.workers, arguments.limit, lambda a: print(line_of(a), flush=True))
    run(in_time(cells), arguments.workers if arguments.part == "check" else 1, arguments.limit, done)
    print(json.dumps(summary(answers), indent=1))
    return 0 if answers and all(a["ok"] for a in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
