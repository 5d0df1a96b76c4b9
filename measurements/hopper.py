"""Check and time the Hopper forward on an H100 or H200; one JSON file, one line a cell.

    python measurements/hopper.py --part check --out F.json      o and lse against the float64 oracle, repeats
    python measurements/hopper.py --part speed --out F.json      TFLOP/s beside SDPA's cuDNN and FA2 (and FA3, if there)

check    o and lse under the suite's bound and noise floor (pytest_flashattn.judge): head dims, masks, dtypes, both
         forms, ragged and unequal lengths, groups, rows without keys, layouts, scores that outgrow a frozen maximum;
         then 200 calls, bit-identical. The output's memory held NaN before.
speed    16k tokens, hidden 2048, D 64, 128, 256, causal and not, N 512 … 16384: medians, the candidates taking turns,
         cold L2, ratios to the peers of the same process; what ragged lengths and groups lose; what a call costs the
         host; what the frozen maximum costs where all must be repeated.

Cells run in worker processes (cells.py). Those of `check`, and those that compile ahead of `speed`, run side by side
(--workers); `speed` has one. What else is proved of these kernels: hopper_proof.py.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cells import Answer, Script, counted, main

FORMS = ("online", "freeze")
DTYPES_AND_FORMS = (("bf16", "freeze"), ("bf16", "online"), ("fp16", "online"))
REPEATS = 200
LENGTHS = (8192, 2048, 512, 16384, 4096, 1024)

# The fragments of a case's id around its head dim, by name.
SHAPES = {
    "even": "b2-h4-q1024-k1024",
    "ragged-1": "b1-h3-q1023-k1023",
    "ragged+1": "b1-h3-q513-k513",
    "wide": "b1-h2-q2048-k2048",
    "wide-ragged": "b1-h2-q2049-k2113",
    "wide+1": "b1-h2-q2049-k2049",
    "one": "b2-h2-q1-k1",
    "q1": "b2-h2-q1-k300",
    "k1": "b2-h2-q300-k1",
    "63": "b2-h2-q63-k63",
    "k63": "b1-h2-q200-k63",
    "q>k": "b1-h2-q700-k333",
    "q>k+128": "b1-h2-q640-k384",
    "q<k": "b1-h2-q333-k700",
    "q<k+64": "b1-h2-q256-k320",
    "k+1": "b1-h2-q256-k257",
    "q+1": "b1-h2-q257-k256",
    "127": "b1-h2-q127-k127",
    "129": "b1-h2-q129-k129",
    "quarter": "b1-h2-q255-k1056",
    "quarter+1": "b1-h2-q191-k1057",
    "q1-ragged": "b2-h2-q1-k1025",
    "q65": "b2-h2-q65-k191",
    "k65": "b2-h2-q191-k65",
    "q>>k": "b1-h2-q1000-k257",
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
WIDE_CAUSAL = ("b1-h1-q8001-k8193", "b1-h1-q8193-k8100")
"""The tiles of 192 rows that D 64 has from 8000 on, causal, whose rows and keys are short."""
BF16_ONLY = {"offset", "negoffset"}  # scores of 1e5 are sums of products that fp16 cannot hold


def check_cells() -> list[str]:
    """check FORM CASE INPUTS: every shape × D × causal, bf16 in both forms and fp16; then repeats."""
    problems = [(d, causal) for d in (128, 64, 256) for causal in ("", "-causal")]
    cells = []
    for name, shape in SHAPES.items():
        geometry, _, rest = shape.partition("|")
        for dtype, form in DTYPES_AND_FORMS:
            if dtype == "fp16" and name in BF16_ONLY:
                continue
            for d, causal in problems:
                cells.append(f"check {form} {dtype}-{geometry}-d{d}{causal}{'-' + rest if rest else ''} drawn")
    for geometry in WIDE_CAUSAL:
        cells += [f"check {form} {dtype}-{geometry}-d64-causal drawn" for dtype, form in DTYPES_AND_FORMS]
    for d, causal in problems:
        for n in (1025, 1100):
            cells += [f"check freeze bf16-b2-h4-q{n}-k{n}-d{d}{causal} {inputs}" for inputs in ("late", "huge")]
        for n in (1000, 1025):
            cells += [f"repeat {form} bf16-b4-h8-kv4-q{n}-k{n}-d{d}{causal} drawn" for form in FORMS]
        cells.append(f"repeat freeze bf16-b2-h4-q1000-k1000-d{d}{causal} late")
    return cells


def warm_cells() -> list[str]:
    """warm D CAUSAL N DTYPE FORM: one for each kernel that the speed cells need."""
    lengths = {128: (8192, 8191, 8193), 64: (8192, 8191, 8193, 512, 511, 513), 256: (8192, 8191, 8193)}
    problems = [(d, causal, n) for d in lengths for causal in (0, 1) for n in lengths[d]]
    cells = [f"warm {d} {causal} {n} bf16 {form}" for d, causal, n in problems for form in FORMS]
    return cells + [f"warm {d} {causal} {n} fp16 online" for d, causal, n in problems if n % 2 == 0]


def speed_cells() -> list[str]:
    problems = [(d, causal) for d in (128, 64, 256) for causal in (0, 1)]
    cells = [f"speed {d} {causal} {n} bf16" for n in LENGTHS for d, causal in problems]
    cells += [f"loss {d} {causal} {n} bf16" for n in (8192, 2048) for d, causal in problems]
    cells += [f"speed {d} {causal} {n} fp16" for n in (8192, 2048) for d, causal in problems]
    return [*cells, *(f"late {d} {causal} 8192 bf16" for d, causal in problems), "host 128 1 512 bf16"]


# What a worker does.


def run_cell(cell: str) -> Answer:
    kind, *words = cell.split()
    if kind in ("check", "repeat"):
        return {"check": check, "repeat": repeat}[kind](*words)
    d, causal, n, dtype, *rest = words
    what: dict[str, Callable[..., Answer]] = {
        "warm": warm, "speed": speed, "loss": loss, "late": late, "host": host
    }  # fmt: skip
    return what[kind](int(d), bool(int(causal)), int(n), dtype, *rest)


def problem(case_id: str, inputs: str) -> tuple[Any, Any]:
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


def check(form: str, case_id: str, inputs: str) -> Answer:
    """o and lse of the kernel in one of FORMS, judged."""
    from reference_kernels.hopper import forward

    case, x = problem(case_id, inputs)
    return judge(partial(forward, form=form), case, x, floor=inputs == "drawn")  # type: ignore[arg-type]


def judge(kernel: Callable[..., tuple[Any, Any]], case: Any, x: Any, *, floor: bool = True) -> Answer:
    """o and lse of kernel(q, k, v, scale=, causal=): the worst error as a share of the limit, and of the noise floor.

    floor: the emulator knows neither outsized inputs nor how they round.
    """
    import torch

    import oracles
    from pytest_flashattn.judge import against_bound, against_noise
    from pytest_flashattn.tolerances import limits

    poison = [torch.full_like(x.q, math.nan), torch.full(x.q.shape[:3], math.nan, device="cuda")]
    del poison  # the allocator hands the same memory to o and lse
    o, lse = kernel(x.q, x.k, x.v, scale=case.scale, causal=case.causal)
    torch.cuda.synchronize()
    truth = oracles.evaluate(x.q, x.k, x.v, x.spec(), arithmetic=oracles.Arithmetic.of(x.q.dtype))
    allowed = limits("o", case)
    measures = [against_bound("o", o, truth["o"], allowed.lam)]
    measures.append(against_bound("lse", lse, truth["lse"], limits("lse", case).lam))
    if floor:
        noise = oracles.emulate(x.q, x.k, x.v, x.spec())
        measures += against_noise("o", o, truth["o"], noise["o"], tensor=allowed.tensor, block=allowed.block)
    return {
        "ok": all(m.ratio <= 1 for m in measures),
        "ratios": {f"{m.quantity} {m.rule}": m.ratio if math.isfinite(m.ratio) else str(m.ratio) for m in measures},
        "notes": [f"{m.quantity} {m.rule}: {m.note}" for m in measures if not m.ratio <= 1],
    }


def repeat(form: str, case_id: str, inputs: str) -> Answer:
    """How many of REPEATS calls differ from the first in any bit."""
    from reference_kernels.hopper import forward

    case, x = problem(case_id, inputs)
    return repeated(partial(forward, x.q, x.k, x.v, causal=case.causal, form=form), REPEATS)  # type: ignore[arg-type]


def repeated(call: Callable[[], Any], times: int) -> Answer:
    """How many of so many calls differ from the first in any bit of any tensor that they return."""
    import torch

    first = call()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        wrong += torch.stack([(a != b).any() for a, b in zip(call(), first, strict=True)]).any().long()
    return {"ok": not int(wrong), "calls": times, "differing": int(wrong)}


def tensors(d: int, n: int, dtype: str, *, group: int = 1, batch: int | None = None) -> list[Any]:
    import torch
    from kernels import HIDDEN, TOKENS

    torch.manual_seed(0)
    batch = batch or max(1, TOKENS // n)
    heads = HIDDEN // d
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return [torch.randn(batch, h, n, d, device="cuda", dtype=kind) for h in (heads, heads // group, heads // group)]


def flops_of(q: Any, causal: bool) -> float:
    batch, heads, n, d = q.shape
    return 4.0 * batch * heads * n * n * d * (0.5 if causal else 1.0)


def warm(d: int, causal: bool, n: int, dtype: str, form: str) -> Answer:
    """Compile a kernel, into the cache on disk, by one small call in the tile of length n, as ragged as n is."""
    import torch

    from reference_kernels.hopper import forward
    from reference_kernels.hopper.configs import lookup

    q, k, v = tensors(d, 255 + (n + 1) % 256, dtype, batch=1)
    forward(q, k, v, causal=causal, form=form, config=lookup(d, causal=causal, lq=n, lk=n))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    return {"ok": True}


def speed(d: int, causal: bool, n: int, dtype: str) -> Answer:
    """TFLOP/s of the forms and of the peers, and the ratios; all outputs must agree with cuDNN's."""
    import torch
    from kernels import Clock

    from pytest_flashattn import peers
    from reference_kernels.hopper import forward

    q, k, v = tensors(d, n, dtype)
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
        swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        peer_calls["fa3"] = partial(peers.fa3, *swapped, causal=causal)
        peer_calls["fa3"]()
    except Exception as error:  # not installed, or built without this dtype
        peer_calls.pop("fa3", None)
        print(f"no FA3: {error}", file=sys.stderr)
    want = peer_calls["cudnn"]()
    off = {name: float((call()[0].float() - want.float()).abs().max()) for name, call in calls.items()}
    calls |= peer_calls
    times = Clock().medians(calls)
    tflops = {name: round(flops_of(q, causal) / ms / 1e9, 1) for name, ms in times.items()}
    ratios = {
        f"{form}/{peer}": round(times[peer] / times[form], 4) for form in times if form in FORMS for peer in peer_calls
    }
    torch.cuda.synchronize()
    return {"ok": all(x < 5e-2 for x in off.values()), "tflops": tflops, "ratios": ratios, "off": off, "ms": times}


def loss(d: int, causal: bool, n: int, dtype: str) -> Answer:
    """Share of the even, ungrouped problem's TFLOP/s that ragged lengths and 8 heads to a kv head reach."""
    from kernels import TOKENS, Clock

    from reference_kernels.hopper import forward

    batch = TOKENS // n
    problems = {
        "even": tensors(d, n, dtype),
        "minus": tensors(d, n - 1, dtype, batch=batch),
        "plus": tensors(d, n + 1, dtype, batch=batch),
        "gqa8": tensors(d, n, dtype, group=8),
    }
    times = Clock().medians({name: partial(forward, *x, causal=causal) for name, x in problems.items()})
    tflops = {name: round(flops_of(problems[name][0], causal) / ms / 1e9, 1) for name, ms in times.items()}
    return {"ok": True, "tflops": tflops, "ratios": {f"{x}/even": round(tflops[x] / tflops["even"], 4) for x in times}}


def late(d: int, causal: bool, n: int, dtype: str) -> Answer:
    """What the frozen maximum costs where every CTA must repeat its tiles, and where none must."""
    from kernels import Clock

    from reference_kernels.hopper import forward

    q, k, v = tensors(d, n, dtype)
    bad = k.clone()
    bad[:, :, :-256] *= 60
    calls: dict[str, Callable[[], Any]] = {
        "online": partial(forward, q, bad, v, causal=causal, form="online"),
        "freeze": partial(forward, q, k, v, causal=causal, form="freeze"),
        "repeated": partial(forward, q, bad, v, causal=causal, form="freeze"),
    }
    times = Clock().medians(calls)
    tflops = {name: round(flops_of(q, causal) / ms / 1e9, 1) for name, ms in times.items()}
    return {"ok": True, "tflops": tflops, "ratios": {"repeated/online": round(times["online"] / times["repeated"], 4)}}


def host(d: int, causal: bool, n: int, dtype: str) -> Answer:
    """Microseconds of one call on the host, the device idle, without waiting for it."""
    import torch

    from reference_kernels.hopper import forward

    q, k, v = tensors(d, n, dtype, batch=1)
    times = []
    for _ in range(200):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        forward(q, k, v, causal=causal)
        times.append(1e6 * (time.perf_counter() - begin))
    return {"ok": True, "microseconds": round(statistics.median(times[20:]), 1)}


def summary(answers: list[Answer]) -> dict[str, Any]:
    """How many cells are good; the geometric mean and the least of the ratios, by dtype, form and peer."""
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
    return counted(answers, ratios)


SCRIPT = Script(
    __file__,
    __doc__,
    parts={"check": check_cells, "speed": speed_cells},
    answer=run_cell,
    summary=summary,
    side_by_side=frozenset({"check"}),
    ahead={"speed": warm_cells},
)

if __name__ == "__main__":
    sys.exit(main(SCRIPT))
