"""flash_attention: the kernels behind one function, with its arguments checked and its options put in their terms."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from .dispatch import KERNELS, machine, specialised_machine
from .ops import attention
from .tiles import INTERPRETED

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
_ON_CPU = bool(INTERPRETED.value)


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., scale: float | None = ...,
    window: tuple[int | None, int | None] | None = ..., softcap: float | None = ..., alibi_slopes: Tensor | None = ...,
    bias: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    kernel: str | None = ..., deterministic: bool | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., scale: float | None = ...,
    window: tuple[int | None, int | None] | None = ..., softcap: float | None = ..., alibi_slopes: Tensor | None = ...,
    bias: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True],
    kernel: str | None = ..., deterministic: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in O(L) memory, differentiable, for every shape and stride.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), float16, bfloat16 or float32, D and Dv at most 256; query
    head h reads kv head h // (Hq // Hkv). Returns out (B, Hq, Lq, Dv) in q's dtype and, with return_lse, lse (B, Hq,
    Lq) float32: the natural log of each row's denominator, sink included. A row that sees no key: 0 and -inf.

    Scores are built in this order: scale (default D ** -0.5), softcap * tanh(s / softcap), ALiBi
    (-slope_h |i + Lk - Lq - j|, slopes (Hq,) or (B, Hq)), bias (additive, or boolean with True = visible; broadcastable
    to (B, Hq, Lq, Lk)), then causal and window = (left, right) around the diagonal i + Lk - Lq, None unbounded. sinks
    (Hq,): one more logit a head, in the denominator only. Gradients: q, k, v, an additive bias, sinks, and through lse.

    kernel: None runs the fastest that can (dispatch.py, and `available` for why not); "hopper", "triton" or
    "specialised" (the interpreter alone; the backward is plain Triton's) that one.
    The output has the same bits in every call. So have the gradients, but for those of q by the fastest Hopper kernel:
    deterministic=True asks for one that repeats them too, None for what torch.use_deterministic_algorithms says.

    Raises ValueError for arguments that do not fit together, NotImplementedError for what the kernels, or the one that
    is named, do not serve.
    """
    _check_inputs(q, k, v)
    _check_options(q, k, window, softcap, scale, alibi_slopes, bias, sinks)
    if kernel not in (None, *KERNELS):
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, or None for the fastest, got {kernel!r}")
    left, right = window or (None, None)
    if causal:
        right = 0  # a window's right side is never negative
    boolean = bias is not None and bias.dtype == torch.bool
    out, lse = attention(
        q, k, v, alibi_slopes, None if boolean else bias, bias if boolean else None, sinks,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        None if softcap is None else float(softcap), left, right, "ieee",
        kernel, torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
    )  # fmt: skip
    return (out, lse) if return_lse else out


class Availability(NamedTuple):
    """kernel: its module in this package. reason: why it cannot run on this machine; empty where it can."""

    kernel: str
    available: bool
    reason: str


def available() -> list[Availability]:
    """Which kernels can run in this process, on the current GPU, best first, and why not. Compiles nothing."""
    if _ON_CPU:
        reason = ""
    elif not torch.cuda.is_available():
        reason = "no GPU: set TRITON_INTERPRET=1 before Python starts to run on the CPU, for correctness only"
    elif torch.cuda.get_device_capability() < (8, 0):
        reason = "the GPU is older than compute capability 8.0"
    else:
        reason = ""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    hopper, specialised = machine(device) or "", specialised_machine(device) or ""
    return [
        *(Availability(name, not hopper, hopper) for name in ("hopper.forward", "hopper.backward")),
        *(Availability(name, not reason, reason) for name in ("forward", "backward", "bias_gradient")),
        Availability("specialised", not specialised, specialised),
        Availability("naive", True, ""),
    ]


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, (B, H, L, D), got shape {tuple(x.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.dtype not in DTYPES:
        raise NotImplementedError(f"dtype {q.dtype}: these kernels take float16, bfloat16 and float32")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k must share q's batch and head dim: q {tuple(q.shape)}, k {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must share k's batch, heads and length: k {tuple(k.shape)}, v {tuple(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or q.shape[1] == 0:
        raise ValueError(f"q's heads must be a positive multiple of k's, got {q.shape[1]} and {k.shape[1]}")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"head dims must be positive, got D {q.shape[3]}, Dv {v.shape[3]}")
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"head dims D {q.shape[3]}, Dv {v.shape[3]}: these kernels take at most {MAX_HEAD_DIM} of either"
        )
    if q.device.type == "cpu" and not _ON_CPU:
        raise NotImplementedError(
            "on CPU tensors these kernels run in Triton's interpreter only: set TRITON_INTERPRET=1 before Python starts"
        )


def _check_options(
    q: Tensor,
    k: Tensor,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    scale: float | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> None:
    (b, hq, lq, _), lk = q.shape, k.shape[2]
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}: None means D ** -0.5")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap must be positive and finite, got {softcap}: None means no cap")
    if window is not None and (len(window) != 2 or any(side is not None and side < 0 for side in window)):
        raise ValueError(f"window must be (left, right), neither negative, got {window}: None means unbounded")
    for name, x in (("alibi_slopes", alibi_slopes), ("bias", bias), ("sinks", sinks)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if x is not None and x.dtype not in (*DTYPES, torch.bool if name == "bias" else None):
            kinds = "float16, bfloat16 or float32" + (", or bool" if name == "bias" else "")
            raise ValueError(f"{name} must be {kinds}, got {x.dtype}")
    if alibi_slopes is not None:
        if tuple(alibi_slopes.shape) not in ((hq,), (b, hq)):
            raise ValueError(f"alibi_slopes must be ({hq},) or ({b}, {hq}), got {tuple(alibi_slopes.shape)}")
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("alibi_slopes have no gradient here: detach() them")
    if sinks is not None and tuple(sinks.shape) != (hq,):
        raise ValueError(f"sinks must be ({hq},), one logit per query head, got {tuple(sinks.shape)}")
    if bias is not None:
        full, own = (b, hq, lq, lk), (1,) * (4 - bias.dim()) + tuple(bias.shape)
        if len(own) != 4 or any(size not in (1, whole) for size, whole in zip(own, full, strict=True)):
            raise ValueError(f"bias {tuple(bias.shape)} does not broadcast to (B, Hq, Lq, Lk) = {full}")
