"""Check and time the Hopper backward on an H100 or H200; one JSON file, one line a cell.

    python measurements/hopper_backward.py --part check --out F.json      errors against the float64 oracle, repeats
    python measurements/hopper_backward.py --part speed --out F.json      TFLOP/s beside SDPA's cuDNN and FA2

check    dq, dk, dv under the suite's bound and noise floor (pytest_flashattn.judge), each form of each head dimension;
         then 200 calls of the deterministic form, bit-identical. o and lse are the plain Triton forward's.
speed    16k tokens, hidden 2048, bf16, D 64, 128, 256, causal and not, N 512 … 16384: medians, the candidates taking
         turns, cold L2, ratios to the peers of the same process.

Cells run in worker processes (cells.py). Those of `check` run side by side (--workers), since most of their time is
compiling; `speed` has one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from cells import Answer, Script, counted, main

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


def run_cell(cell: str) -> Answer:
    kind, *words = cell.split()
    if kind == "speed":
        return speed(*map(int, words))
    form, case, lse = words
    return {"check": check, "repeat": repeat}[kind](form, case, lse == "1")


def problem(case_id: str, with_dlse: bool) -> tuple[Any, Any, float, tuple[Any, ...]]:
    """(case, inputs, scale, the tensors that backward takes), o and lse by the plain Triton forward."""
    from pytest_flashattn.cases import Case
    from pytest_flashattn.inputs import make_inputs
    from reference_kernels.forward import forward

    case = Case.parse(case_id)
    x = make_inputs(case, "cuda", "bhsd")
    scale = case.d**-0.5 if case.scale is None else case.scale
    o, lse = forward(x.q, x.k, x.v, scale=scale, right=0 if case.causal else None)
    return case, x, scale, (x.q, x.k, x.v, o, lse, x.dout, x.dlse if with_dlse else None)


def check(form: str, case_id: str, with_dlse: bool) -> Answer:
    """dq, dk, dv of the kernels in one of FORMS, judged."""
    from reference_kernels.hopper import backward as kernels

    case, x, scale, tensors = problem(case_id, with_dlse)
    got = kernels.backward(*tensors, scale=scale, causal=case.causal, deterministic=form == "twopass")
    return judge(got, case, x, with_dlse)


def judge(got: tuple[Any, ...], case: Any, x: Any, with_dlse: bool) -> Answer:
    """Every gradient of the case on inputs x: its worst error as a share of the limit, and of the noise floor."""
    import torch

    import oracles
    from pytest_flashattn.inputs import TORCH_DTYPES
    from pytest_flashattn.judge import against_bound, against_noise
    from pytest_flashattn.tolerances import limits

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


def repeat(form: str, case_id: str, with_dlse: bool) -> Answer:
    """How many of REPEATS calls differ from the first in any bit."""
    from hopper import repeated

    from reference_kernels.hopper import backward as kernels

    case, _, scale, tensors = problem(case_id, with_dlse)
    deterministic = form == "twopass"
    call = partial(kernels.backward, *tensors, scale=scale, causal=case.causal, deterministic=deterministic)
    return repeated(call, REPEATS)


def speed(d: int, causal: int, n: int) -> Answer:
    """TFLOP/s of both forms and of the peers, and the ratios."""
    import torch
    from kernels import HIDDEN, TOKENS, Clock, tensors

    from pytest_flashattn import peers
    from reference_kernels.forward import forward
    from reference_kernels.hopper import backward as hopper

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
    times = Clock().medians(calls, rounds=3, launches=5)
    flops = 10 * TOKENS * n * HIDDEN * (0.5 if causal else 1.0)
    tflops = {name: round(flops / ms / 1e9, 1) for name, ms in times.items()}
    ratios = {
        f"{form}/{peer}": round(times[peer] / times[form], 3)
        for form in times
        if form in FORMS
        for peer in ("cudnn", "fa2")
    }
    return {"ok": True, "ms": times, "tflops": tflops, "ratios": ratios}


def summary(answers: list[Answer]) -> dict[str, Any]:
    """How many cells are good, and the geometric means of the ratios by form, peer and head dimension."""
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        if "tflops" in answer:
            for name, value in answer["ratios"].items():
                for group in (name, f"{name} d{answer['cell'].split()[1]}"):
                    ratios.setdefault(group, []).append(value)
    return counted(answers, ratios)


SCRIPT = Script(
    __file__,
    __doc__,
    parts={"check": check_cells, "speed": speed_cells},
    answer=run_cell,
    summary=summary,
    side_by_side=frozenset({"check"}),
    workers=6,
    limit=150.0,
)

if __name__ == "__main__":
    sys.exit(main(SCRIPT))
