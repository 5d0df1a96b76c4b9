"""Check and time the FP8 kernels on an H100 or H200; one JSON file, one line a cell.

    python measurements/fp8.py --part check --out F.json         o and lse against the float64 oracle, repeats
    python measurements/fp8.py --part candidates --out F.json    the same of the candidates for the table of tiles
    python measurements/fp8.py --part speed --out F.json         TFLOP/s beside our bf16 forward and FP8 peers
    python measurements/fp8.py --part tiles --out F.json         TFLOP/s of the candidates
    python measurements/fp8.py --part quantisers --out F.json    GB/s of the quantisers beside a copy

check       o and lse under the suite's bound and noise floor, for the arithmetic of each form (fp8_forms.py): head
            dims, masks, descales by tensor, head and block, ragged and unequal lengths, groups, rows without keys; 200
            calls, bit-identical. The truth is that of the stored numbers times their descales.
candidates  the same for each tile of `tiles`, on a few of these shapes, with descales by block.
speed       16k tokens, hidden 2048, D 64, 128, 256, causal and not, N 512 … 16384: medians, the candidates taking
            turns, cold L2, ratios to the bf16 forward and to the FP8 peers that could be had: cuDNN through its Python
            frontend, FlashAttention-3. "with quantisers" quantises q, k and v first, q and k rotated where "rotated".
tiles       the Hopper forward in other tiles (fp8_forms.py), as a share of the table's speed and of the bf16 forward's.
quantisers  bytes that must move, over time, as a share of what copying bf16 reaches; by block also other candidates.
            Each must first store what the definition says, bit by bit, or rotated within its rounding.

Cells run in worker processes (cells.py); those of `check`, and those that compile ahead of `speed` and `tiles`, side by
side.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from cells import Answer, Script, counted, main
from fp8_forms import FORMS, candidates, is_interleaved, kernel_named, sums_of
from fp8_quantisers import prepare, quantisers
from hopper import LENGTHS, SHAPES, flops_of, repeated, tensors

PERS = ("tensor", "head", "block")
PROBLEMS = [(d, causal) for d in (128, 64, 256) for causal in (0, 1)]
TOO_FAR = {"offset", "negoffset"}  # scores of 1e5 are more than FP8 with one scale can hold
UNALIGNED = {"padded"}  # to 8 bytes, which the TMA cannot read
REPEATS = 200
FLOOR_ELEMENTS = 1 << 20
"""Scores of a head up to which the emulator, which sums in 14 bits step by step, gives a noise floor."""


def check_cells() -> list[str]:
    """check FORM CASE and repeat FORM CASE. The kind of descale changes from shape to shape."""
    cells = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        geometry, _, rest = shape.partition("|")
        for d, causal in PROBLEMS:
            per = PERS[(number + d // 64 + causal) % len(PERS)]
            words = ["e4m3", geometry, f"d{d}", *["causal"] * causal, f"descale.{per}", *([rest] if rest else [])]
            if name not in TOO_FAR:
                forms = ("plain",) if name in UNALIGNED else FORMS
                cells += [f"check {form} {'-'.join(words)}" for form in forms]
    for d, causal in PROBLEMS:
        case = f"e4m3-b4-h8-kv4-q1000-k1000-d{d}{'-causal' * causal}-descale.block"
        cells += [f"repeat {form} {case}" for form in FORMS]
    return cells


def candidate_cells() -> list[str]:
    """candidate NAME CASE: every tile, dense and causal, with and without tails and diagonals."""
    return [
        f"candidate {name} e4m3-{SHAPES[shape]}-d{d}{'-causal' * causal}-descale.block"
        for shape in ("ragged+1", "even", "q>k+128", "gqa8-ragged")
        for d, causal in PROBLEMS
        for name in candidates(d, bool(causal))
    ]


def warm_cells() -> list[str]:
    return [f"warm {d} {causal} 512 {per}" for d, causal in PROBLEMS for per in ("block", "tensor")]


def speed_cells() -> list[str]:
    """The most telling first: the quantisers' default, long rows."""
    cells = [f"speed {d} {causal} {n} block" for n in (8192, 16384, 4096, 2048, 1024) for d, causal in PROBLEMS]
    return cells + [f"speed {d} 0 8192 tensor" for d in (128, 64, 256)]


def tile_cells() -> list[str]:
    return [f"tiles {d} {causal} {n} block" for n in (8192, 2048) for d, causal in PROBLEMS]


def compile_cells() -> list[str]:
    """compile D CAUSAL NUMBER: one for each kernel that the tiles need."""
    cells = [(number, d, causal) for d, causal in PROBLEMS for number in range(len(candidates(d, bool(causal))))]
    return [f"compile {d} {causal} {number}" for number, d, causal in sorted(cells)]


def quantiser_cells() -> list[str]:
    """quantise D PER HOW: how: "rows", "columns" (transposed), "rotated"."""
    hows = ("rows", "columns", "rotated")
    return [f"quantise {d} {per} {how}" for per in reversed(PERS) for d in (128, 64, 256) for how in hows]


def prepare_cells() -> list[str]:
    """prepare D PER HOW: compile what the quantisers need, and check it, side by side."""
    return [cell.replace("quantise", "prepare") for cell in quantiser_cells()]


def run_cell(cell: str) -> Answer:
    kind, *words = cell.split()
    if kind in ("check", "candidate", "repeat"):
        return {"check": check, "candidate": check, "repeat": repeat}[kind](*words)
    if kind in ("quantise", "prepare"):
        return {"quantise": quantisers, "prepare": prepare}[kind](int(words[0]), *words[1:])
    if kind == "compile":
        return compiled(*map(int, words))
    d, causal, n, per = words
    what: dict[str, Callable[..., Answer]] = {"warm": warm, "speed": speed, "tiles": tiles}
    return what[kind](int(d), bool(int(causal)), int(n), per)


# What a worker does.


def drawn(form: str, case_id: str) -> tuple[Any, Any, dict[str, Any]]:
    """(case, its tensors, the arguments of a kernel by name). V lies in memory by columns."""
    from pytest_flashattn.cases import Case
    from pytest_flashattn.inputs import make_inputs
    from reference_kernels.fp8.hopper.interleaving import interleave_keys
    from reference_kernels.fp8.quantiser import by_columns

    case = Case.parse(case_id)
    x = make_inputs(case, "cuda", "bhsd")
    descales = {f"{name}_descale": getattr(x, f"{name}_descale") for name in "qkv"}
    scale = case.d**-0.5 if case.scale is None else case.scale
    v = interleave_keys(x.v) if is_interleaved(form) else by_columns(x.v)
    return case, x, {"q": x.q, "k": x.k, "v": v, **descales, "scale": scale, "causal": case.causal}


def check(form: str, case_id: str) -> Answer:
    """o and lse: the worst error as a share of the limit, and of the noise floor where there is one."""
    import torch

    import oracles
    from pytest_flashattn.judge import against_bound, against_noise
    from pytest_flashattn.tolerances import limits

    case, x, arguments = drawn(form, case_id)
    poison = [torch.full(x.q.shape, math.nan, device="cuda", dtype=t) for t in (torch.bfloat16, torch.float32)]
    del poison  # the allocator hands the same memory to o and lse
    o, lse = kernel_named(form)(**arguments)
    torch.cuda.synchronize()
    arithmetic = oracles.Arithmetic.of(x.q.dtype, p_scale=256.0, fp8_sums=sums_of(form))
    exact = x.exact()
    truth = oracles.evaluate(*exact, x.spec(), arithmetic=arithmetic)
    allowed = limits("o", case)
    measures = [against_bound("o", o, truth["o"], allowed.lam)]
    measures.append(against_bound("lse", lse, truth["lse"], limits("lse", case).lam))
    if case.q * case.k <= FLOOR_ELEMENTS:
        noise = oracles.emulate(
            *(y.float() for y in exact), x.spec(), p_dtype=x.q.dtype, p_scale=256.0, out_dtype=torch.bfloat16,
            fp8_sums=sums_of(form),
        )  # fmt: skip
        measures += against_noise("o", o, truth["o"], noise["o"], tensor=allowed.tensor, block=allowed.block)
    return {
        "ok": all(m.ratio <= 1 for m in measures),
        "ratios": {f"{m.quantity} {m.rule}": m.ratio if math.isfinite(m.ratio) else str(m.ratio) for m in measures},
        "notes": [f"{m.quantity} {m.rule}: {m.note}" for m in measures if not m.ratio <= 1],
    }


def repeat(form: str, case_id: str) -> Answer:
    _, _, arguments = drawn(form, case_id)
    return repeated(partial(kernel_named(form), **arguments), REPEATS)


def quantised(x: list[Any], per: str, signs: Any = None, *, interleaved: bool = True) -> dict[str, Any]:
    """q, k and v in FP8 with their descales, by the names of a kernel's arguments."""
    from reference_kernels.fp8 import quantise

    found: dict[str, Any] = {}
    for name, tensor in zip("qkv", x, strict=True):
        options: dict[str, Any] = {"signs": signs} if name != "v" else {"transposed": True, "interleaved": interleaved}
        stored, descale = quantise(tensor, per=per, **options)  # type: ignore[arg-type]
        found |= {name: stored, f"{name}_descale": descale}
    return found


def warm(d: int, causal: bool, n: int, per: str) -> Answer:
    """Compile what the speed cells need, into the cache on disk, by small calls."""
    import torch

    from reference_kernels.fp8 import random_signs
    from reference_kernels.hopper import forward
    from reference_kernels.hopper.configs import lookup

    x = tensors(d, n, "bf16", batch=1)
    options = {"scale": d**-0.5, "causal": causal}
    quantised(x, per, random_signs(d, "cuda"))
    arguments = {both: quantised(x, per, interleaved=both) for both in (False, True)}
    for form in FORMS:
        kernel_named(form)(**arguments[is_interleaved(form)], **options)
    for length in LENGTHS:
        forward(*x, causal=causal, config=lookup(d, causal=causal, lq=length, lk=length))
    torch.cuda.synchronize()
    return {"ok": True}


def speed(d: int, causal: bool, n: int, per: str) -> Answer:
    """TFLOP/s of the forms, alone and with the quantisers, of the bf16 forward and of the peers; and the ratios.

    Our outputs must agree with the bf16 forward's of the dequantised inputs to 5 % RMS. Those of the peers, which get
    the same tensors with one descale each, round to FP8 once more: how far they are off is reported.
    """
    import fp8_peers
    import torch
    from kernels import Clock

    from reference_kernels.fp8 import dequantise, random_signs
    from reference_kernels.hopper import forward

    x = tensors(d, n, "bf16")
    signs = random_signs(d, "cuda")
    arguments = {both: quantised(x, per, interleaved=both) for both in (False, True)}
    options: dict[str, Any] = {"scale": d**-0.5, "causal": causal}
    calls: dict[str, Callable[[], Any]] = {
        form: partial(kernel_named(form), **arguments[is_interleaved(form)], **options) for form in FORMS
    }
    peers = fp8_peers.available(quantised(x, "tensor", interleaved=False), **options)
    plain = arguments[False]
    wide = [dequantise(plain[name], plain[f"{name}_descale"], torch.bfloat16) for name in "qkv"]
    want = forward(*wide, causal=causal)[0].float()
    outputs = {name: call()[0].float() for name, call in calls.items()}
    outputs |= {name: o.float() * worth for name, (o, worth) in ((name, call()) for name, call in peers.items())}
    off = {name: float((o - want).norm() / want.norm()) for name, o in outputs.items()}
    right = all(off[name] < 0.05 for name in calls)
    del outputs, want, wide, plain
    calls |= peers
    calls["bf16"] = partial(forward, *x, causal=causal)
    interleaved = kernel_named("interleaved")
    calls["with quantisers"] = lambda: interleaved(**quantised(x, per), **options)
    calls["rotated, with quantisers"] = lambda: interleaved(**quantised(x, per, signs), **options)
    times = Clock().medians(calls)
    tflops = {name: round(flops_of(x[0], causal) / ms / 1e9, 1) for name, ms in times.items()}
    ours = [name for name in times if name != "bf16" and name not in peers]
    ratios = {f"{name}/{other}": round(times[other] / times[name], 4) for name in ours for other in ("bf16", *peers)}
    if peers:
        fastest = min(times[name] for name in peers)
        ratios |= {f"{name}/best peer": round(fastest / times[name], 4) for name in ours}
    torch.cuda.synchronize()
    return {"ok": right, "tflops": tflops, "ratios": ratios, "off": off, "ms": times}


def compiled(d: int, causal: int, number: int) -> Answer:
    """Compile candidate `number` for the two lengths of the tiles, into the cache on disk, by a small call."""
    import torch

    name = list(candidates(d, bool(causal)))[number]
    arguments = quantised(tensors(d, 512, "bf16", batch=1), "block")
    kernel_named(name)(**arguments, scale=d**-0.5, causal=bool(causal))
    torch.cuda.synchronize()
    return {"ok": True}


def tiles(d: int, causal: bool, n: int, per: str) -> Answer:
    """TFLOP/s of the candidates and of the bf16 forward; ratios to the table's tile, and to bf16."""
    from kernels import Clock

    from reference_kernels.hopper import forward

    x = tensors(d, n, "bf16")
    arguments = quantised(x, per) | {"scale": d**-0.5, "causal": causal}
    calls: dict[str, Callable[[], Any]] = {
        name: partial(kernel_named(name), **arguments) for name in candidates(d, causal)
    }
    times = Clock().medians(calls | {"bf16": partial(forward, *x, causal=causal)})
    tflops = {name: round(flops_of(x[0], causal) / ms / 1e9, 1) for name, ms in times.items()}
    ratios = {f"{y}/{other}": round(times[other] / times[y], 4) for other in ("table", "bf16") for y in calls}
    return {"ok": True, "tflops": tflops, "ratios": ratios}


def summary(answers: list[Answer]) -> dict[str, Any]:
    """How many cells are good; the geometric mean and the least of the ratios, by kind, descale, D and length."""
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        kind, *words = answer["cell"].split()
        if "tflops" in answer:
            d, _, n, per = words
            for name, value in answer["ratios"].items():
                groups = [f"{kind} {per} {name}", f"{kind} {per} {name} d{d}"]
                groups += [f"{kind} {per} {name} N >= 4096"] if int(n) >= 4096 else []
                for group in groups:
                    ratios.setdefault(group, []).append(value)
        for name, share in answer.get("shares of copy", {}).items():
            ratios.setdefault(f"{kind} {words[1]} {words[2]} {name} / copy d{words[0]}", []).append(share)
    return counted(answers, ratios)


SCRIPT = Script(
    __file__,
    __doc__,
    parts={
        "check": check_cells,
        "candidates": candidate_cells,
        "speed": speed_cells,
        "tiles": tile_cells,
        "quantisers": quantiser_cells,
    },
    answer=run_cell,
    summary=summary,
    side_by_side=frozenset({"check", "candidates"}),
    ahead={"speed": warm_cells, "tiles": compile_cells, "quantisers": prepare_cells},
)

if __name__ == "__main__":
    sys.exit(main(SCRIPT))
