"""What goes into a compile and what comes out of it; the vocabulary of the lane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, order=True)
class Dot:
    """One distinct `tl.dot` of a kernel: (m × k) @ (k × n), operands of MLIR type `dtype`, at Triton's `precision`."""

    m: int
    n: int
    k: int
    dtype: str
    precision: str

    def __str__(self) -> str:
        """Write the product as a reader would: `64×16×32 f16`, with the precision where it matters (f32)."""
        return f"{self.m}×{self.k}×{self.n} {self.dtype}" + (f" ({self.precision})" if self.dtype == "f32" else "")


class Case(Protocol):
    """What the lane reads of a case; `reference_kernels.cases.CompileCase` is one."""

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> Any: ...
    @property
    def signature(self) -> Mapping[str, str]: ...
    @property
    def constexprs(self) -> Mapping[str, Any]: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def num_stages(self) -> int: ...


@dataclass(frozen=True)
class Compiled:
    """What one compile gave. If `fault` is not empty the compile failed, `fault` says why, and the numbers are zero.

    `instructions` are the families that the case says it is made of (`case.instructions`, where it has that; a Gluon
    kernel has no dots to conclude it from), `specialised` whether it says that its warps are (`case.specialised`), and
    `partitions` the groups into which its TTGIR divides them (`ttg.warp_specialize`; 0 if it does not). `registers`
    are per thread. `spills` are the bytes of spill stores and loads that ptxas reports for one thread, `stack` its
    stack frame in bytes, `shared` the block's shared memory in bytes, `tensor_memory` its columns of tensor memory
    (`sm_100`). `counts` are PTX instructions by family, `local_in_loops` the SASS loads and stores of local memory
    inside a loop (a spill outside of loops is cheap, one inside is not). `warnings` are ptxas' complaints, for example
    that it serialised wgmma. `seconds` is wall time, `num_warps` is what was asked for, `dots` are the distinct
    products.
    """

    name: str
    capability: int
    num_warps: int
    instructions: tuple[str, ...] = ()
    specialised: bool = False
    partitions: int = 0
    triton: str = ""
    registers: int = 0
    spills: int = 0
    stack: int = 0
    shared: int = 0
    tensor_memory: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    dots: tuple[Dot, ...] = ()
    local_in_loops: int = 0
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    fault: str = ""
