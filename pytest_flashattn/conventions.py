"""Calling conventions: how each known attention API spells the canonical call, and which one a function follows.

A `Convention` is data: layout, keywords, the encoding of an open window, the place and base of the log-sum-exp, what
the API serves. `infer` picks the one that a function follows, by identity or signature, and trims it to the keywords
that the function has. Only an API that expresses several options through one (flex_attention's score_mod) needs code:
its `translate`.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .support import Support

Parameters = Mapping[str, inspect.Parameter]

FEATURES_OF: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "causal": frozenset({"causal"}),
        "scale": frozenset({"scale"}),
        "window": frozenset({"window"}),
        "softcap": frozenset({"softcap"}),
        "alibi_slopes": frozenset({"alibi"}),
        "bias": frozenset({"bias", "mask", "bias_grad"}),
        "mask": frozenset({"mask"}),
        "sinks": frozenset({"sinks", "sinks_grad"}),
        "gqa": frozenset({"gqa"}),
        "return_lse": frozenset({"lse", "lse_grad"}),
    }
)
"""The features behind each option of a call. Two of them are no keyword of the contract: "mask" is a boolean bias for
an API that has a keyword of its own for it, "gqa" the flag that some APIs want when the numbers of heads differ."""


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How one API spells the canonical call. Frozen; `bind` adapts a copy to one function.

    name, summary: what `--flashattn-convention` takes, and one line about it.
    layout: the axes of q, k, v, out in the API's order: "bhsd", "bshd", or "shd" (one call for each batch entry).
    names: option -> the keywords that mean it, best first. An option that is absent goes under its canonical name.
    always: options passed even at their default, since the function has none or another one.
    positional: pass the options of `always` by position after q, k, v, in that order.
    constants: keywords that every call passes.
    encode: keyword -> conversion of the value passed under it.
    unbounded: what stands for an open side of the window.
    translate: (q, k, v, options) -> options, for an API that expresses several options through one.
    ignore_warning: the start of a warning that says nothing of correctness; silenced, lest -W error makes it a failure.
    extras: a call may return more than it was asked for: out first, lse second.
    lse_layout, lse_base, lse_from: axes and base of the lse; how to take it from the second value returned.
    support: what the API serves. lacks_on: device type -> features that it lacks there. sums_on: device type -> how it
    adds up dk and dv there (`Support.gradient_sums`).
    identities: "module:name" of the API. signature, leading: a function is also recognised when it has all parameters
    of `signature` and starts with those of `leading`, none of which has a default.
    """

    name: str
    summary: str
    layout: str = "bhsd"
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    always: tuple[str, ...] = ()
    positional: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    encode: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    unbounded: int | None = None
    translate: Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], dict[str, Any]] | None = None
    ignore_warning: str | None = None
    extras: bool = False
    lse_layout: str = "bhs"
    lse_base: float = math.e
    lse_from: Callable[[Any], Any] = lambda second: second
    support: Support = field(default_factory=Support)
    lacks_on: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sums_on: Mapping[str, str] = field(default_factory=dict)
    identities: tuple[str, ...] = ()
    signature: frozenset[str] = frozenset()
    leading: tuple[str, ...] = ()

    @property
    def alignment(self) -> str:
        """Where the causal diagonal ends when Lq != Lk: "bottom-right" or "top-left"."""
        return self.support.alignment

    def matches(self, function: Callable[..., Any]) -> bool:
        """Whether `function` is the API, something built around it, or has a signature that only this API has."""
        if any(_is(layer, identity) for layer in layers(function) for identity in self.identities):
            return True
        if not (self.signature or self.leading):
            return False
        try:
            parameters = parameters_of(function)
        except ValueError:
            return False
        first = list(parameters.values())[: len(self.leading)]
        leads = tuple(p.name for p in first) == self.leading and all(p.default is p.empty for p in first)
        return leads and self.signature <= parameters.keys()

    def bind(self, parameters: Parameters) -> Convention:
        """This convention for a function with these parameters: only the keywords and the features that it has.

        Raises ValueError when the function cannot be called with q, k, v and the options of this convention.
        """
        if self.positional:  # the order says what an argument is, whatever its name
            return self
        options = _after_qkv(parameters)
        names = {}
        for option, keywords in self.names.items():
            if known := [k for k in keywords if k in options and _same_meaning(option, options[k].default)]:
                names[option] = (known[0],)
        if names.get("mask") == names.get("bias"):
            names.pop("mask", None)  # one keyword takes both, as in the contract
        meant = {keyword for (keyword,) in names.values()} | self.constants.keys()
        if needed := [p.name for p in options.values() if p.default is p.empty and p.name not in meant]:
            raise ValueError(
                f"needs {', '.join(needed)}, which the {self.name} convention does not give: wrap it in a function "
                "attn(q, k, v, *, causal=False, ...), or name another convention"
            )
        served = frozenset[str]().union(*(FEATURES_OF[option] for option in names))
        absent = frozenset[str]().union(*(FEATURES_OF[option] for option in self.names.keys() - names.keys()))
        unbounded = self.unbounded
        if "window" in names and isinstance(default := options[names["window"][0]].default, tuple):
            unbounded = -1 if -1 in default else None
        return replace(
            self,
            names=names,
            always=tuple(o for o, (k,) in names.items() if not _neutral(o, options[k].default)),
            unbounded=unbounded,
            support=replace(self.support, features=self.support.features - (absent - served)),
        )

    def arguments(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The native call as (positional, by keyword).

        q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) of any strides; for the layout "shd" B is 1.
        options: the keywords of the contract that differ from their defaults, `return_lse` among them. Tensors are
        viewed in the native layout, never copied: a kernel that cannot read them has to say so itself.
        """
        said = dict(options)
        if self.translate is not None:
            said = self.translate(q, k, v, said)
        if "gqa" in self.names and q.shape[1] != k.shape[1]:
            said["gqa"] = True
        if "mask" in self.names and isinstance(bias := said.get("bias"), Tensor) and bias.dtype == torch.bool:
            said["mask"] = said.pop("bias")
        for option in self.always:
            said.setdefault(option, self._neutral_value(option, q.shape[-1]))
        if said.get("window") is not None:
            said["window"] = tuple(self.unbounded if side is None else side for side in said["window"])
        positional: list[Any] = [relayout(x, "bhsd", self.layout) for x in (q, k, v)]
        if self.positional:
            positional += [said.pop(option) for option in self.always]
        keywords = dict(self.constants)
        for option, value in said.items():
            keyword = self.names.get(option, (option,))[0]
            keywords[keyword] = self.encode[keyword](value) if keyword in self.encode else value
        return positional, keywords

    def _neutral_value(self, option: str, head_dim: int) -> Any:
        if option == "scale":
            return head_dim**-0.5
        if option == "window" and self.unbounded is not None:
            return None, None
        return False if option in ("causal", "return_lse") else None


def relayout(x: Tensor, source: str, target: str) -> Tensor:
    """A view of `x` with its axes, named by the letters of `source`, in the order of `target`.

    An axis that only one of the two has is of size 1.
    """
    for axis in source:
        if axis not in target:
            x = x.select(source.index(axis), 0)
            source = source.replace(axis, "")
    for axis in target:
        if axis not in source:
            x = x.unsqueeze(0)
            source = axis + source
    return x if source == target else x.permute([source.index(axis) for axis in target])


# -- which convention a function follows ------------------------------------------------------------------------------


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
        if _is_apply(function) and not convention.positional:
            raise ValueError(
                "is the apply of an autograd.Function, which takes no keywords: wrap it in a function "
                "attn(q, k, v, *, causal=False, ...), or name the triton-tutorial convention"
            )
        convention = convention.bind(parameters)
    return convention, declared(function) or convention.support


def declared(function: Callable[..., Any]) -> Support | None:
    """The Support attached to `function` or to a layer below it. Raises ValueError when it is something else."""
    for layer in layers(function):
        support = getattr(layer, "__flashattn__", None)
        if isinstance(support, Support):
            return support
        if support is not None:
            raise ValueError(f"has a __flashattn__ that is no Support(...) but a {type(support).__name__}")
    return None


def layers(function: Any) -> Iterator[Any]:
    """`function`, then what it is built around: partials, wrappers, compiled functions and modules, bound objects."""
    seen: set[int] = set()
    queue = [function]
    while queue:
        layer = queue.pop(0)
        if id(layer) in seen or inspect.ismodule(layer):
            continue
        seen.add(id(layer))
        yield layer
        names = ["__wrapped__", "_orig_mod", "__self__"] + ["func"] * isinstance(layer, functools.partial)
        queue += [inner for name in names if (inner := getattr(layer, name, None)) is not None]


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """The named parameters of a call of `function`, q, k, v first; without *args and **kwargs.

    Raises ValueError when there is no signature to read.
    """
    try:
        signature = inspect.signature(_face(function))
    except (TypeError, ValueError):
        raise ValueError("has no signature that can be read: name its --flashattn-convention") from None
    return {p.name: p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _face(function: Any) -> Callable[..., Any]:
    """The callable whose signature is that of `function`: the outer layers of torch show only (*args, **kwargs)."""
    if isinstance(function, functools.partial):
        return functools.partial(_face(function.func), *function.args, **function.keywords)
    if isinstance(function, torch.nn.Module):
        return _face(getattr(function, "_orig_mod", function).forward)
    if _is_apply(function):
        forward: Callable[..., Any] = function.__self__.forward
        with_ctx = function.__self__.setup_context is torch.autograd.Function.setup_context
        return functools.partial(forward, None) if with_ctx else forward
    result: Callable[..., Any] = function
    return result


def _is_apply(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and function.__name__ == "apply"


def _is(layer: Any, identity: str) -> bool:
    # Through sys.modules: whoever holds the function has imported its module, and nothing else should be.
    module, _, name = identity.partition(":")
    return layer is getattr(sys.modules.get(module), name, ...)


def _after_qkv(parameters: Parameters) -> Parameters:
    positional = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if len(positional) < 3 and any(p.kind is not p.KEYWORD_ONLY for p in parameters.values()):
        raise ValueError(f"takes {len(positional)} positional arguments, not q, k, v")
    return {name: p for name, p in parameters.items() if name not in positional[:3]}


def _same_meaning(option: str, default: Any) -> bool:
    # A window that defaults to one number is a width, which no two-sided window can be passed as.
    return option != "window" or not isinstance(default, int)


def _neutral(option: str, default: Any) -> bool:
    """Whether leaving the option out means what the contract's default means."""
    if default is inspect.Parameter.empty:
        return False
    if option == "window" and isinstance(default, tuple):
        return all(side in (None, -1) for side in default)
    if option == "scale" or not isinstance(default, (bool, int, float)):
        return default is None
    return not default


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
}
_PLAIN_SUPPORT = Support(
    features=_words("gqa cross dv backward").union(*(FEATURES_OF[option] for option in _PLAIN_NAMES))
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
        },
        encode={"alibi_slopes": Tensor.float},
        unbounded=-1,
        extras=True,  # 2 returns S_dmask as well, 4 always a pair
        # dv: 3 and 4 serve it for some pairs of dims only. lse_grad: 2 and 3 ignore it. sinks: 4 takes them in bf16
        # only. Whoever has a build that does more attaches a Support.
        support=Support(
            features=_words("causal cross gqa scale window softcap alibi lse backward"),
            dtypes=_HALF,
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
