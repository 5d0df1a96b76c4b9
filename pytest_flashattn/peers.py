"""Public attention functions as implementations: PyTorch's SDPA forced to one backend, compiled flex_attention, and
FlashAttention-3 where it is installed.

Each is a function of the contract with its support declared, so that
`pytest --flashattn-impl=pytest_flashattn.peers:sdpa_flash` puts FlashAttention-2 as PyTorch ships it on trial.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .support import Support


def sdpa_flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, return_lse: bool = False
) -> Any:
    """FlashAttention-2 through PyTorch. q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D); out, or (out, lse (B, Hq, Lq))."""
    if return_lse:
        # The raw operator has none of the guards and paddings of the public function.
        if not q.numel() or not k.numel() or q.shape[-1] % 8 or not all(x.stride(-1) == 1 for x in (q, k, v)):
            raise NotImplementedError("log-sum-exp of empty, non-contiguous or odd head dims")
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return o, lse[..., : q.shape[2]]
    return _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal, scale)


def sdpa_efficient(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """The memory-efficient kernel (xFormers' CUTLASS) through PyTorch; bias additive or boolean, True = visible."""
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return _sdpa(SDPBackend.EFFICIENT_ATTENTION, q, k, v, causal, scale, bias)


def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """cuDNN's fused attention through PyTorch. Its causal diagonal is PyTorch's: top-left."""
    return _forced(SDPBackend.CUDNN_ATTENTION, q, k, v, None, causal, scale)


def _sdpa(
    backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, bias: Tensor | None = None
) -> Tensor:
    if causal and bias is not None:
        raise NotImplementedError("causal together with a bias")
    if causal and q.shape[2] != k.shape[2]:
        return _forced(backend, q, k, v, causal_lower_right(q.shape[2], k.shape[2]), False, scale)
    return _forced(backend, q, k, v, bias, causal, scale)


def _forced(
    backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: float | None
) -> Tensor:
    try:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
    except RuntimeError as error:
        # PyTorch's way to say that the backend does not serve this problem.
        if "No available kernel" in str(error):
            raise NotImplementedError(f"{backend.name}: no available kernel") from error
        raise


def _declared(extra: set[str], **rest: Any) -> Support:
    features = frozenset({"causal", "cross", "scale", "backward"} | extra)
    return Support(features=features, devices=frozenset({"cuda"}), **rest)


_HALF = frozenset({"fp16", "bf16"})
sdpa_flash.__flashattn__ = _declared({"gqa", "lse"}, dtypes=_HALF, max_head_dim=256)  # type: ignore[attr-defined]
sdpa_efficient.__flashattn__ = _declared({"dv", "bias", "mask", "bias_grad"})  # type: ignore[attr-defined]
sdpa_cudnn.__flashattn__ = _declared(  # type: ignore[attr-defined]
    {"gqa", "dv"}, dtypes=_HALF, max_head_dim=256, alignment="top-left"
)


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _fa3() -> Any:
    for module in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            return importlib.import_module(module).flash_attn_func
        except (ImportError, AttributeError):
            continue
    raise NotImplementedError("FlashAttention-3 is not installed; its forward: pip install fa3-fwd")


def fa3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention-3's forward, in bf16 and e4m3. q (B, Lq, Hq, D), k and v (B, Lk, Hkv, D), descales (B, Hkv)."""
    return _fa3()(
        q, k, v, softmax_scale=softmax_scale, causal=causal, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, window_size=window_size, softcap=softcap, return_attn_probs=return_attn_probs,
    )  # fmt: skip


# What the wheel fa3-fwd is built with: no gradients, windows or fp16.
fa3.__flashattn__ = Support(  # type: ignore[attr-defined]
    features=frozenset({"causal", "cross", "gqa", "scale", "softcap", "lse", "descale_group"}),
    dtypes=frozenset({"bf16", "e4m3"}),
    max_head_dim=256,
    p_scale=256,
    fp8_sums="14 bits",
    devices=frozenset({"cuda"}),
)


def flex_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """flex_attention compiled, as its documentation says to use it: every new shape compiles, seconds each on a GPU."""
    import torch._dynamo
    import torch._functorch.config

    # A suite has more shapes than dynamo's limit, behind which it would silently fall back to the eager form; and a
    # graph whose backward runs twice must keep its buffers.
    with (
        torch._dynamo.config.patch(recompile_limit=100_000, accumulated_recompile_limit=100_000),
        torch._functorch.config.patch(donated_buffer=False),
    ):
        return _compiled()(
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            enable_gqa,
            return_lse,
            kernel_options,
            return_aux=return_aux,
        )
