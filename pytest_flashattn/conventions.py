"""Calling conventions: how an attention API spells the canonical call, and how a function shows which one it follows.

A `Convention` is data: layout, keywords, the encoding of an open window, the place and base of the log-sum-exp, what
the API serves. The table of them, and how one is chosen, is `known_apis`.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .features import DESCALES, FP8
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

DESCALED = ("q_descale", "k_descale", "v_descale")
"""Options that make FP8 inputs possible, all three together; their granularity is what the support says."""


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
        descaled = names.keys() >= set(DESCALED)
        if not descaled:
            names = {option: keywords for option, keywords in names.items() if option not in DESCALED}
        meant = {keyword for (keyword,) in names.values()} | self.constants.keys()
        if needed := [p.name for p in options.values() if p.default is p.empty and p.name not in meant]:
            raise ValueError(
                f"needs {', '.join(needed)}, which the {self.name} convention does not give: wrap it in a function "
                "attn(q, k, v, *, causal=False, ...), or name another convention"
            )
        served = frozenset[str]().union(*(FEATURES_OF.get(option, frozenset()) for option in names))
        missing = self.names.keys() - names.keys()
        absent = frozenset[str]().union(*(FEATURES_OF.get(option, frozenset()) for option in missing))
        dtypes = self.support.dtypes
        if not descaled:
            absent |= {f"descale_{word}" for word in DESCALES}
            dtypes -= set(FP8)
        elif any(options[names[option][0]].default is inspect.Parameter.empty for option in DESCALED):
            dtypes &= set(FP8)  # it cannot be called without, and FP8 has no gradients
            absent |= {"backward", "bias_grad", "sinks_grad", "lse_grad"}
            served -= {"lse_grad", "bias_grad", "sinks_grad"}
        unbounded = self.unbounded
        if "window" in names and isinstance(default := options[names["window"][0]].default, tuple):
            unbounded = -1 if -1 in default else None
        return replace(
            self,
            names=names,
            always=tuple(o for o, (k,) in names.items() if not _neutral(o, options[k].default)),
            unbounded=unbounded,
            support=replace(self.support, features=self.support.features - (absent - served), dtypes=dtypes),
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


def declared(function: Callable[..., Any]) -> Support | None:
    """The Support attached to `function` or to a layer below it, or made of a dict of its fields that is attached.

    Raises ValueError when it is something else, or a field is not known.
    """
    for layer in layers(function):
        support = getattr(layer, "__flashattn__", None)
        if isinstance(support, Support):
            return support
        if isinstance(support, dict):  # so that a library of kernels need not import the plugin
            known = [field.name for field in fields(Support)]
            if strange := [str(name) for name in support if name not in known]:
                raise ValueError(f"has a __flashattn__ with unknown {', '.join(strange)}; known: {', '.join(known)}")
            try:
                return Support(**support)
            except (TypeError, ValueError) as error:
                raise ValueError(f"has a __flashattn__ that is wrong: {error}") from None
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
    if is_apply(function):
        forward: Callable[..., Any] = function.__self__.forward
        with_ctx = function.__self__.setup_context is torch.autograd.Function.setup_context
        return functools.partial(forward, None) if with_ctx else forward
    result: Callable[..., Any] = function
    return result


def is_apply(function: Any) -> bool:
    """Whether `function` is the apply of an autograd.Function, which takes no keywords."""
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
