"""Equivalents that are called in other ways: other names, layouts, objects, wrappers, and PyTorch's own backends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_flashattn.features import FEATURES
from pytest_flashattn.support import Support

from .core import INF, Band, Core, Problem
from .equivalents_registry import EQUIVALENTS, equivalent

EVERYTHING = frozenset(FEATURES)


@equivalent("top_left")
class TopLeft(Core):
    """The diagonal starts top left, as declared."""

    __flashattn__ = Support(features=EVERYTHING, alignment="top-left")

    def diagonal(self, p: Problem) -> int:
        return 0


@equivalent("bshd", convention="bshd", made=True)
def bshd() -> Callable[..., Any]:
    """q, k, v and out in (B, L, H, D)."""
    core = Core()

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, return_lse: bool = False
    ) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o, lse = core(q, k, v, causal=causal, scale=scale, return_lse=True)
        return (o.transpose(1, 2), lse) if return_lse else o.transpose(1, 2)

    return attention


@equivalent("other_names")
def other_names(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    sm_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    soft_cap: float = 0.0,
    slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """The words of other libraries, by position or by name; -1 and 0 for what is absent."""
    window: Band | None = None
    if window_size != (-1, -1):
        left, right = (None if side < 0 else side for side in window_size)
        window = (left, right)
    return Core()(
        query, key, value, causal=is_causal, scale=sm_scale, window=window, softcap=soft_cap or None,
        alibi_slopes=slopes, bias=attn_bias, sinks=learnable_sink, return_lse=return_softmax_lse,
    )  # fmt: skip


@equivalent("module")
class Attention(torch.nn.Module):
    """An nn.Module with the contract as its forward."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        o: Tensor = Core()(q, k, v, causal=causal, scale=scale)  # type: ignore[assignment]
        return o


@equivalent("partial", made=True)
def partial() -> Callable[..., Any]:
    """functools.partial of a function with one more parameter."""

    def tiled(q: Tensor, k: Tensor, v: Tensor, tile: int, *, causal: bool = False, return_lse: bool = False) -> Any:
        core = Core()
        core.block_q = core.block_k = tile
        return core(q, k, v, causal=causal, return_lse=return_lse)

    return functools.partial(tiled, tile=48)


@equivalent("always_contiguous")
class AlwaysContiguous(Core):
    """Copies whatever it is given first."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        return super().run(replace(p, q=p.q.contiguous(), k=p.k.contiguous(), v=p.v.contiguous()))


@equivalent("output_in_other_order")
class OutputInOtherOrder(Core):
    """The output lies in (B, L, H, D) memory whatever q does."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        o, lse = super().forward(p)
        return o.transpose(1, 2).contiguous().transpose(1, 2), lse


@equivalent("sdpa_math")
def sdpa_math(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """PyTorch's own, in float32, with a mask for the bottom-right diagonal."""
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        if bias is None or bias.dtype == torch.bool:
            bias = seen if bias is None else bias & seen
        else:
            bias = bias.float().masked_fill(~seen, -INF)
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.float()
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(
            q.float(), k.float()[:, heads], v.float()[:, heads], attn_mask=bias, scale=scale
        )
    if bias is not None and bias.dtype != torch.bool and q.shape[2] * k.shape[2] == 0:
        out = out + 0 * bias.clamp(-1, 1).sum()  # which PyTorch leaves unconnected: its gradient would be None
    return out.to(q.dtype)


sdpa_math.__flashattn__ = Support(
    features=frozenset({"causal", "cross", "gqa", "dv", "scale", "bias", "mask", "backward", "bias_grad"}),
    p_dtype="fp32",
)


@equivalent("dense_autograd")
def dense_autograd(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, return_lse: bool = False) -> Any:
    """The definition, with the whole score matrix in float32 and autograd's own backward."""
    group = q.shape[1] // k.shape[1]
    kf, vf = (x.float().repeat_interleave(group, 1) for x in (k, v))
    s = q.float() @ kf.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        s = s.masked_fill(hidden, -INF)
    lse = s.logsumexp(-1) if k.shape[2] else torch.full(s.shape[:3], -INF)
    prob = (s - lse.masked_fill(lse == -INF, 0)[..., None]).exp()
    o = (prob @ vf).to(q.dtype)
    return (o, lse) if return_lse else o


dense_autograd.__flashattn__ = Support(
    features=frozenset({"causal", "cross", "gqa", "dv", "lse", "backward"}), p_dtype="fp32"
)


@equivalent("forward_only")
def forward_only(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Band | None = None) -> Tensor:
    """No graph, and no declaration that there is one."""
    with torch.no_grad():
        o: Tensor = Core()(q, k, v, causal=causal, window=window)  # type: ignore[assignment]
    return o


@equivalent("raises_for_the_rest")
def raises_for_the_rest(q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> Tensor:
    """Plain attention by position only, equal heads; anything else raises."""
    if options or q.shape[1] != k.shape[1] or q.shape[2] != k.shape[2] or q.shape != v.shape:
        raise NotImplementedError(f"plain attention only, not {', '.join(options) or 'these shapes'}")
    o: Tensor = Core()(q, k, v)  # type: ignore[assignment]
    return o


@equivalent("flash_attn_style")
def flash_attn_style(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> tuple[Tensor, Tensor, None]:
    """The signature of flash_attn_func, (B, L, H, D), and a triple with the log-sum-exp whether asked for or not."""
    left, right = (None if side < 0 else side for side in window_size)
    window = None if (left, right) == (None, None) else (left, right)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = Core()(
        q, k, v, causal=causal, scale=softmax_scale, window=window, softcap=softcap or None,
        alibi_slopes=alibi_slopes, return_lse=True,
    )  # fmt: skip
    return o.transpose(1, 2), lse, None


flash_attn_style.__flashattn__ = Support(  # type: ignore[attr-defined]
    features=EVERYTHING - {"bias", "mask", "sinks", "bias_grad", "sinks_grad"}
)


@equivalent("sdpa_style")
def sdpa_style(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The signature and the top-left diagonal of scaled_dot_product_attention."""
    core = EQUIVALENTS["top_left"].make()
    o: Tensor = core(query, key, value, causal=is_causal, scale=scale, bias=attn_mask)
    return o


@equivalent("tutorial_style")
def tutorial_style(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    """The apply of an autograd.Function, behind the signature of the Triton tutorial: all by position."""
    o: Tensor = _Tutorial.apply(q, k, v, causal, sm_scale)
    return o


tutorial_style.__flashattn__ = Support(features={"causal", "cross", "gqa", "dv", "scale", "backward"})  # type: ignore[attr-defined]


class _Tutorial(torch.autograd.Function):
    """Keeps o and lse, and has the core's backward recompute the rest."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        ctx.problem = Problem(q, k, v, scale, causal)
        o, lse = Core().forward(ctx.problem)
        ctx.save_for_backward(o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        o, lse = ctx.saved_tensors
        found = Core().backward(ctx.problem, o, lse, do, torch.zeros_like(lse))
        return *(found[name].to(do.dtype) for name in "qkv"), None, None


@equivalent("bound_method", made=True)
def bound_method() -> Callable[..., Any]:
    """A method of an object, decorated."""

    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            return function(*args, **options)

        return call

    class Layer:
        core = Core()

        @logged
        def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Any:
            return self.core(q, k, v, causal=causal, scale=scale)

    return Layer().attend


@equivalent("custom_op", made=True)
def custom_op() -> Callable[..., Any]:
    """An operator registered with torch.library, behind a function."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        o: Tensor = _operator()(q, k, v, causal)
        return o

    return attention


@functools.cache
def _operator() -> Any:
    @torch.library.custom_op("flashattn_mutants::attention", mutates_args=())
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return Core().forward(Problem(q, k, v, q.shape[-1] ** -0.5, causal))[0]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.inputs = inputs

    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.inputs[:3])
            o: Tensor = Core()(q, k, v, causal=ctx.inputs[3])  # type: ignore[assignment]
        return *torch.autograd.grad(o, (q, k, v), do), None

    attention.register_autograd(backward, setup_context=keep)
    return attention


@equivalent("compiled", made=True)
def compiled() -> Callable[..., Any]:
    """torch.compile around the definition."""
    return _compiled()


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Each shape is compiled: dynamo gives up after a few and runs the rest as it stands, which is as right.
    function: Callable[..., Any] = torch.compile(dense_autograd, backend="eager", dynamic=True)
    return function


@equivalent("sdpa_flash")
def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """PyTorch's flash kernel alone, where it is right: a scale above 0."""
    if scale is not None and scale <= 0:
        raise NotImplementedError("scale <= 0 with is_causal gives NaN")
    if not (q.numel() and k.numel()) or q.shape[3] != v.shape[3] or {x.stride(3) for x in (q, k, v)} != {1}:
        raise NotImplementedError("empty inputs, another value dim, strided head dims")
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k[:, heads], v[:, heads], is_causal=causal, scale=scale
        )


sdpa_flash.__flashattn__ = Support(
    features={"causal", "cross", "gqa", "scale", "backward"}, alignment="top-left", gradient_sums="input"
)
