"""Attention on FP8: fused quantisers, a forward in plain Triton (compute capability 8.9 and above), one for Hopper.

    from reference_kernels.fp8 import flash_attention_fp8, quantise, random_signs

    signs = random_signs(q.shape[3], q.device)
    q8, q_descale = quantise(q, signs=signs)            # rotated together, Q K^T stays what it was
    k8, k_descale = quantise(k, signs=signs)
    v8, v_descale = quantise(v, transposed=True)        # as the FP8 tensor cores of Hopper want it
    out = flash_attention_fp8(q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)

Read them in this order:

    formats         E4M3 and E5M2: rounding and widening
    hadamard        the rotation that spreads outliers
    quantiser       from 16 to 8 bits: scales by tensor, head or block of rows
    forward         attention on them, in plain Triton
    backward        gradients, in bfloat16
    hopper          the forward for Hopper, in Gluon

Around them `configs` (tiles), `cases` (for the compile lane), `api` (the public function) and `variants` (the same, as
the suite puts it on trial).

Importing the package imports neither torch nor Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy import attribute

if TYPE_CHECKING:
    from .api import flash_attention_fp8 as flash_attention_fp8
    from .backward import flash_attention_fp8_backward as flash_attention_fp8_backward
    from .hadamard import random_signs as random_signs
    from .hopper.interleaving import interleave_keys as interleave_keys
    from .quantiser import dequantise as dequantise
    from .quantiser import quantise as quantise

_HOMES = {
    "dequantise": "quantiser",
    "flash_attention_fp8": "api",
    "flash_attention_fp8_backward": "backward",
    "interleave_keys": "hopper.interleaving",
    "quantise": "quantiser",
    "random_signs": "hadamard",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    return attribute(__name__, _HOMES, name)
