"""flash_attention_fp8: the FP8 forward behind one function, with its arguments checked."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from ..dispatch import machine
from ..tiles import INTERPRETED
from .configs import OLDEST
from .formats import LARGEST
from .forward import forward
from .quantiser import BLOCK

KERNELS = ("hopper", "triton")
"""What `kernel=` takes, best first."""

MAX_HEAD_DIM = 256
_ON_CPU = bool(INTERPRETED.value)


def flash_attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_descale: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    v_interleaved: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention on FP8: out (B, Hq, Lq, Dv) bfloat16 and, with return_lse, lse (B, Hq, Lq) float32, natural log.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), float8_e4m3fn or float8_e5m2, q and k in the same, any
    strides, D and Dv at most 256; query head h reads kv head h // (Hq // Hkv); causal is bottom-right; scale: None
    takes D ** -0.5. A row that sees no key: 0 and -inf.

    Descales: float32, not negative; the value is stored * descale. Of shape () for a tensor, (B, H) for its heads, or
    (B, H, ceil(L / 128)) for its blocks of 128 rows, H and L those of the tensor itself; each tensor its own kind.

    kernel: None runs the fastest that can, "hopper" or "triton" that one. "hopper" serves a GPU of compute capability
    9.0, float8_e4m3fn, D = Dv of 64, 128 or 256, a positive scale, and v contiguous along Lk; "triton" everything.
    S, the softmax and all sums are float32 but for what the tensor cores sum by themselves: products of one block of
    keys ("triton", forward.py), or of all keys ("hopper"). P is rounded to E4M3.

    v_interleaved: of every 16 keys of v position 4 j + 2 h + b holds key 8 h + 2 j + b, in memory for a multiple of 16
    of them, zeros where there is no key (hopper/interleaving.py; interleave_keys makes one): a faster form of the
    Hopper kernel, which alone takes it. There is no gradient by itself: flash_attention_fp8_backward has it. Raises
    ValueError for arguments that do not fit together, NotImplementedError for what the kernels, or the one that is
    named, do not serve.
    """
    if kernel not in (None, *KERNELS):
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, or None for the fastest, got {kernel!r}")
    scale = checked(q, k, v, q_descale, k_descale, v_descale, scale)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError("float8 tensors have no gradient here: call flash_attention_fp8_backward for it")
    if v_interleaved and kernel == "triton":
        raise NotImplementedError("v_interleaved: plain Triton reads keys in their own order, name kernel='hopper'")
    if kernel != "triton":
        reason = machine(q.device)
        if reason is None:
            from .hopper import launch

            reason = launch.supports(q, k, v, scale=scale, causal=causal, v_interleaved=v_interleaved)
            if reason is None:
                out, lse = launch.forward(
                    q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, scale=scale,
                    causal=causal, v_interleaved=v_interleaved,
                )  # fmt: skip
                return (out, lse) if return_lse else out
        if kernel == "hopper" or v_interleaved:
            raise NotImplementedError(f"{'kernel=' + repr(kernel) if kernel else 'v_interleaved'}: {reason}")
    out, lse = forward(
        q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, scale=scale, causal=causal
    )
    return (out, lse) if return_lse else out


def checked(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor, k_descale: Tensor, v_descale: Tensor, scale: float | None
) -> float:
    """The scale that is meant, once everything fits; errors as of flash_attention_fp8."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, (B, H, L, D), got shape {tuple(x.shape)}")
        if x.dtype not in LARGEST:
            raise NotImplementedError(f"{name} {x.dtype}: these kernels take {' and '.join(map(str, LARGEST))}")
    if q.dtype != k.dtype:
        raise ValueError(f"q and k must share one dtype, got {q.dtype} and {k.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k must share q's batch and head dim: q {tuple(q.shape)}, k {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must share k's batch, heads and length: k {tuple(k.shape)}, v {tuple(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q's heads must be a positive multiple of k's, got {q.shape[1]} and {k.shape[1]}")
    if not 0 < q.shape[3] <= MAX_HEAD_DIM or not 0 < v.shape[3] <= MAX_HEAD_DIM:
        raise NotImplementedError(
            f"head dims D {q.shape[3]}, Dv {v.shape[3]}: these kernels take 1 to {MAX_HEAD_DIM} of either"
        )
    for name, x, descale in (("q", q, q_descale), ("k", k, k_descale), ("v", v, v_descale)):
        _check_descale(name, x, descale)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}: None means D ** -0.5")
    _check_device(q.device)
    return q.shape[3] ** -0.5 if scale is None else float(scale)


def _check_descale(name: str, x: Tensor, descale: Tensor) -> None:
    by_head = (x.shape[0], x.shape[1])
    by_block = (*by_head, triton.cdiv(x.shape[2], BLOCK))
    if tuple(descale.shape) not in ((), by_head, by_block):
        raise ValueError(
            f"{name}_descale must be () for the tensor, {by_head} for its heads or {by_block} for its blocks of "
            f"{BLOCK} rows, got {tuple(descale.shape)}"
        )
    if descale.dtype != torch.float32 or descale.device != x.device:
        raise ValueError(
            f"{name}_descale must be float32 on {name}'s device {x.device}, got {descale.dtype} on {descale.device}"
        )


def _check_device(device: torch.device) -> None:
    if _ON_CPU:
        return
    if device.type != "cuda":
        raise NotImplementedError(
            "on CPU tensors these kernels run in Triton's interpreter only: set TRITON_INTERPRET=1 before Python starts"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < OLDEST:
        raise NotImplementedError(
            f"FP8 products need a GPU of compute capability {OLDEST // 10}.{OLDEST % 10}, this one has {major}.{minor}"
        )
