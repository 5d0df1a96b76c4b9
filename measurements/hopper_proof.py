"""What else is proved of the kernels for Hopper on an H100 or H200; one JSON file a part, one line a cell.

    python measurements/hopper_proof.py --part repeats --out F.json      1000 calls, the same bits
    python measurements/hopper_proof.py --part graphs --out F.json       CUDA graphs, torch.compile
    python measurements/hopper_proof.py --part stages --out F.json       the three stages, right and timed
    python measurements/hopper_proof.py --part specialised --out F.json  the compiler's warp specialisation, likewise
    python measurements/hopper_proof.py --part compared --out F.json     FlashAttention-1's loop order, the atomic dQ
    python measurements/hopper_proof.py --part sanitizer --out F.json    memcheck and racecheck
    python measurements/hopper_proof.py --part consan --out F.json       Triton's concurrency sanitizer

repeats      1000 calls of the forward with a running maximum and with a frozen one, of the two-pass backward and of the
             specialised forward: how many differ from the first in any bit.
graphs       flash_attention(kernel="hopper"), forward and deterministic backward: a CUDA graph replayed on new inputs,
             and torch.compile(mode="reduce-overhead"), against eager calls, bit by bit; kernel=None under capture with
             a shape that is new must be plain Triton's result.
stages       stage1, stage2, stage3 and the full kernel in both forms: two shapes under the suite's bound and noise
specialised  floor; then timed in turns with SDPA, bf16, 16k tokens, hidden 2048. Kernels that were never tuned run in
compared     some tiles each, of which the fastest counts in the ratios.
sanitizer    small problems in a process under each tool (sanitizers.py), and its trial on kernels that are wrong or
consan       right (faulty.py): it must find the error, or nothing; likewise for the concurrency sanitizer.

Cells run in worker processes (cells.py). Where nothing is timed, and to compile, they run side by side (--workers).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import sanitizers
from cells import Answer, Script, counted, main
from contenders import FORMS, STAGES, backward_named, forward_named, is_backward, tiled

REPEATS = 1000
LIMIT = 290.0
"""Seconds for one cell: a part of them should end within five minutes."""

MASKS = ("", "-causal")
REPEATED = "bf16-b4-h8-kv4-q1000-k1000"

# What is timed: kind to (the kernels, the peers, the pairs of which ratios are taken).
TURNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]] = {
    "stages": (
        (*STAGES, *FORMS),
        ("cudnn",),
        (*((name, "cudnn") for name in (*STAGES, *FORMS)), ("stage2", "stage1"), ("stage3", "stage2"),
         ("online", "stage3"), ("freeze", "online")),
    ),
    "specialised": (
        ("specialised", "plain", "online"),
        ("cudnn", "fa2"),
        (("specialised", "plain"), ("specialised", "online"), ("specialised", "cudnn"), ("specialised", "fa2")),
    ),
    "v1": (("v1", "plain"), ("cudnn", "fa2"), (("v1", "plain"), ("v1", "fa2"))),
    "atomic": (
        ("atomic", "plain_backward", "onepass", "twopass"),
        ("cudnn", "fa2"),
        (("atomic", "plain_backward"), ("atomic", "fa2"), ("atomic", "onepass"), ("onepass", "twopass")),
    ),
}  # fmt: skip

# Small problems for the sanitizers: tails, groups, unequal lengths, both masks.
SMALL = ("bf16-b1-h2-kv1-q200-k330-d64-causal", "bf16-b1-h1-q130-k257-d128", "bf16-b1-h1-q256-k128-d64")
WIDE = "bf16-b1-h1-q130-k190-d256-causal"
WHOLE = ("bf16-b1-h2-kv1-q256-k384-d64-causal", "bf16-b1-h1-q128-k256-d128")
TOUCHED: dict[str, tuple[str, ...]] = {
    "online": (*SMALL, WIDE), "freeze": (*SMALL, WIDE), "stage3": WHOLE, "specialised": SMALL,
    "onepass": SMALL, "twopass": (*SMALL, WIDE),
}  # fmt: skip

# One problem each for consan, D = 64 for the sake of ptxas, with more tiles than SMs and more blocks than slots.
# Triton's own specialisation is not here: 3.6 cannot compile it with the checks.
# D = 256 once, whose dK and dV have a kernel of their own. Name to the kernel and its case: k460 and q200 make block 0
# short, k400 leaves a few keys beside whole blocks, q190 without a mask a consumer without rows.
INSTRUMENTED = {
    "online": "online bf16-b1-h70-kv35-q200-k460-d64-causal",
    "online@o_in_q": "online@o_in_q bf16-b1-h70-kv35-q200-k400-d64-causal",
    "freeze": "freeze bf16-b1-h70-kv35-q200-k400-d64-causal",
    "freeze@rowless": "freeze bf16-b1-h70-kv35-q190-k400-d64",
    "stage3": "stage3 bf16-b1-h2-kv1-q256-k512-d64",
    "onepass": "onepass bf16-b1-h4-q384-k384-d64-causal",
    "twopass": "twopass bf16-b1-h4-q384-k384-d64-causal",
    "twopass@wide": "twopass bf16-b1-h2-q256-k256-d256",
}


def repeats_cells() -> list[str]:
    """repeat NAME CASE."""
    problems = [(d, mask) for d in (64, 128, 256) for mask in MASKS]
    cells = [f"repeat {name} {REPEATED}-d{d}{mask}" for d, mask in problems for name in (*FORMS, "twopass")]
    cells += [f"repeat online fp16{REPEATED[4:]}-d{d}{mask}" for d, mask in problems]
    return cells + [f"repeat specialised {REPEATED}-d{d}{mask}" for d, mask in problems if d < 256]


def graphs_cells() -> list[str]:
    """graph, compiled, unseen D CAUSAL."""
    return [f"{kind} {d} {causal}" for kind in ("graph", "compiled", "unseen") for d, causal in ((128, 1), (64, 0))]


def stages_cells() -> list[str]:
    """right NAME CASE; turns KIND D CAUSAL N."""
    shapes = ("bf16-b2-h4-q1024-k1024-d128-causal", "fp16-b1-h8-kv2-q512-k768-d64")
    cells = [f"right {name} {case}" for case in shapes for name in (*STAGES, *FORMS)]
    cells.remove(f"right freeze {shapes[1]}")  # the frozen maximum is for bf16
    return cells + _turns("stages", (128,), (2048, 8192))


def specialised_cells() -> list[str]:
    shapes = ("b2-h4-kv2-q1000-k1100", "b1-h3-q513-k513", "b1-h2-q700-k333", "b2-h2-q1-k300", "b2-h4-q320-k320")
    cells = [
        f"right specialised {dtype}-{shape}-d{d}{mask}{'-swapped' if shape.endswith('k320') else ''}"
        for shape in shapes for dtype in ("bf16", "fp16") for d in (64, 128) for mask in MASKS
    ]  # fmt: skip
    return cells + _turns("specialised", (64, 128), (1024, 8192))


def compared_cells() -> list[str]:
    shapes = (("v1", "b2-h4-kv2-q300-k400"), ("v1", "b1-h2-q700-k333"), ("atomic", "b2-h4-kv2-q300-k400"))
    cells = [
        f"right {name} {dtype}-{shape}-d{d}{mask}"
        for name, shape in shapes for dtype, d in (("bf16", 64), ("fp16", 128)) for mask in MASKS
    ]  # fmt: skip
    return cells + _turns("v1", (64, 128), (1024, 8192)) + _turns("atomic", (64, 128), (1024, 8192))


def sanitizer_cells() -> list[str]:
    """memcheck, racecheck NAME; control TOOL WRONG and spared TOOL RIGHT, kernels of faulty.py."""
    tools = ("memcheck", "racecheck")
    return [f"{tool} {name}" for tool in tools for name in TOUCHED] + _tried(*tools)


def consan_cells() -> list[str]:
    """consan NAME; control TOOL WRONG; spared TOOL RIGHT."""
    return [f"consan {name}" for name in INSTRUMENTED] + _tried("consan")


def _tried(*tools: str) -> list[str]:
    trials = (("control", sanitizers.WRONG), ("spared", sanitizers.RIGHT))
    return [f"{kind} {tool} {name}" for kind, kernels in trials for tool, name in kernels if tool in tools]


def touch_cells() -> list[str]:
    """touch NAME CASE: each problem of the sanitizers without one."""
    return [f"touch {name} {case}" for name, cases in TOUCHED.items() for case in cases]


def warm_cells(part: Callable[[], list[str]]) -> list[str]:
    """warm NAME D CAUSAL and touch NAME CASE: each kernel that the cells of a part need."""
    timed = [cell.split()[1:4] for cell in part() if cell.startswith("turns")]
    names = [(name, d, causal) for kind, d, causal in timed for family in TURNS[kind][0] for name in tiled(family)]
    cells = [f"warm {name} {d} {causal}" for name, d, causal in dict.fromkeys(names)]
    return cells + [cell.replace("right", "touch", 1) for cell in part() if cell.startswith("right")]


def _turns(kind: str, dims: tuple[int, ...], lengths: tuple[int, ...]) -> list[str]:
    return [f"turns {kind} {d} {causal} {n}" for n in lengths for d in dims for causal in (0, 1)]


# What a worker does.


def run_cell(cell: str) -> Answer:
    kind, *words = cell.split()
    what: dict[str, Callable[..., Answer]] = {
        "repeat": repeat, "right": right, "touch": touch, "fault": fault, "warm": warm, "turns": turns,
        "memcheck": partial(sanitized, "memcheck"), "racecheck": partial(sanitized, "racecheck"),
        "consan": partial(sanitized, "consan"), "control": control, "spared": spared,
    }  # fmt: skip
    if kind in ("graph", "compiled", "unseen"):
        import graphs

        what[kind] = getattr(graphs, kind)
    return what[kind](*words)


def repeat(name: str, case_id: str) -> Answer:
    """How many of REPEATS calls differ from the first in any bit."""
    from hopper import repeated

    return repeated(call_of(name, case_id)[0], REPEATS)


def call_of(name: str, case_id: str) -> tuple[Callable[[], tuple[Any, ...]], Any, Any]:
    """(a call of a kernel on a case of the suite, the case, its tensors). A backward gets naive attention's o, lse."""
    from hopper import problem

    from reference_kernels import naive_attention

    case, x = problem(case_id, "drawn")
    options = {"causal": case.causal, "scale": case.scale}
    if not is_backward(name):
        return partial(forward_named(name), x.q, x.k, x.v, **options), case, x
    o, lse = naive_attention(x.q, x.k, x.v, return_lse=True, **options)
    return partial(backward_named(name), x.dout, x.q, x.k, x.v, o, lse, **options), case, x


def right(name: str, case_id: str) -> Answer:
    """Outputs, or gradients, under the suite's bound and noise floor."""
    import hopper
    import hopper_backward

    call, case, x = call_of(name, case_id)
    if is_backward(name):
        return hopper_backward.judge(call(), case, x, with_dlse=False)
    return hopper.judge(forward_named(name), case, x)


def touch(name: str, case_id: str) -> Answer:
    """One call; its numbers must be finite (lse of a row without keys may be -inf)."""
    import torch
    import triton

    if os.environ.get("TRITON_INSTRUMENTATION_MODE"):
        # What an instrumented kernel knows of its barriers lies in memory that it is given at its launch.
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    first, *rest = call_of(name, case_id)[0]()
    torch.cuda.synchronize()
    return {"ok": bool(first.isfinite().all()) and not any(bool(x.isnan().any()) for x in rest)}


def fault(name: str) -> Answer:
    """Run a kernel of faulty.py; a right one must copy what it was given."""
    import faulty
    import torch
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    copied = getattr(faulty, name)()
    torch.cuda.synchronize()
    return {"ok": copied is not False}


def sanitized(tool: str, name: str) -> Answer:
    """The small problems of a kernel in one process under a tool; one for consan, which takes long to compile."""
    touched = [INSTRUMENTED[name]] if tool == "consan" else [f"{name} {case}" for case in TOUCHED[name]]
    return _under(tool, [f"touch {words}" for words in touched])


def control(tool: str, name: str) -> Answer:
    """A tool that finds nothing in a kernel with an error would find nothing anywhere: good if it finds it."""
    found = _under(tool, [f"fault {name}"])
    return found | {"ok": any(sanitizers.WRONG[tool, name] in line for line in found["said"])}


def spared(tool: str, name: str) -> Answer:
    """A tool that finds an error in a right kernel says nothing about others of its kind: good if it finds none."""
    return _under(tool, [f"fault {name}"])


def _under(tool: str, cells: list[str]) -> Answer:
    found = sanitizers.under(tool, __file__, cells, LIMIT - 10)
    return found if tool == "consan" else found | {"tool": sanitizers.version()}


def warm(name: str, d: str, causal: str) -> Answer:
    """Compile a kernel, into the cache on disk, by one small call."""
    import torch

    mask = "-causal" if causal == "1" else ""
    call_of(name, f"bf16-b1-h1-q256-k256-d{d}{mask}")[0]()
    torch.cuda.synchronize()
    return {"ok": True}


def turns(kind: str, d: str, causal: str, n: str) -> Answer:
    """TFLOP/s of the kernels of a kind and of SDPA, taking turns; the ratios take each kernel in its fastest tile.

    Results must agree with cuDNN's to 2 % of the largest number.
    """
    import torch
    from kernels import Clock, tensors

    from pytest_flashattn import peers

    names, peer_names, pairs = TURNS[kind]
    q, k, v, do = tensors(int(n), int(d))
    options = {"causal": causal == "1"}
    backward = is_backward(kind)
    attention = {"cudnn": peers.sdpa_cudnn, "fa2": peers.sdpa_flash}
    calls: dict[str, Callable[[], Any]] = {}
    if backward:
        o, lse = forward_named("plain")(q, k, v, **options)
        for name in names:
            calls |= {tile: partial(backward_named(tile), do, q, k, v, o, lse, **options) for tile in tiled(name)}
        for peer in peer_names:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = attention[peer](*leaves, **options)
            calls[peer] = partial(torch.autograd.grad, out, leaves, do, retain_graph=True)
    else:
        for name in names:
            calls |= {tile: partial(forward_named(tile), q, k, v, **options) for tile in tiled(name)}
        calls |= {peer: partial(attention[peer], q, k, v, **options) for peer in peer_names}
    want = calls["cudnn"]() if backward else (calls["cudnn"](),)
    off = {
        name: max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(call(), want))  # noqa: B905
        for name, call in calls.items()
        if name not in peer_names
    }
    times = Clock().medians(calls, rounds=3, launches=5)
    flops = 4.0 * q.numel() * int(n) * (0.5 if causal == "1" else 1.0) * (2.5 if backward else 1.0)
    fastest = {name: min(times[tile] for tile in tiled(name)) for name in names} | {p: times[p] for p in peer_names}
    return {
        "ok": all(x < 2e-2 for x in off.values()),
        "tflops": {name: round(flops / ms / 1e9, 1) for name, ms in times.items()},
        "ratios": {f"{a}/{b}": round(fastest[b] / fastest[a], 4) for a, b in pairs},
        "off": off,
        "ms": times,
    }


def summary(answers: list[Answer]) -> dict[str, Any]:
    """How many cells are good; the geometric mean and the least of the ratios, by kind, mask and pair.

    "does not apply": which tools find something in a right kernel, in which, and what.
    """
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        if "tflops" in answer:
            _, kind, d, causal, _ = answer["cell"].split()
            for name, value in answer["ratios"].items():
                for group in (f"{kind} {name}", f"{kind} {name} d{d} {'causal' if causal == '1' else 'dense'}"):
                    ratios.setdefault(group, []).append(value)
    misled = [a for a in answers if a["cell"].startswith("spared") and a.get("said")]
    found = [f"{a['cell'].removeprefix('spared ')}, which is right: {a['said'][0]}" for a in misled]
    return counted(answers, ratios) | ({"does not apply": found} if found else {})


SCRIPT = Script(
    __file__,
    __doc__,
    parts={
        "repeats": repeats_cells, "graphs": graphs_cells, "stages": stages_cells, "specialised": specialised_cells,
        "compared": compared_cells, "sanitizer": sanitizer_cells, "consan": consan_cells,
    },
    answer=run_cell,
    summary=summary,
    side_by_side=frozenset({"repeats", "graphs", "sanitizer", "consan"}),
    ahead={
        "stages": partial(warm_cells, stages_cells),
        "specialised": partial(warm_cells, specialised_cells),
        "compared": partial(warm_cells, compared_cells),
        "sanitizer": touch_cells,
    },
    workers=8,
    limit=LIMIT,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(SCRIPT))
