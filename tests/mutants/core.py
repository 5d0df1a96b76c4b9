"""An honest flash attention in plain PyTorch, built so that a fault is a small visible change.

`Core` is the whole contract, forward and backward, tile by tile as a kernel does it: every step is a method of a few
lines. A mutant overrides one of them, and sets `self.reached` on the deviating line; `attn` is the honest one.
Shapes: B batch, H query heads, Bq x Bk a tile of scores, D head dim, Dv value dim. All tiles are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

INF = math.inf
Band = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of one call: tensors as in the contract, `scale` resolved."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool = False
    window: Band | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def lq(self) -> int:
        return self.q.shape[2]

    @property
    def lk(self) -> int:
        return self.k.shape[2]

    @property
    def heads(self) -> int:
        return self.q.shape[1]


class Core:
    """attn(q, k, v, *, causal, scale, window, softcap, alibi_slopes, bias, sinks, return_lse) of the contract."""

    block_q = 64
    block_k = 64

    def __init__(self) -> None:
        self.reached = False

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Band | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        o, lse = self.run(Problem(q, k, v, scale, causal, window, softcap, alibi_slopes, bias, sinks))
        return (o, lse) if return_lse else o

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        """o (B, H, Lq, Dv) in q's dtype and lse (B, H, Lq) float32, both differentiable."""
        result: tuple[Tensor, Tensor] = _Flash.apply(self, self.prepare(p), p.q, p.k, p.v, p.bias, p.sinks)
        return result

    def prepare(self, p: Problem) -> Problem:
        """What the kernels see of the arguments (mutants misread them here)."""
        return p

    # -- tiles --------------------------------------------------------------------------------------------------------

    def head_map(self, p: Problem) -> Tensor:
        """(H,): the kv head that each query head reads."""
        return torch.arange(p.heads) // (p.heads // p.k.shape[1])

    def load(self, x: Tensor, start: int, rows: int) -> Tensor:
        """Rows start … start + rows of x (B, H, L, D) as float32; what lies beyond the end is 0."""
        tile = x[:, :, start : start + rows].float()
        return F.pad(tile, (0, 0, 0, rows - tile.shape[2])) if tile.shape[2] < rows else tile

    def load_k(self, p: Problem, j: int, heads: Tensor) -> Tensor:
        return self.load(p.k, j, self.block_k)[:, heads]

    def load_v(self, p: Problem, j: int, heads: Tensor) -> Tensor:
        return self.load(p.v, j, self.block_k)[:, heads]

    def band(self, p: Problem) -> Band:
        """How many keys left and right of its diagonal a row sees; None: all."""
        left, right = p.window or (None, None)
        if p.causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    def diagonal(self, p: Problem) -> int:
        """The key on which row 0 stands: bottom-right alignment."""
        return p.lk - p.lq

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        """First keys of the tiles that rows i … i + Bq may see."""
        left, right = self.band(p)
        start = i + self.diagonal(p)
        first = 0 if left is None else max(0, start - left) // self.block_k * self.block_k
        stop = p.lk if right is None else min(p.lk, start + self.block_q + right)
        return range(first, max(stop, first), self.block_k)

    # -- scores -------------------------------------------------------------------------------------------------------

    def scores(self, p: Problem, q: Tensor, k: Tensor, i: int, j: int) -> tuple[Tensor, Tensor | None]:
        """(B, H, Bq, Bk) masked scores, and their derivative by the scaled product where there is a softcap."""
        s, slope = self.scaled(p, q, k), None
        if p.softcap is not None:
            s, slope = self.cap(p, s)
        if p.slopes is not None:
            s = s - self.alibi(p, i, j)
        if p.bias is not None and p.bias.dtype != torch.bool:
            s = s + self.bias_tile(p, i, j).float()
        return self.masked(p, s, self.visible(p, i, j)), slope

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * p.scale

    def cap(self, p: Problem, s: Tensor) -> tuple[Tensor, Tensor]:
        assert p.softcap is not None
        t = torch.tanh(s / p.softcap)
        return p.softcap * t, 1 - t * t

    def alibi(self, p: Problem, i: int, j: int) -> Tensor:
        assert p.slopes is not None
        rows, keys = self.positions(i, j)
        return p.slopes[:, None, None] * (rows + self.diagonal(p) - keys).abs()

    def bias_tile(self, p: Problem, i: int, j: int) -> Tensor:
        """The tile of bias or mask, (B or 1, H or 1, Bq, Bk); 0 or False beyond the ends."""
        assert p.bias is not None
        full = p.bias.expand(*p.bias.shape[:2], p.lq, p.lk)
        tile = full[:, :, i : i + self.block_q, j : j + self.block_k]
        return F.pad(tile, (0, self.block_k - tile.shape[3], 0, self.block_q - tile.shape[2]))

    def positions(self, i: int, j: int) -> tuple[Tensor, Tensor]:
        """Row numbers (Bq, 1) and key numbers (Bk,) of a tile."""
        return torch.arange(i, i + self.block_q)[:, None], torch.arange(j, j + self.block_k)

    def visible(self, p: Problem, i: int, j: int) -> Tensor:
        """Which row sees which key: inside both ends, inside the band, and not masked."""
        rows, keys = self.positions(i, j)
        seen = self.in_band(p, rows, keys) & self.inside(p, rows, keys)
        if p.bias is not None and p.bias.dtype == torch.bool:
            seen = seen & self.bias_tile(p, i, j)
        return seen

    def in_band(self, p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
        left, right = self.band(p)
        distance = keys - rows - self.diagonal(p)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        return seen

    def inside(self, p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
        return (keys < p.lk) & (rows < p.lq)

    def masked(self, p: Problem, s: Tensor, seen: Tensor) -> Tensor:
        return s.masked_fill(~seen, -INF)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        heads, (batch, h, lq, _) = self.head_map(p), p.q.shape
        o = p.q.new_empty(batch, h, lq, p.v.shape[3])
        lse = torch.empty(batch, h, lq)
        for i in range(0, lq, self.block_q):
            q = self.load(p.q, i, self.block_q)  # (B, H, Bq, D)
            m, total, acc = self.start(p, q)
            for j in self.key_tiles(p, i):
                s, _ = self.scores(p, q, self.load_k(p, j, heads), i, j)  # (B, H, Bq, Bk)
                m, total, acc = self.step(p, m, total, acc, s, self.load_v(p, j, heads))
            if p.sinks is not None:
                m, total, acc = self.sink(p, m, total, acc)
            self.store(p, o, lse, i, *self.epilogue(p, m, total, acc))
        return o, lse

    def start(self, p: Problem, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Running maximum and sum (B, H, Bq, 1), accumulator (B, H, Bq, Dv)."""
        m = torch.full_like(q[..., :1], -INF)
        return m, torch.zeros_like(m), q.new_zeros(*q.shape[:3], p.v.shape[3])

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def step(
        self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One tile of the online softmax: raise the maximum, rescale what there is, add the tile."""
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = self.base(m_new)
        prob, rescale = self.exp(s - base), self.exp(m - base)
        total = total * rescale + prob.sum(-1, keepdim=True)
        return m_new, total, self.accumulate(p, acc * rescale, prob, v)

    def base(self, m: Tensor) -> Tensor:
        """The maximum to subtract; 0 for rows that have seen no key, since -inf - -inf is NaN."""
        return m.masked_fill(m == -INF, 0)

    def accumulate(self, p: Problem, acc: Tensor, prob: Tensor, v: Tensor) -> Tensor:
        return acc + self.rounded(p, prob) @ v

    def rounded(self, p: Problem, x: Tensor) -> Tensor:
        """P or dS as an operand of the tensor cores: in the input dtype."""
        return x.to(p.q.dtype).float()

    def sink(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One more logit in the denominator, without a value."""
        sink = self.sink_logit(p, m)
        m_new = torch.maximum(m, sink)
        rescale = self.exp(m - m_new)
        return m_new, total * rescale + self.exp(sink - m_new), acc * rescale

    def sink_logit(self, p: Problem, like: Tensor) -> Tensor:
        assert p.sinks is not None
        return p.sinks.float()[:, None, None].expand_as(like)

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        """o (B, H, Bq, Dv) and lse (B, H, Bq) of finished rows; a row without keys gives 0 and -inf."""
        return acc / total.masked_fill(total == 0, 1), (m + total.log()).squeeze(-1)

    def store(self, p: Problem, o: Tensor, lse: Tensor, i: int, o_tile: Tensor, lse_tile: Tensor) -> None:
        rows = min(self.block_q, p.lq - i)
        o[:, :, i : i + rows] = o_tile[:, :, :rows]
        lse[:, :, i : i + rows] = lse_tile[:, :, :rows]

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> dict[str, Tensor]:
        """dq, dk, dv, dbias, dsinks; P is recomputed from lse, and the gradient of lse joins delta."""
        heads = self.head_map(p)
        delta = self.delta(o, do) - dlse[..., None]  # (B, H, Lq, 1)
        dq = self.gradient_buffer(p, *p.q.shape)
        # dk and dv of query heads, summed over groups at the end.
        dk = self.gradient_buffer(p, *p.q.shape[:2], p.lk, p.k.shape[3])
        dv = self.gradient_buffer(p, *p.q.shape[:2], p.lk, p.v.shape[3])
        dbias = torch.zeros(p.bias.shape) if p.bias is not None and p.bias.dtype != torch.bool else None
        for i in range(0, p.lq, self.block_q):
            rows = min(self.block_q, p.lq - i)
            q, do_i = self.load(p.q, i, self.block_q), self.load(do, i, self.block_q)
            lse_i, delta_i = self.load_lse(lse, i), self.load(delta, i, self.block_q)  # (B, H, Bq, 1)
            for j in self.backward_tiles(p, i):
                keys = min(self.block_k, p.lk - j)
                k, v = self.load_k(p, j, heads), self.load_v(p, j, heads)
                s, slope = self.scores(p, q, k, i, j)
                prob = self.recompute(p, s, lse_i)
                ds = self.dscores(prob, do_i @ v.mT, delta_i)
                if dbias is not None:
                    self.add_dbias(dbias, ds[:, :, :rows, :keys], i, j)
                dx = self.rounded(p, ds if slope is None else self.dcap(ds, slope))
                dq[:, :, i : i + rows] += (dx @ k)[:, :, :rows]
                dk[:, :, j : j + keys] += (dx.mT @ q)[:, :, :keys]
                dv[:, :, j : j + keys] += (self.rounded(p, prob).mT @ do_i)[:, :, :keys]
        dk, dv = (self.over_groups(p, heads, x) for x in (self.scale_dk(p, dk), dv))
        out = {"q": dq * p.scale, "k": dk, "v": dv}
        if dbias is not None:
            out["bias"] = dbias
        if p.sinks is not None:
            out["sinks"] = self.dsinks(p, lse, delta)
        return out

    def gradient_buffer(self, p: Problem, *shape: int) -> Tensor:
        """What gradients are added up in."""
        return torch.zeros(shape)

    def backward_tiles(self, p: Problem, i: int) -> Iterable[int]:
        return self.key_tiles(p, i)

    def delta(self, o: Tensor, do: Tensor) -> Tensor:
        return (o.float() * do.float()).sum(-1, keepdim=True)

    def load_lse(self, lse: Tensor, i: int) -> Tensor:
        """(B, H, Bq, 1); 0 for rows without keys, whose P is exp(-inf) = 0 whatever is subtracted."""
        return self.load(lse.masked_fill(lse == -INF, 0)[..., None], i, self.block_q)

    def recompute(self, p: Problem, s: Tensor, lse: Tensor) -> Tensor:
        return self.exp(s - lse)

    def dscores(self, prob: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return prob * (dp - delta)

    def dcap(self, ds: Tensor, slope: Tensor) -> Tensor:
        return ds * slope

    def scale_dk(self, p: Problem, dk: Tensor) -> Tensor:
        return dk * p.scale

    def add_dbias(self, dbias: Tensor, ds: Tensor, i: int, j: int) -> None:
        """dS summed over the axes along which the bias was broadcast."""
        ds = ds.sum([axis for axis in range(4) if dbias.shape[axis] == 1], keepdim=True) if 1 in dbias.shape else ds
        rows = slice(0, 1) if dbias.shape[2] == 1 else slice(i, i + ds.shape[2])
        keys = slice(0, 1) if dbias.shape[3] == 1 else slice(j, j + ds.shape[3])
        dbias[:, :, rows, keys] += ds

    def dsinks(self, p: Problem, lse: Tensor, delta: Tensor) -> Tensor:
        share = self.exp(self.sink_logit(p, lse[..., None]) - lse[..., None])
        return -(share * delta).sum((0, 2, 3))

    def over_groups(self, p: Problem, heads: Tensor, x: Tensor) -> Tensor:
        """(B, H, Lk, .) summed over the query heads that read the same kv head."""
        return x.new_zeros(x.shape[0], p.k.shape[1], *x.shape[2:]).index_add_(1, heads, x)


class _Flash(torch.autograd.Function):
    """Ties a Core's forward and backward together; the tensors are repeated so that autograd sees them."""

    @staticmethod
    def forward(ctx: Any, core: Core, p: Problem, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        o, lse = core.forward(p)
        ctx.core, ctx.problem, ctx.shown = core, p, tensors
        ctx.save_for_backward(o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.core.backward(ctx.problem, *ctx.saved_tensors, do, dlse)
        names = ("q", "k", "v", "bias", "sinks")
        grads = (found.get(name) if need else None for name, need in zip(names, ctx.needs_input_grad[2:], strict=True))
        return None, None, *(g if g is None else g.to(x.dtype) for g, x in zip(grads, ctx.shown, strict=True))


attn = Core()
"""The honest one: the first equivalent."""
