"""Two kernels with an error each, so that a sanitizer that finds none elsewhere is known to find this one."""

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


@triton.jit
def beyond_kernel(out, N: tl.constexpr):
    """Write N elements, of which `out` has fewer."""
    tl.store(out + tl.arange(0, N), tl.arange(0, N))


@gluon.jit
def unwaited_kernel(x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Read a tile that the TMA may not have brought yet."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x.dtype, [ROWS, COLUMNS], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, x.block_type.nbytes)
    tma_load(x, [0, 0], arrived, tile)
    values = tile.load(layout)  # before the wait
    mbarrier.wait(arrived, 0)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(out + rows * COLUMNS + columns, values)


def _layout() -> Any:
    return gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float16)


def beyond() -> None:
    out = torch.zeros(1000, dtype=torch.int32, device="cuda")
    beyond_kernel[(1,)](out, N=2048)
    torch.cuda.synchronize()


def unwaited() -> None:
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
    out = torch.empty_like(x)
    descriptor = TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS, COLUMNS], _layout())
    unwaited_kernel[(1,)](descriptor, out, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    torch.cuda.synchronize()


def compile_cases() -> list[CompileCase]:
    """Both, for sm_90."""
    tile = f"tensordesc<fp16[{ROWS}, {COLUMNS}],{_layout()!r}>"
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    return [
        CompileCase("beyond", beyond_kernel, {"out": "*i32", "N": "constexpr"}, {"N": 2048}, 4, 1),
        CompileCase(
            "unwaited", unwaited_kernel, {"x": tile, "out": "*fp16"} | dict.fromkeys(sizes, "constexpr"), sizes, 4, 1
        ),
    ]
