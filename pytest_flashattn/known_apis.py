"""The attention APIs that are known: one `Convention` each, as data, and which of them a function follows.

`infer` picks by identity or signature and trims the entry to the keywords that the function has. Only an API that
expresses several options through one (flex_attention's score_mod) needs code: its `translate`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .conventions import DESCALED, FEATURES_OF, Convention, declared, is_apply, parameters_of
from .features import DTYPES, FP8
from .support import Support

# -- APIs that express options through one another --------------------------------------------------------------------


def _sdpa(q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """SDPA refuses is_causal next to attn_mask, so the diagonal, top-left as is_causal's, goes into the mask."""
    said = dict(options)
    if said.get("causal") and "bias" in said:
        bias = said["bias"]
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        said["bias"] = bias & visible if bias.dtype == torch.bool else bias.masked_fill(~visible, -math.inf)
        del said["causal"]
    return said


def _flex(q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Masks become a block_mask; softcap, ALiBi and an additive bias, in this order, a score_mod."""
    from torch.nn.attention.flex_attention import create_block_mask

    said = dict(options)
    batch, heads, lq, lk = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    left, right = said.pop("window", None) or (None, None)
    if said.pop("causal", False):
        right = 0
    softcap, slopes, bias = (said.pop(name, None) for name in ("softcap", "alibi_slopes", "bias"))
    mask = None
    if bias is not None:
        bias = bias.expand(batch, heads, lq, lk)
        if bias.dtype == torch.bool:
            mask, bias = bias, None

    if not (lq and lk):
        pass  # nothing to mask, and create_block_mask does not take empty lengths
    elif mask is not None:
        near = _band(lq, lk, left, right)
        seen = lambda b, h, i, j: near(b, h, i, j) & mask[b, h, i, j]  # noqa: E731
        said["block_mask"] = create_block_mask(seen, batch, heads, lq, lk, device=q.device)
    elif (left, right) != (None, None):
        said["block_mask"] = _band_block_mask(lq, lk, left, right, q.device)

    if softcap is not None or slopes is not None or bias is not None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if slopes is not None:
                score = score - slopes[h] * (i + (lk - lq) - j).abs()
            if bias is not None:
                score = score + bias[b, h, i, j]
            return score

        said["score_mod"] = score_mod
    return said


def _band(lq: int, lk: int, left: int | None, right: int | None) -> Callable[..., Any]:
    """The mask_mod of a window around the bottom-right diagonal; no key is farther than Lq + Lk from it."""
    low = -(lq + lk) if left is None else -left
    high = lq + lk if right is None else right

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i - (lk - lq)
        return (distance >= low) & (distance <= high)

    return near


@functools.lru_cache(maxsize=64)
def _band_block_mask(lq: int, lk: int, left: int | None, right: int | None, device: torch.device) -> Any:
    # Cached: building one reads all Lq x Lk positions, and repeated calls are timed.
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_band(lq, lk, left, right), None, None, lq, lk, device=device)


def _aux_request(wanted: bool) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=wanted)


# -- the table --------------------------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN_NAMES: dict[str, tuple[str, ...]] = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "sm_scale", "softmax_scale", "scaling"),
    "window": ("window", "window_size"),
    "softcap": ("softcap", "soft_cap", "logit_softcap", "logits_soft_cap"),
    "alibi_slopes": ("alibi_slopes", "slopes"),
    "bias": ("bias", "attn_bias", "attn_mask"),
    "mask": ("mask", "attn_mask"),
    "sinks": ("sinks", "sink", "learnable_sink"),
    "return_lse": ("return_lse", "return_softmax_lse"),
    **{option: (option,) for option in DESCALED},
}
_PLAIN_SUPPORT = Support(
    features=_words("gqa cross dv backward descale_tensor descale_head descale_block").union(
        *(FEATURES_OF[option] for option in _PLAIN_NAMES if option not in DESCALED)
    ),
    dtypes=frozenset({*DTYPES, *FP8}),
)
_HALF = frozenset({"fp16", "bf16"})
_CUDA = frozenset({"cuda"})

# The order is that of recognition. canonical and bshd recognise nothing: canonical is what remains, bshd looks the same
# in a signature and so has to be named.
_TABLE = (
    Convention(
        name="triton-tutorial",
        summary="attention(q, k, v, causal, sm_scale) of the Triton tutorial 06-fused-attention: positional, BHSD",
        names={"causal": ("causal",), "scale": ("sm_scale",)},
        always=("causal", "scale"),
        positional=True,
        support=Support(
            features=_words("causal scale backward"),
            dtypes=frozenset({"fp16"}),  # the tutorial casts P to tl.float16
            head_dims=frozenset({16, 32, 64, 128, 256}),
            length_multiple=128,
            devices=_CUDA,
        ),
        leading=("q", "k", "v", "causal", "sm_scale"),
    ),
    Convention(
        name="torch-sdpa",
        summary="torch.nn.functional.scaled_dot_product_attention: BHSD, attn_mask, top-left is_causal",
        names={"causal": ("is_causal",), "scale": ("scale",), "bias": ("attn_mask",), "gqa": ("enable_gqa",)},
        translate=_sdpa,
        support=Support(
            features=_words("causal cross gqa dv scale bias mask backward bias_grad"),
            alignment="top-left",
        ),
        # The CPU kernel adds blocks (and heads of a group) to dq, dk and dv in their 16-bit memory.
        sums_on={"cpu": "input"},
        identities=("torch.nn.functional:scaled_dot_product_attention",),
        signature=frozenset({"attn_mask", "dropout_p", "is_causal"}),
    ),
    Convention(
        name="flex-attention",
        summary="torch.nn.attention.flex_attention: BHSD, everything through score_mod and block_mask",
        names={"scale": ("scale",), "gqa": ("enable_gqa",), "return_lse": ("return_aux", "return_lse")},
        encode={"return_aux": _aux_request},
        translate=_flex,
        lse_from=lambda second: getattr(second, "lse", second),  # AuxOutput, or the lse itself before return_aux
        ignore_warning="flex_attention called without torch.compile",
        # bias_grad: score_mod differentiates a captured bias on CUDA only, and not for every broadcast.
        support=Support(
            features=_words("causal cross gqa dv scale window softcap alibi bias mask lse backward lse_grad"),
        ),
        lacks_on={device: frozenset({"backward", "lse_grad"}) for device in ("cpu", "mps")},
        identities=("torch.nn.attention.flex_attention:flex_attention",),
        signature=frozenset({"score_mod", "block_mask"}),
    ),
    Convention(
        name="flashinfer",
        summary="flashinfer.single_prefill_with_kv_cache: one sequence a call, (L, H, D), lse to base 2",
        layout="shd",
        # window_left alone cannot express (left, right), and custom_mask has no heads.
        names={
            "causal": ("causal",),
            "scale": ("sm_scale",),
            "softcap": ("logits_soft_cap",),
            "return_lse": ("return_lse",),
        },
        constants={"kv_layout": "NHD"},
        lse_layout="sh",
        lse_base=2.0,
        support=Support(
            features=_words("causal cross gqa scale softcap lse"),
            dtypes=_HALF,
            head_dims=frozenset({64, 128, 256}),
            devices=_CUDA,
        ),
        signature=frozenset({"kv_layout", "sm_scale", "window_left", "logits_soft_cap"}),
    ),
    Convention(
        name="flash-attn",
        summary="flash_attn_func of flash-attn 2, 3 and 4: BSHD, softmax_scale, window_size",
        layout="bshd",
        names={
            "causal": ("causal",),
            "scale": ("softmax_scale",),
            "window": ("window_size",),
            "softcap": ("softcap",),
            "alibi_slopes": ("alibi_slopes",),
            "return_lse": ("return_lse", "return_attn_probs"),
            **{option: (option,) for option in DESCALED},  # 3 only, (B, Hkv) all three
        },
        encode={"alibi_slopes": Tensor.float},
        unbounded=-1,
        extras=True,  # 2 returns S_dmask as well, 4 always a pair
        # dv: 3 and 4 serve it for some pairs of dims only. lse_grad: 2 and 3 ignore it. sinks: 4 takes them in bf16
        # only. Whoever has a build that does more attaches a Support.
        support=Support(
            features=_words("causal cross gqa scale window softcap alibi lse backward descale_group"),
            dtypes=_HALF | {"e4m3"},
            p_scale=256,
            fp8_sums="14 bits",
            max_head_dim=256,
            devices=_CUDA,
        ),
        signature=frozenset({"softmax_scale", "window_size"}),
        leading=("q", "k", "v"),
    ),
    Convention(
        name="canonical",
        summary="attn(q, k, v, *, causal, scale, window, softcap, alibi_slopes, bias, sinks, return_lse): BHSD",
        names=_PLAIN_NAMES,
        support=_PLAIN_SUPPORT,
    ),
    Convention(
        name="bshd",
        summary="the canonical call with q, k, v and out in (B, L, H, D); the lse stays (B, H, L)",
        layout="bshd",
        names=_PLAIN_NAMES,
        support=_PLAIN_SUPPORT,
    ),
)

CONVENTIONS: Mapping[str, Convention] = MappingProxyType({c.name: c for c in _TABLE})
"""Every known convention by name, in the order in which `infer` tries them."""


# -- which one a function follows -------------------------------------------------------------------------------------


def infer(function: Callable[..., Any], convention: Convention | None = None) -> tuple[Convention, Support]:
    """The convention that `function` follows, trimmed to its keywords, and what the function supports.

    `convention` overrides the choice. A `__flashattn__ = Support(...)` on the function, its object or class, or on what
    it wraps, overrides the support. `**kwargs` count for nothing: only named parameters are promises.
    Raises ValueError, in one sentence, for a function that cannot be understood.
    """
    if convention is None:
        convention = next((c for c in CONVENTIONS.values() if c.matches(function)), CONVENTIONS["canonical"])
    try:
        parameters = parameters_of(function)
    except ValueError:
        # A builtin hides its signature. That is no harm when the convention knows it by identity or by position.
        if not (convention.positional or convention.matches(function)):
            raise
    else:
        if is_apply(function) and not convention.positional:
            raise ValueError(
                "is the apply of an autograd.Function, which takes no keywords: wrap it in a function "
                "attn(q, k, v, *, causal=False, ...), or name the triton-tutorial convention"
            )
        convention = convention.bind(parameters)
    return convention, declared(function) or convention.support
