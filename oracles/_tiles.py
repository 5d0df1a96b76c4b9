"""One block of query rows against all keys: values and error terms; the docstring of oracles.bounds derives them.

Every intermediate is shared: these few functions run for hundreds of small cases and for the largest ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._exponents import ldexp
from ._heads import fold, unfold
from .arithmetic import Arithmetic
from .spec import AttentionSpec, as4d, reduce_to, region, take
from .truncated import lost_scores, lost_values

SUMMED_KEYS = 512
"""Keys between two roundings of dq with u_sum: what PyTorch's CPU kernel takes."""

# What is lost where fp32 numbers are flushed. So little that it may count at hidden keys too, without min(p, tiny_p).
_FLUSHED = 2.0**-126

FP8 = 2.0**-4
"""The unit roundoff from which on a format has eight bits."""


@dataclass
class Forward:
    """A tile: (B, Hq, n, Lk) per score, (B, Hq, n, Dv) per output, (B, Hq, n, 1) per row; names of oracles.bounds."""

    p: Tensor
    rho: Tensor
    e: Tensor
    f: Tensor | None
    cap_error: Tensor | None
    p_sink: Tensor | None
    terms: Tensor
    kappa: Tensor
    chop: Tensor
    o: Tensor
    o_random: Tensor
    lse: Tensor
    lse_random: Tensor
    lse_fixed: Tensor


def forward_tile(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, a: Arithmetic, rows: slice, lq: int) -> Forward:
    """q (B, Hq, n, D): rows of a query of length lq; k, v (B, Hkv, Lk, ·); float64; spec narrowed to these heads."""
    u, lk, hkv = a.u_acc, k.shape[2], k.shape[1]
    index, keys = torch.arange(rows.start, rows.stop, device=q.device), torch.arange(lk, device=q.device)
    scale = spec.scale_for(q.shape[-1])
    s = fold(q * scale, hkv) @ k.mT
    s = unfold(s, q)
    delta = unfold(fold(q.abs() * ((math.sqrt(q.shape[-1]) + 2) * u * abs(scale)), hkv) @ k.abs().mT, q)
    delta.add_(s.abs(), alpha=2 * u + a.u_operand)
    if a.u_operand:
        squares = unfold(fold(q.square(), hkv) @ k.square().mT, q)
        delta.add_(squares.sqrt_(), alpha=math.sqrt(2) * a.u_operand * abs(scale))
    if a.u_scaled:
        delta.add_(s.abs(), alpha=a.u_scaled)
    if a.u_mma:
        delta += lost_scores(q, k, s, scale, a.u_mma)
    f = cap_error = None
    if spec.softcap is not None:
        t = torch.tanh(s / spec.softcap)
        f = 1 - t * t
        delta *= f
        cap_error = (delta / spec.softcap + 2 * u) * (2 * t.abs()) + 2 * u
        s = spec.softcap * t
        delta += u * spec.softcap
    delta.add_(s.abs(), alpha=2 * u)
    slopes = spec.slopes()
    if slopes is not None:
        alibi = slopes * (spec.diagonal(index, lq, lk)[:, None] - keys).abs()
        s -= alibi
        delta.add_(alibi.abs(), alpha=4 * u)
    if spec.bias is not None:
        bias = take(spec.bias, index, keys).double()
        s += bias
        delta.add_(bias.abs(), alpha=4 * u)
    visible = spec.visible(index, keys, lq, lk)
    terms = torch.full((1, 1, 1, 1), float(lk), dtype=torch.float64, device=q.device)
    if visible is not None:
        s.masked_fill_(~visible, -torch.inf)
        terms = visible.sum(-1, keepdim=True, dtype=torch.float64) if visible.shape[-1] == lk else terms
    if spec.bias is not None:
        delta.masked_fill_(s == -torch.inf, 0)  # |bias| may be infinite there

    shape = (*q.shape[:3], 1)
    m = s.amax(-1, keepdim=True) if lk else s.new_full(shape, -torch.inf)
    m = m.masked_fill(m == -torch.inf, 0)  # rows without a key: exp(-inf - 0) = 0
    p = s.sub_(m).exp_()
    total = p.sum(-1, keepdim=True)
    p_sink = None
    scale_of_lse = m.abs()
    if spec.sinks is not None:
        sink = spec.sinks.double()[None, :, None, None].expand(shape)
        lse = torch.logaddexp(m + total.log(), sink)
        p_sink = (sink - lse).exp()
        p *= (m - lse).exp()
        scale_of_lse = torch.maximum(scale_of_lse, sink.abs())
    else:
        lse = m + total.log()
        p /= total.masked_fill(total == 0, 1)
    finite = lse.masked_fill(lse == -torch.inf, 0)

    spread = (delta + 4 * u).mul_(p)
    drift = spread.sum(-1, keepdim=True) if a.u_operand else _root_sum(spread)
    # On top, what q rounded once (scaled, say) does to all scores of a row alike: 2 u |scale| sum|q k| of each.
    lse_random = drift + u * terms.sqrt() + spread.sum(-1, keepdim=True) * (2 / (math.sqrt(q.shape[-1]) + 2))
    lse_fixed = 4 * u * torch.maximum(scale_of_lse, finite.abs()).clamp_min(1.0)
    chop = a.u_chop * terms
    kappa = (u * (2 * terms.sqrt() + 4 + finite.abs()) + chop + a.u_operand).expand(shape)
    if p_sink is not None and spec.sinks is not None:
        kappa = kappa + 4 * u * p_sink * (1 + m.abs() + spec.sinks.double().abs()[None, :, None, None])
    rho = delta.add_(a.u_p + a.u_operand + u * (terms.sqrt() + 4))
    if a.tiny_p > _FLUSHED:
        e = torch.minimum(p, a.tiny_p * (m - finite).exp()).addcmul_(rho, p)
    else:
        e = torch.addcmul(p.new_full((), a.tiny_p), rho, p)
    o, peak = _accumulate(fold(p, hkv), v)
    o, peak = unfold(o, q), unfold(peak, q)
    o_random = unfold(fold(e.square(), hkv) @ v.square(), q).sqrt_()
    if a.u_p > u:  # equal P round alike: then the roundings of a normalised P add up, and no square root holds
        lost = _lost_in_fp8(p, (m - finite).exp(), a) if a.u_p >= FP8 else _lost(p, a)
        o_random = torch.maximum(o_random, unfold(fold(lost, hkv) @ v, q).abs_())
    o_random.addcmul_(kappa, peak)
    if a.u_mma and a.u_p >= FP8:
        o_random += lost_values(p, v, peak, terms, a.u_mma, a.mma_keys)
    return Forward(
        p, rho, e, f, cap_error, p_sink, terms, kappa, chop, o, o_random, lse, lse_random.expand(shape), lse_fixed
    )


def backward_tile(
    total: Totals,
    fw: Forward,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    spec: AttentionSpec,
    a: Arithmetic,
    where: tuple[slice, slice, slice, slice],
) -> None:
    """Adds the gradients of a tile and the squares of their errors to total. do (B, Hq, n, Dv), dlse (B, Hq, n)."""
    u, hkv, p = a.u_acc, k.shape[1], fw.p
    batch, heads, kv_heads, rows = where
    scale, accumulate = spec.scale_for(q.shape[-1]), (math.sqrt(v.shape[-1]) + 2) * u
    dp = unfold(fold(do, hkv) @ v.mT, q)
    eps_dp = unfold(fold(do.abs() * accumulate, hkv) @ v.abs().mT, q)
    if a.u_operand:
        squares = unfold(fold(do.square(), hkv) @ v.square().mT, q)
        eps_dp.add_(squares.sqrt_(), alpha=math.sqrt(2) * a.u_operand).add_(dp.abs(), alpha=a.u_operand)
    products = do * fw.o
    delta = products.sum(-1, keepdim=True)
    push = -delta if dlse is None else dlse[..., None] - delta
    flushed = p.new_full((), min(a.tiny_p, _FLUSHED))
    tiny_ds = max(1.0, 1 / abs(scale)) if scale else 1.0  # some kernels fold the scale into dS before they round it
    own = torch.addcmul(flushed * tiny_ds, eps_dp, p)
    rounding = (do * (1.05 * a.u_out * fw.o.abs() + a.tiny_out)).square().sum(-1, keepdim=True)
    e_delta = torch.sqrt((fw.e * dp).square_().sum(-1, keepdim=True) + own.square().sum(-1, keepdim=True) + rounding)
    e_delta += fw.kappa * delta.abs() + accumulate * products.abs().sum(-1, keepdim=True)
    if dlse is not None:
        e_delta += 2 * u * dlse.abs()[..., None]

    eta = fw.lse_random + fw.lse_fixed
    terms = total.rows_summed
    r = fw.rho.add_(eta + u * math.sqrt(terms))
    rp = torch.addcmul(flushed, r, p)
    ds = dp.add_(push)  # dP + g, then P o (dP + g)
    if a.tiny_p > _FLUSHED:
        rp += p.clamp_max(a.tiny_p)
    error = (rp * ds).square_().add_(own.square_())
    ds.mul_(p)
    error.addcmul_(ds, ds, value=a.u_p**2)
    if a.tiny_p > _FLUSHED:
        error = error.sqrt_().add_(ds.abs().clamp_max_(a.tiny_p * tiny_ds)).square_()
    # Errors of Delta whose sign rows share: of truncation, and of rounding o, where all rows have nearly the same o.
    # One may hide the other in a sum, and the former is known to a factor only: kept apart.
    shifts = (fw.chop * delta, (do * (_round(fw.o, a.u_out) - fw.o)).sum(-1, keepdim=True))
    if spec.bias is not None:
        total.add_bias(ds, error, p, e_delta, shifts, (batch, heads, rows))
    if fw.p_sink is not None and spec.sinks is not None:
        relative = eta + u * (4 + math.sqrt(terms)) + 4 * u * spec.sinks.double().abs()[None, :, None, None]
        total.sinks[heads] += (fw.p_sink * push).sum((0, 2, 3))
        spread = (fw.p_sink * e_delta).square() + (fw.p_sink * push * relative).square()
        total.sinks_square[heads] += spread.sum((0, 2, 3))
        for n, shift in enumerate(shifts):
            total.sinks_shift[n, heads] += (fw.p_sink * shift).sum((0, 2, 3))
    pf = p
    if fw.f is not None and fw.cap_error is not None:
        error = error.sqrt_().mul_(fw.f).add_(fw.cap_error.mul_(ds.abs())).square_()
        ds, pf = ds * fw.f, p * fw.f

    dq = unfold(fold(ds, hkv) @ k, q) * scale
    own_dq = unfold(fold(error, hkv) @ k.square(), q).sqrt_()
    if a.u_p > u and (a.tiny_p > _FLUSHED or _flat(p, fw.terms)):
        # As in o: P and dS that are equal round alike, and those that underflow are lost, over the keys and the rows.
        p_off, ds_off = fold(_lost(p, a), hkv), fold(_lost(ds, a, a.tiny_p * tiny_ds), hkv)
        own_dq = torch.maximum(own_dq, unfold(ds_off @ k, q).abs_())
        total.dk_coherent[batch, kv_heads] += ds_off.mT @ fold(q * scale, hkv)
        total.dv_coherent[batch, kv_heads] += p_off.mT @ fold(do, hkv)
    shared_dq = unfold(fold(pf, hkv) @ k, q).abs_().mul_(e_delta)
    spread_dq = (own_dq + shared_dq) * abs(scale)
    spread_dq += (u * (fw.terms.sqrt() + 4) + fw.chop + a.u_operand + eta) * dq.abs()
    if a.u_sum:
        spread_dq += _rounded_sums(ds, k, hkv, q) * (a.u_sum * abs(scale)) + a.tiny_out
    total.dq[batch, heads, rows], total.dq_random[batch, heads, rows] = dq, spread_dq
    total.dk[batch, heads] += ds.mT @ (q * scale)
    total.dv[batch, heads] += p.mT @ do
    error += (pf * e_delta).square_()
    for n, shift in enumerate(shifts):
        total.dk_shift[n, batch, kv_heads] += fold(pf, hkv).mT @ fold(q * (scale * shift), hkv)
    total.dk_square[batch, kv_heads] += fold(error, hkv).mT @ fold((q * scale).square(), hkv)
    total.dv_square[batch, kv_heads] += fold(rp.square_(), hkv).mT @ fold(do.square(), hkv)


class Totals:
    """The outputs while they are being collected: values, and sums of squared errors of what is summed over rows."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, backward: bool) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=q.device)

        (b, hq, lq, d), (hkv, lk), dv = q.shape, k.shape[1:3], v.shape[-1]
        self.backward, self.kv_heads, self.rows_summed = backward, hkv, max(lq * (hq // hkv), 1)
        self.bias_shape = None if spec.bias is None else tuple(spec.bias.shape)
        self.has_sinks = spec.sinks is not None
        self.sinks_summed = max(b * lq, 1)
        self.o, self.o_random = zeros(b, hq, lq, dv), zeros(b, hq, lq, dv)
        self.lse, self.lse_random, self.lse_fixed = zeros(b, hq, lq), zeros(b, hq, lq), zeros(b, hq, lq)
        if not backward:
            return
        self.dq, self.dq_random = zeros(b, hq, lq, d), zeros(b, hq, lq, d)
        self.dk, self.dv = zeros(b, hq, lk, d), zeros(b, hq, lk, dv)  # each query head's share
        self.dk_square, self.dv_square = zeros(b, hkv, lk, d), zeros(b, hkv, lk, dv)
        self.dk_coherent, self.dv_coherent = zeros(b, hkv, lk, d), zeros(b, hkv, lk, dv)
        self.dk_shift = zeros(2, b, hkv, lk, d)
        self.dk_sums, self.dv_sums, self.blocks = torch.zeros_like(self.dk), torch.zeros_like(self.dv), 0
        self.sinks, self.sinks_square, self.sinks_shift = zeros(hq), zeros(hq), zeros(2, hq)
        if spec.bias is not None:
            shape = as4d(spec.bias).shape
            self.bias, self.bias_shift = zeros(*shape), zeros(2, *shape)
            self.bias_square, self.bias_shared = zeros(*shape), zeros(*shape)
            self.bias_summed = max(b * hq * lq * lk // max(spec.bias.numel(), 1), 1)

    def add_forward(self, fw: Forward, at: tuple[slice, slice, slice]) -> None:
        self.o[at], self.o_random[at] = fw.o, fw.o_random
        self.lse[at], self.lse_random[at], self.lse_fixed[at] = (
            x.squeeze(-1) for x in (fw.lse, fw.lse_random, fw.lse_fixed)
        )

    def add_bias(
        self,
        ds: Tensor,
        error: Tensor,
        p: Tensor,
        e_delta: Tensor,
        shifts: tuple[Tensor, ...],
        at: tuple[slice, slice, slice],
    ) -> None:
        """ds and its squared errors (B, Hq, n, Lk); the errors of Delta, e_delta and shifts, count times p."""
        at4 = region(self.bias, *at, slice(0, ds.shape[-1]))
        shape = tuple(self.bias[at4].shape)
        shared = p.sum(-1, keepdim=True) if shape[-1] == 1 else p
        self.bias[at4] += reduce_to(ds, shape)
        self.bias_square[at4] += reduce_to(error, shape)
        self.bias_shared[at4] += reduce_to((shared * e_delta).square(), shape)
        for n, shift in enumerate(shifts):
            self.bias_shift[n][at4] += reduce_to(shared * shift, shape)

    def add_sums(self, batch: slice, heads: slice, kv_heads: slice) -> None:
        """The squares of each head's dk and dv so far: what memory of u_sum has rounded once more."""
        self.dk_sums[batch, heads] += self.dk[batch, heads].square()
        self.dv_sums[batch, heads] += self.dv[batch, heads].square()
        self.blocks += not (batch.start or kv_heads.start)

    def results(self, a: Arithmetic) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Value, random and fixed of every output."""

        def rounded(x: Tensor) -> Tensor:
            return 1.05 * a.u_out * x.abs() + a.tiny_out

        def walk(terms: int, x: Tensor) -> Tensor:
            return (a.u_acc * (math.sqrt(terms) + 4) + a.u_chop * terms + a.u_operand) * x.abs()

        found = {"o": (self.o, self.o_random, rounded(self.o)), "lse": (self.lse, self.lse_random, self.lse_fixed)}
        if not self.backward:
            return found
        found["dq"] = self.dq, self.dq_random, rounded(self.dq)
        for name, shares, square, coherent in (
            ("dk", self.dk, self.dk_square, self.dk_coherent),
            ("dv", self.dv, self.dv_square, self.dv_coherent),
        ):
            group = shares.shape[1] // self.kv_heads
            shares = shares.unflatten(1, (self.kv_heads, group))
            value = shares.sum(2)
            random = torch.maximum(square.sqrt(), coherent.abs()) + walk(self.rows_summed, value)
            if group > 1:
                random += (a.u_out * shares.abs() + a.tiny_out).square().sum(2).sqrt()
            if name == "dk":
                random += self.dk_shift.abs().sum(0)
            if a.u_sum:
                own = (self.dk_sums if name == "dk" else self.dv_sums).unflatten(1, (self.kv_heads, group))
                before = (shares.cumsum(2) - shares).square() * self.blocks  # of the group's earlier heads
                random += a.u_sum * (own + before).sum(2).sqrt() + a.tiny_out * math.sqrt(self.blocks * group)
            found[name] = value, random, rounded(value)
        if self.bias_shape is not None:
            random = self.bias_square.sqrt() + self.bias_shared.sqrt() + self.bias_shift.abs().sum(0)
            random += walk(self.bias_summed, self.bias)
            found["dbias"] = self.bias, random, rounded(self.bias)
            found["dbias"] = tuple(x.reshape(self.bias_shape) for x in found["dbias"])  # type: ignore[assignment]
        if self.has_sinks:
            random = self.sinks_square.sqrt() + self.sinks_shift.abs().sum(0) + walk(self.sinks_summed, self.sinks)
            found["dsinks"] = self.sinks, random, rounded(self.sinks)
        return found


def _accumulate(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """p @ v, and the largest magnitude that the sum has on its way there, seen at eight points."""
    step = max(64, -(-v.shape[2] // 8))
    o = p[..., :step] @ v[:, :, :step]
    peak = o.abs()
    for start in range(step, v.shape[2], step):
        o = o + p[..., start : start + step] @ v[:, :, start : start + step]
        peak = torch.maximum(peak, o.abs())
    return o, peak


def _rounded_sums(ds: Tensor, k: Tensor, hkv: int, like: Tensor) -> Tensor:
    """Root of the sum of the squares that dS @ k has after each block of keys: what memory of u_sum rounds."""
    total, squares = torch.zeros_like(like), torch.zeros_like(like)
    for start in range(0, k.shape[2], SUMMED_KEYS):
        block = slice(start, start + SUMMED_KEYS)
        total = total + unfold(fold(ds[..., block], hkv) @ k[:, :, block], like)
        squares += total.square()
    return squares.sqrt_()


def _lost_in_fp8(p: Tensor, peak: Tensor, a: Arithmetic) -> Tensor:
    """As _lost, where exp(s - m) is rounded and not p: eight bits are too few for a P that is normalised first."""
    return _lost(p / peak, a) * peak


def _round(x: Tensor, u: float) -> Tensor:
    """x to the nearest number of unit roundoff u (a power of two), without limits of the exponent."""
    mantissa, exponent = torch.frexp(x)
    return ldexp((mantissa / u).round_().mul_(u), exponent)


def _lost(x: Tensor, a: Arithmetic, underflow: float = 0.0) -> Tensor:
    """What rounding to the format of P adds to x, with its sign; numbers up to `underflow` may be lost entirely."""
    error = _round(x, a.u_p).sub_(x)
    if a.tiny_p > _FLUSHED:
        step, size = 2 * a.tiny_p, x.abs()
        error = torch.where(size < a.tiny_p / a.u_p, (x / step).round_().mul_(step).sub_(x), error)
        error = torch.where(size <= underflow, -x, error)
    return error


def _flat(p: Tensor, terms: Tensor) -> bool:
    """Whether some row of p (B, Hq, n, Lk) gives its terms (1 or B, 1 or Hq, 1 or n, 1), two or more, equal weight."""
    if not p.numel():
        return False
    # Within 2^-12, half a unit roundoff of fp16, they round alike.
    rows = (p.amax(-1, keepdim=True) * terms <= p.sum(-1, keepdim=True) * (1 + 2.0**-12)) & (terms > 1)
    return bool(rows.any())


def _root_sum(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True).sqrt()
