"""Reference attention kernels in Triton, to read, to use and to compare with (distribution: pytest-flashattn).

    from reference_kernels import flash_attention          out = flash_attention(q, k, v, causal=True)

Read them in this order:

    naive           the definition, S and P in memory: what the others avoid
    online          softmax in one pass: the step and the merge
    scores          scale, softcap, ALiBi, bias, masks
    forward         FlashAttention-2's forward
    causal          which tiles a mask touches
    backward        recomputation: backward_kv (dK, dV), backward_q (dQ), bias_gradient
    specialised     the forward with TMA, its warps specialised by the compiler

Two to compare with, which flash_attention never runs: `forward_v1` (the loop order of FlashAttention-1) and
`backward_atomic` (one pass, dQ by atomics).

For Hopper, in Gluon: the package `hopper`. On 8-bit numbers: the package `fp8`.

Around them `tiles` (loads and products), `configs` (tile sizes), `launch` (arguments), `cases` (for the compile lane),
`dispatch` (these kernels, or those of `hopper`), `ops` (operators of torch), `api` (the public function), `variants`
(the same with one kernel) and `lazy` (imports on first use). `python -m reference_kernels.forward` runs one by itself.

Importing the package imports neither torch nor Triton, needs no GPU and compiles nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .lazy import attribute

if TYPE_CHECKING:
    from .api import Availability, available, flash_attention
    from .naive import naive_attention

_HOMES = {"Availability": "api", "available": "api", "flash_attention": "api", "naive_attention": "naive"}

__all__ = ["Availability", "available", "flash_attention", "naive_attention"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
