"""Which rows each group of warps of a specialised kernel computes, masks and stores, read from its TTGIR.

Triton (Hopper) cuts the rows of a program in two after the frontend, and that may go wrong without a word. No GPU is
needed to see it: the integers of a partition are evaluated here with numbers for the arguments and the program.

    python partition_rows.py        the TTGIR of CASES for sm_90, as a line of JSON
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_kernels import specialised
from reference_kernels.configs import Config

CAPABILITY = 90
NARROW = Config(64, 64, 4, 2)
"""Rows that cannot be cut: a group multiplies 64 at least."""


@triton.jit
def splatted(q, k, out, lse, L, D: tl.constexpr, ROWS: tl.constexpr):
    """Row sums of exp(q k^T) k and of its exponents, one head: start is an offset of the TMA and added to a tensor."""
    start = tl.program_id(0) * ROWS
    qd = tl.make_tensor_descriptor(q, [L, D], [D, 1], [ROWS, D])
    kd = tl.make_tensor_descriptor(k, [L, D], [D, 1], [128, D])
    od = tl.make_tensor_descriptor(out, [L, D], [D, 1], [ROWS, D])
    rows = start + tl.arange(0, ROWS)
    qt = qd.load([start, 0])
    acc = tl.zeros([ROWS, D], tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    for n in tl.range(0, L, 128, warp_specialize=True):
        kt = kd.load([n, 0])
        p = tl.exp(tl.dot(qt, tl.trans(kt)))
        l += tl.sum(p, 1)  # noqa: E741
        acc = tl.dot(p.to(kt.dtype), kt, acc)
    od.store([start, 0], acc.to(qt.dtype))
    tl.store(lse + rows, l, mask=rows < L)


@dataclass
class Part:
    """What one group of warps does: the rows that it loads and stores, how far its loop goes, what it leaves visible.

    loaded, o: first rows of the tiles that it loads, that it stores. end: of its loop over the keys. lse: offsets in
    elements, (rows,). stored: whether, (rows,). visible: the masks in its loop, each (rows, keys).
    """

    loaded: list[int] = field(default_factory=list)
    o: list[int] = field(default_factory=list)
    end: int = -1
    lse: Tensor = field(default_factory=lambda: torch.empty(0))
    stored: Tensor = field(default_factory=lambda: torch.empty(0))
    visible: list[Tensor] = field(default_factory=list)


def _truncated(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "arith.addi": operator.add, "arith.subi": operator.sub, "arith.muli": operator.mul, "tt.addptr": operator.add,
    "arith.divsi": _truncated, "arith.remsi": torch.fmod, "arith.maxsi": torch.maximum, "arith.minsi": torch.minimum,
    "arith.andi": operator.and_, "arith.ori": operator.or_,
}  # fmt: skip
_COMPARED = {"slt": operator.lt, "sle": operator.le, "sgt": operator.gt, "sge": operator.ge}
_SAME = ("tt.splat", "tt.broadcast", "ttg.convert_layout", "arith.extsi", "arith.extui", "arith.trunci")


def _value(op: str, line: str, of: list[Tensor | None], program: int) -> Tensor | None:
    """The result of one operation on integers, None if it is none that is known. Tensors are broadcast when used."""
    if op == "arith.constant":
        found = re.search(r"(?:\bdense<| )(-?\d+)>? : (?:i32|i64|tensor<[\dx]*i(?:32|64)\b)", line)
        return torch.tensor(int(found[1])) if found else None
    if op == "tt.get_program_id":
        return torch.tensor(program)
    if op == "tt.make_range":
        start, end = (int(re.findall(rf"\b{name} = (\d+)", line)[0]) for name in ("start", "end"))
        return torch.arange(start, end)
    known = [x for x in of if x is not None]
    if not known or len(known) < len(of):
        return None
    if op in _SAME:
        return known[0]
    if op == "tt.expand_dims":
        return known[0].unsqueeze(int(re.findall(r"axis = (\d)", line)[0])) if known[0].ndim else known[0]
    if op == "arith.cmpi":
        predicate = re.search(r"arith\.cmpi (\w+),", line)
        return _COMPARED[predicate[1]](*known) if predicate and predicate[1] in _COMPARED else None
    return _BINARY[op](*known) if op in _BINARY else None


def _part(lines: list[str], values: dict[str, Tensor | None], program: int, n: int) -> Part:
    """The operations of one region. values: what is known before it, to which its own are added."""
    part = Part()
    for line in lines:
        body = line.split(" : ")[0]
        if loop := re.search(r"scf\.for %(\w+) = %\w+ to %(\w+) ", body):
            values[loop[1]] = torch.tensor(n)
            part.end = int(values[loop[2]])
        elif copy := re.search(r"async_tma_copy_(global|local)_to_\w+ %\w+\[%(\w+),", body):
            (part.loaded if copy[1] == "global" else part.o).append(int(values[copy[2]]))
        elif store := re.search(r"tt\.store %(\w+), %\w+, %(\w+)", body):
            part.lse, part.stored = values[store[1]], values[store[2]]
        elif assigned := re.match(r'\s*%(\w+)(?::\d+)? = "?([\w.]+)"?(.*)', body):
            of = [values.get(name) for name in re.findall(r"%(\w+)", assigned[3])]
            values[assigned[1]] = _value(assigned[2], line, of, program)
            if assigned[2] == "arith.select" and of[0] is not None and of[0].ndim == 2:
                part.visible.append(of[0])
    return part


def parts(ttgir: str, arguments: dict[str, int], program: int, n: int) -> list[Part]:
    """What each group of warps does in one program, its loop standing at key n; first the one that loads.

    arguments: the integers of the kernel by name; lse is at offset 0. Raises ValueError if nothing is specialised.
    """
    text = re.search(r"(.*)ttg\.warp_specialize\(([^)]*)\)[^\n]*\n(.*)", ttgir, re.DOTALL)
    if not text:
        raise ValueError("the TTGIR has no ttg.warp_specialize")
    known: dict[str, Tensor | None] = {name: torch.tensor(x) for name, x in ({"lse": 0} | arguments).items()}
    _part(text[1].splitlines(), known, program, n)
    passed = [known.get(name) for name in re.findall(r"%(\w+)", text[2])]
    first, *others = re.split(r"^ *partition\d+\(", text[3], flags=re.M)
    found = [_part(first.splitlines(), known, program, n)]
    for region in others:
        head, *lines = region.splitlines()
        own = dict(zip(re.findall(r"%(\w+): ", head), passed, strict=True))
        found.append(_part(lines, own, program, n))
    return found


def cases() -> dict[str, Any]:
    """Every case of the kernel for sm_90, it with rows that cannot be cut, and `splatted`."""
    named: dict[str, Any] = {case.name: case for case in specialised.compile_cases() if CAPABILITY in case.capabilities}
    specialised.TABLE["device", 128] = NARROW
    named["narrow"] = specialised.compile_case("device", "bf16", 128)
    pointers = dict.fromkeys(("q", "k", "out"), "*bf16") | {"lse": "*fp32", "L": "i32"}
    constants = {"D": 128, "ROWS": 128}
    named["splatted"] = specialised.SpecialisedCase(
        "splatted", splatted, pointers | dict.fromkeys(constants, "constexpr"), constants, 4, 2
    )
    return named


def main() -> None:
    from reference_kernels.compiling.worker import _build

    built = {
        name: _build(case.kernel, case.signature, case.constexprs, case.num_warps, case.num_stages, CAPABILITY)[0]
        for name, case in cases().items()
    }
    print(json.dumps({name: compiled.asm["ttgir"] for name, compiled in built.items()}))


if __name__ == "__main__":
    main()
