"""The compile lane: every kernel to machine code for five architectures, on a machine without a GPU.

Triton compiles for any NVIDIA architecture on any machine, and its wheel carries NVIDIA's assembler and disassembler.
So one can know before a GPU is rented whether a kernel compiles, which matrix instructions it uses, whether it spills
registers and whether its shared memory fits. This module does that for the `compile_cases()` of every kernel module
(or `compile_cases(capability)`, where tiles depend on the architecture):

    python -m reference_kernels.compiling --capability 90 --kernel forward

How it works:

- **Compilers are subprocesses** (`worker.py`). A failing compile can abort its process (a Hopper Gluon kernel compiled
  for another architecture does). A dead compiler costs the one result it was working on, which then says so in a
  sentence.
- **No driver is asked.** A compiler process sees no GPU (`CUDA_VISIBLE_DEVICES` is empty) and Triton's active driver is
  replaced by `worker.NoDevice`, which knows the target and refuses everything else.
- **Expectations are data**: `ARCHITECTURES`, `FAMILY_RULES` and `SPILL_BUDGETS`, each with its reason. Which matrix
  instruction a `tl.dot` becomes depends on its shape, dtype and precision, so the dots are read from the compiled
  kernel's TTIR and each is looked up in `FAMILY_RULES`.

A signature gives Triton types: `"*bf16"`, `"i32"`, `"fp32"`, `"tensordesc<bf16[64, 128]>"`. At launch Triton also
learns which arguments are divisible by 16, and without that it neither vectorises loads nor copies asynchronously. The
lane assumes it of pointers, since torch's allocator aligns them; `"*bf16:1"` takes that back, and `"i32:16"` says it of
another argument, usually a stride.
"""

from .command import find_cases, main, table
from .expectations import (
    ARCHITECTURES,
    FAMILY_RULES,
    SPILL_BUDGETS,
    Architecture,
    FamilyRule,
    expected_family,
    violations,
)
from .processes import compile_all, compile_case
from .results import Case, Compiled, Dot

__all__ = [
    "ARCHITECTURES",
    "FAMILY_RULES",
    "SPILL_BUDGETS",
    "Architecture",
    "Case",
    "Compiled",
    "Dot",
    "FamilyRule",
    "compile_all",
    "compile_case",
    "expected_family",
    "find_cases",
    "main",
    "table",
    "violations",
]
