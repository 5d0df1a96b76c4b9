"""Gradients of FP8 attention, in bfloat16.

There are no FP8 products here. What the forward multiplied is widened, x = stored descale, and rounded to bfloat16, and
the 16-bit kernels do the rest: their forward once more, for an o and an lse that belong to these numbers, then their
backward. So the gradients are those of attention at the dequantised inputs, as the bfloat16 backward computes them: the
rounding of P to 8 bits does not enter, and the quantisation counts as the identity (the straight-through estimator).

Of rotated Q and K they are the gradients by the rotated ones: to have those by the originals, rotate them back.

Accumulators: as in ../backward.py, float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from .api import checked
from .quantiser import dequantise


def flash_attention_fp8_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_descale: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    causal: bool = False,
    scale: float | None = None,
    dlse: Tensor | None = None,
    kernel: str | None = "triton",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, bfloat16, of sum(o do) + sum(lse dlse) at the dequantised q, k and v.

    do (B, Hq, Lq, Dv) bfloat16; dlse (B, Hq, Lq) float32. The other arguments as of flash_attention_fp8; kernel and
    deterministic as of flash_attention. Raises ValueError where do or dlse does not fit, otherwise as those.
    """
    scale = checked(q, k, v, q_descale, k_descale, v_descale, scale)
    shape = (*q.shape[:3], v.shape[3])
    if do.shape != shape or do.dtype != torch.bfloat16:
        raise ValueError(f"do must be {shape} bfloat16, like o, got {tuple(do.shape)} {do.dtype}")
    if dlse is not None and (dlse.shape != shape[:3] or dlse.dtype != torch.float32):
        raise ValueError(f"dlse must be {shape[:3]} float32, like lse, got {tuple(dlse.shape)} {dlse.dtype}")
    q, k, v = (dequantise(x, s, torch.bfloat16) for x, s in ((q, q_descale), (k, k_descale), (v, v_descale)))
    options: dict[str, Any] = dict.fromkeys(("left", "softcap", "slopes", "bias", "mask", "sinks"))
    options |= {"kernel": kernel, "scale": scale, "right": 0 if causal else None, "input_precision": "ieee"}
    o, lse = dispatch.forward(q, k, v, **options)
    grads = dispatch.backward(
        do, dlse, q, k, v, o, lse, deterministic=deterministic, want_q=True, want_kv=True, want_bias=False,
        want_sinks=False, **options,
    )  # fmt: skip
    assert grads.dq is not None and grads.dk is not None and grads.dv is not None  # noqa: PT018
    return grads.dq, grads.dk, grads.dv
