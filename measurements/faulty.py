"""Small kernels on which the sanitizers are tried: wrong ones, which they must find, and right ones.

beyond     wrong: writes beyond the end of a tensor                               memcheck
raced      wrong: two warps exchange values without a barrier                     racecheck
unhanded   wrong: one partition of warps reads what another may not have written  racecheck, consan
unwaited   wrong: reads a tile that the TMA may not have brought                  consan
exchanged  right: `raced` with the barrier
handed     right: `unhanded` with the mbarrier; the construction of the Hopper kernels
waited     right: `unwaited` with the wait
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from reference_kernels.cases import CompileCase
from reference_kernels.hopper.gluon_compat import tma_load

ROWS, COLUMNS = 64, 64
CELLS = 64


@triton.jit
def beyond_kernel(out, N: tl.constexpr):
    """Write N elements, of which `out` has fewer."""
    tl.store(out + tl.arange(0, N), tl.arange(0, N))


@triton.constexpr_function
def _exchange_asm(between):
    return (
        "{ .shared .align 4 .b32 cells[64]; .reg .b32 base, mine, other;"
        " mov.u32 base, cells; mov.u32 mine, %tid.x; shl.b32 mine, mine, 2; xor.b32 other, mine, 128;"
        " add.u32 mine, mine, base; add.u32 other, other, base;"
        f" st.shared.b32 [mine], $1; {between} ld.shared.b32 $0, [other]; }}"
    )


@triton.jit
def exchange_kernel(x, out, BETWEEN: tl.constexpr):
    """x (64,) with its halves, of two warps, exchanged. In PTX, since Triton puts its barriers where they belong."""
    ASM: tl.constexpr = _exchange_asm(BETWEEN)
    cells = tl.arange(0, 64)
    values = tl.inline_asm_elementwise(ASM, "=r,r", [tl.load(x + cells)], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + cells, values)


@gluon.jit
def _elements(ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return rows * COLUMNS + columns


@gluon.jit
def tma_kernel(x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WAITS: gl.constexpr):
    """Copy a tile through shared memory by TMA; without WAITS it is read before it has come."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x.dtype, [ROWS, COLUMNS], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, x.block_type.nbytes)
    tma_load(x, [0, 0], arrived, tile)
    if WAITS:
        mbarrier.wait(arrived, 0)
    values = tile.load(layout)
    if not WAITS:
        mbarrier.wait(arrived, 0)
    gl.store(out + _elements(ROWS, COLUMNS, layout), values)


@gluon.jit
def _give(x, tile, given, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    tile.store(gl.load(x + _elements(ROWS, COLUMNS, LAYOUT)))
    mbarrier.arrive(given, count=1)


@gluon.jit
def _receive(out, tile, given, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, WAITS: gl.constexpr):
    if WAITS:
        mbarrier.wait(given, 0)
    values = tile.load(LAYOUT)
    gl.store(out + _elements(ROWS, COLUMNS, LAYOUT), values)


@gluon.jit
def hand_kernel(x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WAITS: gl.constexpr):
    """Copy a tile: four warps load it, four others write it, handed over by one mbarrier; without WAITS by luck."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x.dtype.element_ty, [ROWS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(given, count=1)
    gl.warp_specialize(
        [
            (_give, (x, tile, given, ROWS, COLUMNS, layout)),
            (_receive, (out, tile, given, ROWS, COLUMNS, layout, WAITS)),
        ],
        [4],
        [64],
    )


def beyond() -> None:
    out = torch.zeros(1000, dtype=torch.int32, device="cuda")
    beyond_kernel[(1,)](out, N=2048)
    torch.cuda.synchronize()


def exchanged(between: str = "bar.sync 0;") -> bool:
    x = torch.arange(CELLS, dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)
    exchange_kernel[(1,)](x, out, BETWEEN=between, num_warps=CELLS // 32)
    return torch.equal(out, x.roll(CELLS // 2))


def raced() -> None:
    exchanged(between="")


def waited(waits: bool = True) -> bool:
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
    out = torch.empty_like(x)
    descriptor = TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS, COLUMNS], _layout())
    tma_kernel[(1,)](descriptor, out, ROWS=ROWS, COLUMNS=COLUMNS, WAITS=waits, num_warps=4)
    return torch.equal(out, x)


def unwaited() -> None:
    waited(waits=False)


def handed(waits: bool = True) -> bool:
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
    out = torch.empty_like(x)
    hand_kernel[(1,)](x, out, ROWS=ROWS, COLUMNS=COLUMNS, WAITS=waits, num_warps=4)
    return torch.equal(out, x)


def unhanded() -> None:
    handed(waits=False)


def _layout() -> Any:
    return gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float16)


def compile_cases() -> list[CompileCase]:
    """All, for sm_90."""
    tile = f"tensordesc<fp16[{ROWS}, {COLUMNS}],{_layout()!r}>"
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    fixed = dict.fromkeys([*sizes, "WAITS"], "constexpr")
    cells = {"x": "*i32", "out": "*i32", "BETWEEN": "constexpr"}
    cases = [CompileCase("beyond", beyond_kernel, {"out": "*i32", "N": "constexpr"}, {"N": 2048}, 4, 1)]
    for name, between in (("raced", ""), ("exchanged", "bar.sync 0;")):
        cases.append(CompileCase(name, exchange_kernel, cells, {"BETWEEN": between}, CELLS // 32, 1))
    for names, kernel, x in (
        (("unwaited", "waited"), tma_kernel, tile),
        (("unhanded", "handed"), hand_kernel, "*fp16"),
    ):
        for name, waits in zip(names, (False, True), strict=True):
            cases.append(CompileCase(name, kernel, {"x": x, "out": "*fp16"} | fixed, sizes | {"WAITS": waits}, 4, 1))
    return cases
