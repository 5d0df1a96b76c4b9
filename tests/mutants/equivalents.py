"""Unusual implementations that are right: the suite must pass every one of them, or it raises false alarms."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_flashattn.features import FEATURES
from pytest_flashattn.support import Support

from .core import INF, Band, Core, Problem
from .split import SplitCore

EVERYTHING = frozenset(FEATURES)
LN2 = math.log(2)


@dataclass(frozen=True)
class Equivalent:
    """make: a fresh implementation; convention: the one to name for it, None where the suite finds it by itself."""

    name: str
    make: Callable[[], Callable[..., Any]]
    about: str
    convention: str | None = None


EQUIVALENTS: dict[str, Equivalent] = {"honest": Equivalent("honest", Core, "The honest core itself.")}


def equivalent(name: str, *, convention: str | None = None, made: bool = False) -> Callable[[Any], Any]:
    """Register a class (called for a fresh object), a function, or with `made` a function that makes one."""

    def register(thing: Any) -> Any:
        make = thing if made or isinstance(thing, type) else lambda: thing
        EQUIVALENTS[name] = Equivalent(name, make, (thing.__doc__ or "").strip(), convention)
        return thing

    return register


# -- another order of the same arithmetic -----------------------------------------------------------------------------


@equivalent("reverse_keys")
class ReverseKeys(Core):
    """Key tiles from the last to the first, as FlashAttention-2 visits them."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        return list(super().key_tiles(p, i))[::-1]


@equivalent("small_tiles")
class SmallTiles(Core):
    """Tiles of 16 x 32."""

    block_q, block_k = 16, 32


@equivalent("large_tiles")
class LargeTiles(Core):
    """Tiles of 128 x 176, neither of them equal nor a power of two."""

    block_q, block_k = 128, 176


@equivalent("random_order")
class RandomOrder(Core):
    """Key tiles in another order at every call, and declared as not deterministic."""

    __flashattn__ = Support(features=EVERYTHING, deterministic=False)

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        tiles = list(super().key_tiles(p, i))
        return self.random.sample(tiles, len(tiles))


@equivalent("split_kv")
class SplitKv(SplitCore):
    """Up to 64 rows: the keys in four splits, some of them empty, merged by their log-sum-exp."""

    most_rows = 64


@equivalent("sink_first")
class SinkFirst(Core):
    """The running maximum and sum start with the sink instead of ending with it."""

    def start(self, p: Problem, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, total, acc = super().start(p, q)
        return (m, total, acc) if p.sinks is None else (self.sink_logit(p, m).clone(), torch.ones_like(m), acc)

    def sink(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return m, total, acc


# -- other roundings that are as good ---------------------------------------------------------------------------------


@equivalent("lazy_rescaling")
class LazyRescaling(Core):
    """The accumulator is rescaled only when the maximum has risen by more than 2^8, as in FlashAttention-4."""

    def step(
        self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        peak = torch.maximum(m, s.amax(-1, keepdim=True))
        m_new = torch.where((peak - self.base(m) > 8 * LN2) | (m == -INF), peak, m)
        base = self.base(m_new)
        prob, rescale = self.exp(s - base), self.exp(m - base)
        return m_new, total * rescale + prob.sum(-1, keepdim=True), self.accumulate(p, acc * rescale, prob, v)


@equivalent("p_normalised_first")
class PNormalisedFirst(Core):
    """Two passes: P is divided by the denominator before it is rounded."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        self.lse = None
        self.lse = super().forward(p)[1]
        return super().forward(p)[0], self.lse

    def start(self, p: Problem, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.tile = 0 if self.lse is None else getattr(self, "tile", 0)
        return super().start(p, q)

    def step(
        self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.lse is None:
            return super().step(p, m, total, acc, s, v)
        i = self.tile % max(-(-p.lq // self.block_q), 1) * self.block_q
        return m, total, self.accumulate(p, acc, self.exp(s - self.load_lse(self.lse, i)), v)

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        if self.lse is None:
            return super().epilogue(p, m, total, acc)
        self.tile += 1
        return acc, m.squeeze(-1)

    def sink(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().sink(p, m, total, acc) if self.lse is None else (m, total, acc)


@equivalent("p_sum_of_rounded")
class PSumOfRounded(Core):
    """The output is divided by the sum of P as it was rounded; the log-sum-exp keeps the exact sum."""

    def start(self, p: Problem, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, total, acc = super().start(p, q)
        self.rounded_total = total
        return m, total, acc

    def step(
        self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        m_new, total, acc = super().step(p, m, total, acc, s, v)
        base = self.base(m_new)
        prob = self.rounded(p, self.exp(s - base))
        self.rounded_total = self.rounded_total * self.exp(m - base) + prob.sum(-1, keepdim=True)
        return m_new, total, acc

    def sink(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, self.rounded_total, _ = super().sink(p, m, self.rounded_total, acc)
        return super().sink(p, m, total, acc)

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        return super().epilogue(p, m, self.rounded_total, acc)[0], super().epilogue(p, m, total, acc)[1]


@equivalent("base2")
class Base2(Core):
    """exp2 with log2(e) folded into the scores, the log-sum-exp converted at the end."""

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp2(x * (1 / LN2))


@equivalent("scale_into_q")
class ScaleIntoQ(Core):
    """The scale is multiplied into float32 q before the product."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        return (q * p.scale) @ k.mT


@equivalent("fp32_p")
class Fp32P(Core):
    """P and dS stay in float32, as declared."""

    __flashattn__ = Support(features=EVERYTHING, p_dtype="fp32")

    def rounded(self, p: Problem, x: Tensor) -> Tensor:
        return x


@equivalent("tf32")
class Tf32(Core):
    """float32 operands rounded to TF32, as declared."""

    __flashattn__ = Support(features=EVERYTHING, tf32=True)

    def load(self, x: Tensor, start: int, rows: int) -> Tensor:
        tile = super().load(x, start, rows)
        return tile if x.shape[-1] == 1 else _tf32(tile)  # width 1: lse and delta, which enter no product

    def rounded(self, p: Problem, x: Tensor) -> Tensor:
        return _tf32(super().rounded(p, x))


def _tf32(x: Tensor) -> Tensor:
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@equivalent("delta_from_p")
class DeltaFromP(Core):
    """The correction of a row comes from the unrounded output, which is kept for the backward."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        whole = super().forward(replace(p, q=p.q.float()))  # P is not rounded either: a float32 output
        self.exact = whole[0]
        return super().forward(p)

    def delta(self, o: Tensor, do: Tensor) -> Tensor:
        return super().delta(self.exact, do)


@equivalent("heads_rounded_before_sum")
class HeadsRoundedBeforeSum(Core):
    """dK and dV of each query head are rounded before they are summed over the group, as PyTorch does."""

    def over_groups(self, p: Problem, heads: Tensor, x: Tensor) -> Tensor:
        return super().over_groups(p, heads, self.rounded(p, x))


# -- other ways to be called ------------------------------------------------------------------------------------------


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
        return torch.nn.functional.scaled_dot_product_attention(
            q.float(), k.float()[:, heads], v.float()[:, heads], attn_mask=bias, scale=scale
        ).to(q.dtype)


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
