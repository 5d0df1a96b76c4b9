"""Check and time the FP8 kernels on an H100 or H200; one JSON file, one line a cell.

    python measurements/fp8.py --part check --out F.json         o and lse against the float64 oracle, repeats
    python measurements/fp8.py --part speed --out F.json         TFLOP/s beside our bf16 forward and FP8 peers
    python measurements/fp8.py --part tiles --out F.json         candidates for the table of tiles
    python measurements/fp8.py --part quantisers --out F.json    GB/s of the quantisers beside a copy

check       o and lse under the suite's bound and noise floor, for the arithmetic of each form (FORMS): head dims,
            masks, descales by tensor, head and block, ragged and unequal lengths, groups, rows without keys; 200 calls,
            bit-identical. The truth is that of the stored numbers times their descales.
speed       16k tokens, hidden 2048, D 64, 128, 256, causal and not, N 512 … 16384: medians, the candidates taking
            turns, cold L2, ratios to the bf16 forward and to the FP8 peers that could be had: cuDNN through its Python
            frontend, FlashAttention-3. "with quantisers" quantises q, k and v first, q and k rotated where "rotated".
tiles       the Hopper forward in other tiles, as a share of the table's speed.
quantisers  bytes that must move, over time, as a share of what copying bf16 reaches; by block also in other tiles.

Cells run in worker processes (cells.py); those of `check`, and those that compile ahead of `speed` and `tiles`, side by
side.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from cells import Answer, Script, counted, main
from hopper import LENGTHS, SHAPES, flops_of, repeated, tensors

FORMS = {"promoted": "14 bits a tile", "direct": "14 bits", "plain": "14 bits a tile"}
"""The Hopper forward that adds up P V in float32 block by block, the one that leaves it to the tensor cores, and plain
Triton; and how many bits their sums keep, in the words of oracles.arithmetic."""
PERS = ("tensor", "head", "block")
PROBLEMS = [(d, causal) for d in (128, 64, 256) for causal in (0, 1)]
TOO_FAR = {"offset", "negoffset"}  # scores of 1e5 are more than FP8 with one scale can hold
UNALIGNED = {"padded"}  # to 8 bytes, which the TMA cannot read
REPEATS = 200
FLOOR_ELEMENTS = 1 << 20
"""Scores of a head up to which the emulator, which sums in 14 bits step by step, gives a noise floor."""


def forms_of(d: int) -> list[str]:
    """Two accumulators of 64 x 256 do not fit into the registers."""
    return [form for form in FORMS if form != "promoted" or d < 256]


def check_cells() -> list[str]:
    """check FORM CASE and repeat FORM CASE. The kind of descale changes from shape to shape."""
    cells = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        geometry, _, rest = shape.partition("|")
        for d, causal in PROBLEMS:
            per = PERS[(number + d // 64 + causal) % len(PERS)]
            words = ["e4m3", geometry, f"d{d}", *["causal"] * causal, f"descale.{per}", *([rest] if rest else [])]
            if name not in TOO_FAR:
                forms = ["plain"] if name in UNALIGNED else forms_of(d)
                cells += [f"check {form} {'-'.join(words)}" for form in forms]
    for d, causal in PROBLEMS:
        case = f"e4m3-b4-h8-kv4-q1000-k1000-d{d}{'-causal' * causal}-descale.block"
        cells += [f"repeat {form} {case}" for form in forms_of(d)]
    return cells


def warm_cells() -> list[str]:
    return [f"warm {d} {causal} 512 {per}" for d, causal in PROBLEMS for per in ("tensor", "block")]


def speed_cells() -> list[str]:
    cells = [f"speed {d} {causal} {n} block" for n in LENGTHS for d, causal in PROBLEMS]
    return cells + [f"speed {d} {causal} {n} tensor" for n in (8192, 2048) for d, causal in PROBLEMS]


def tile_cells() -> list[str]:
    return [f"tiles {d} {causal} {n} block" for n in (8192, 2048) for d, causal in PROBLEMS]


def compile_cells() -> list[str]:
    """compile D CAUSAL NUMBER: one for each kernel that the tiles need."""
    return [f"compile {d} {causal} {number}" for number in range(len(candidates(128))) for d, causal in PROBLEMS]


def quantiser_cells() -> list[str]:
    """quantise D PER HOW: how: "rows", "columns" (transposed), "rotated"."""
    hows = ("rows", "columns", "rotated")
    return [f"quantise {d} {per} {how}" for per in reversed(PERS) for d in (128, 64, 256) for how in hows]


def run_cell(cell: str) -> Answer:
    kind, *words = cell.split()
    if kind in ("check", "repeat"):
        return {"check": check, "repeat": repeat}[kind](*words)
    if kind == "quantise":
        return quantisers(int(words[0]), *words[1:])
    if kind == "compile":
        return compiled(*map(int, words))
    d, causal, n, per = words
    what: dict[str, Callable[..., Answer]] = {"warm": warm, "speed": speed, "tiles": tiles}
    return what[kind](int(d), bool(int(causal)), int(n), per)


# What a worker does.


def kernel_named(form: str) -> Callable[..., tuple[Any, Any]]:
    """(q, k, v, q_descale=, k_descale=, v_descale=, scale=, causal=) -> o, lse; one of FORMS."""
    from reference_kernels.fp8 import forward as plain
    from reference_kernels.fp8.hopper import launch
    from reference_kernels.fp8.hopper.configs import TABLE

    def hopper(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        return launch.forward(q, k, v, config=replace(TABLE[q.shape[3]], promote=form == "promoted"), **options)

    return plain.forward if form == "plain" else hopper


def drawn(case_id: str) -> tuple[Any, Any, dict[str, Any]]:
    """(case, its tensors, the arguments of a kernel by name). V lies in memory by columns."""
    from pytest_flashattn.cases import Case
    from pytest_flashattn.inputs import make_inputs
    from reference_kernels.fp8.quantiser import by_columns

    case = Case.parse(case_id)
    x = make_inputs(case, "cuda", "bhsd")
    descales = {f"{name}_descale": getattr(x, f"{name}_descale") for name in "qkv"}
    scale = case.d**-0.5 if case.scale is None else case.scale
    return case, x, {"q": x.q, "k": x.k, "v": by_columns(x.v), **descales, "scale": scale, "causal": case.causal}


def check(form: str, case_id: str) -> Answer:
    """o and lse: the worst error as a share of the limit, and of the noise floor where there is one."""
    import torch

    import oracles
    from pytest_flashattn.judge import against_bound, against_noise
    from pytest_flashattn.tolerances import limits

    case, x, arguments = drawn(case_id)
    poison = [torch.full(x.q.shape, math.nan, device="cuda", dtype=t) for t in (torch.bfloat16, torch.float32)]
    del poison  # the allocator hands the same memory to o and lse
    o, lse = kernel_named(form)(**arguments)
    torch.cuda.synchronize()
    arithmetic = oracles.Arithmetic.of(x.q.dtype, p_scale=256.0, fp8_sums=FORMS[form])
    exact = x.exact()
    truth = oracles.evaluate(*exact, x.spec(), arithmetic=arithmetic)
    allowed = limits("o", case)
    measures = [against_bound("o", o, truth["o"], allowed.lam)]
    measures.append(against_bound("lse", lse, truth["lse"], limits("lse", case).lam))
    if case.q * case.k <= FLOOR_ELEMENTS:
        noise = oracles.emulate(
            *(y.float() for y in exact), x.spec(), p_dtype=x.q.dtype, p_scale=256.0, out_dtype=torch.bfloat16,
            fp8_sums=FORMS[form],
        )  # fmt: skip
        measures += against_noise("o", o, truth["o"], noise["o"], tensor=allowed.tensor, block=allowed.block)
    return {
        "ok": all(m.ratio <= 1 for m in measures),
        "ratios": {f"{m.quantity} {m.rule}": m.ratio if math.isfinite(m.ratio) else str(m.ratio) for m in measures},
        "notes": [f"{m.quantity} {m.rule}: {m.note}" for m in measures if not m.ratio <= 1],
    }


def repeat(form: str, case_id: str) -> Answer:
    _, _, arguments = drawn(case_id)
    return repeated(partial(kernel_named(form), **arguments), REPEATS)


def quantised(x: list[Any], per: str, signs: Any = None) -> dict[str, Any]:
    """q, k and v in FP8 with their descales, by the names of a kernel's arguments."""
    from reference_kernels.fp8 import quantise

    found: dict[str, Any] = {}
    for name, tensor in zip("qkv", x, strict=True):
        own = signs if name != "v" else None
        stored, descale = quantise(tensor, per=per, signs=own, transposed=name == "v")  # type: ignore[arg-type]
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
    for signs in (None, random_signs(d, "cuda")):
        arguments = quantised(x, per, signs)
    for form in forms_of(d):
        kernel_named(form)(**arguments, **options)
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
    arguments = quantised(x, per)
    options: dict[str, Any] = {"scale": d**-0.5, "causal": causal}
    calls: dict[str, Callable[[], Any]] = {
        form: partial(kernel_named(form), **arguments, **options) for form in forms_of(d)
    }
    best = forms_of(d)[0]
    peers = fp8_peers.available(quantised(x, "tensor"), **options)
    wide = [dequantise(arguments[name], arguments[f"{name}_descale"], torch.bfloat16) for name in "qkv"]
    want = forward(*wide, causal=causal)[0].float()
    outputs = {name: call()[0].float() for name, call in calls.items()}
    outputs |= {name: o.float() * worth for name, (o, worth) in ((name, call()) for name, call in peers.items())}
    off = {name: float((o - want).norm() / want.norm()) for name, o in outputs.items()}
    right = all(off[name] < 0.05 for name in calls)
    del outputs, want, wide
    calls |= peers
    calls["bf16"] = partial(forward, *x, causal=causal)
    calls[f"{best}, with quantisers"] = lambda: kernel_named(best)(**quantised(x, per), **options)
    calls[f"{best}, rotated, with quantisers"] = lambda: kernel_named(best)(**quantised(x, per, signs), **options)
    times = Clock().medians(calls)
    tflops = {name: round(flops_of(x[0], causal) / ms / 1e9, 1) for name, ms in times.items()}
    ours = [name for name in times if name != "bf16" and name not in peers]
    ratios = {f"{name}/{other}": round(times[other] / times[name], 4) for name in ours for other in ("bf16", *peers)}
    if peers:
        fastest = min(times[name] for name in peers)
        ratios |= {f"{name}/best peer": round(fastest / times[name], 4) for name in ours}
    torch.cuda.synchronize()
    return {"ok": right, "tflops": tflops, "ratios": ratios, "off": off, "ms": times}


def candidates(d: int) -> dict[str, Any]:
    """Tiles of the Hopper forward by name: the table's, and with one thing changed."""
    from reference_kernels.fp8.hopper.configs import TABLE

    table = TABLE[d]
    found = {
        "table": table,
        "other pin": replace(table, pin=not table.pin),
        "no ping-pong": replace(table, ping_pong=False),
        "fewer stages": replace(table, kv_stages=2 if d < 256 else 1),
        "half keys": replace(table, block_n=64, kv_stages=4 if d < 256 else 3),
        "direct": replace(table, promote=False),
        "direct, other pin": replace(table, promote=False, pin=not table.pin),
    }
    return {name: config for config, name in {config: name for name, config in reversed(found.items())}.items()}


def compiled(d: int, causal: int, number: int) -> Answer:
    """Compile candidate `number` for the two lengths of the tiles, into the cache on disk, by a small call."""
    import torch

    from reference_kernels.fp8.hopper import launch

    configs = list(candidates(d).values())
    if number < len(configs):
        arguments = quantised(tensors(d, 512, "bf16", batch=1), "block")
        launch.forward(**arguments, scale=d**-0.5, causal=bool(causal), config=configs[number])
        torch.cuda.synchronize()
    return {"ok": True}


def tiles(d: int, causal: bool, n: int, per: str) -> Answer:
    """TFLOP/s of the candidates; ratios to the table's."""
    from kernels import Clock

    from reference_kernels.fp8.hopper import launch

    x = tensors(d, n, "bf16")
    arguments = quantised(x, per) | {"scale": d**-0.5, "causal": causal}
    calls = {name: partial(launch.forward, **arguments, config=c) for name, c in candidates(d).items()}
    times = Clock().medians(calls)
    tflops = {name: round(flops_of(x[0], causal) / ms / 1e9, 1) for name, ms in times.items()}
    return {"ok": True, "tflops": tflops, "ratios": {f"{y}/table": round(times["table"] / times[y], 4) for y in times}}


def quantiser_candidates(d: int, how: str) -> dict[str, Any]:
    """Tiles of the quantiser by name: the table's, and those that differ from it and from each other."""
    from reference_kernels.fp8.configs import QUANTISERS, QuantiserConfig
    from reference_kernels.fp8.quantiser import BLOCK, tile

    found = {"table": QUANTISERS[how][d]}
    for part in (64, 128) if how == "rotated" else (64,):
        for elements in (32, 64, 128):
            found[f"{elements} a thread" + f", parts of {part}" * (how == "rotated")] = QuantiserConfig(elements, part)
    by_tile = {tuple(tile(c, d, BLOCK, rotated=how == "rotated").items()): name for name, c in reversed(found.items())}
    return {name: found[name] for name in found if name in by_tile.values()}


def quantisers(d: int, per: str, how: str) -> Answer:
    """GB/s of one quantiser, and of copying, on a tensor of 16k tokens, hidden 2048.

    Bytes that must move: of a copy 4 an element, of scales by block 3, and 5 where the scale is that of more than a
    block, and x has to be read twice.
    """
    import torch
    from kernels import Clock

    from reference_kernels.fp8 import quantise, random_signs

    x = tensors(d, 8192, "bf16")[0]
    other = torch.empty_like(x)
    signs = random_signs(d, "cuda") if how == "rotated" else None
    configs = quantiser_candidates(d, how) if per == "block" else {"table": None}
    options: dict[str, Any] = {"per": per, "signs": signs, "transposed": how == "columns"}
    calls: dict[str, Callable[[], Any]] = {
        name: partial(quantise, x, **options, config=config) for name, config in configs.items()
    }
    times = Clock().medians(calls | {"copy": partial(other.copy_, x)})
    size = {"copy": 4} | dict.fromkeys(configs, 3 if per == "block" else 5)
    rates = {name: round(x.numel() * size[name] / ms / 1e6, 1) for name, ms in times.items()}
    shares = {name: round(rates[name] / rates["copy"], 3) for name in configs}
    return {"ok": True, "gbps": rates, "shares of copy": shares, "ms": times}


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
    parts={"check": check_cells, "speed": speed_cells, "tiles": tile_cells, "quantisers": quantiser_cells},
    answer=run_cell,
    summary=summary,
    side_by_side=frozenset({"check"}),
    ahead={"speed": warm_cells, "tiles": compile_cells},
)

if __name__ == "__main__":
    sys.exit(main(SCRIPT))
