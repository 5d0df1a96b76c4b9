"""One rounding too many: a blocked emulator in float32 with a knob for each place where kernels round, and should not.

Roundings are deterministic. An emulator that rounds where the kernel does makes nearly the kernel's errors, not only
errors of their size, so that it explains most of what it returned; the honest emulator explains what is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .alternative import TILES
from .backward_families import COARSER
from .budget import Budget
from .forward_softmax import running
from .match import Sample
from .model import LOG2E, Problem, masked, products, softmax

Round = Callable[[Tensor], Tensor]

FP8 = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}
P_SCALES = (1.0, 256.0)

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}

GAIN = 0.5
"""A knob must leave at most this share of the squared error that the honest emulator leaves."""

SURE = 0.8
"""The share from which on nothing else is tried."""

SHARE = 0.5
"""Of the squared error, the least that a knob must explain to be told."""

BINS = 16
"""Bins of the fraction of an exponent."""

SMALL = 0.2
"""Relative size of errors beyond which no rounding is suspected."""


def keep(x: Tensor) -> Tensor:
    return x


def to(dtype: torch.dtype) -> Round:
    return lambda x: x.to(dtype).float()


def truncated(dtype: torch.dtype) -> Round:
    """Towards zero."""

    def down(x: Tensor) -> Tensor:
        near = x.to(dtype)
        return torch.where(near.float().abs() > x.abs(), torch.nextafter(near, torch.zeros_like(near)), near).float()

    return down


@dataclass(frozen=True)
class Knobs:
    """What is rounded how, as functions of a float32 tensor.

    step: keys between two roundings of the accumulator. normalised: P is divided by the row sum before it is rounded.
    """

    product: Round = keep
    score: Round = keep
    p: Round | None = None
    accumulator: Round = keep
    step: int = 0
    total: Round = keep
    reciprocal: Round = keep
    normalised: bool = False


def scaled(dtype: torch.dtype, scale: float) -> Round:
    """Rounded to a dtype as a multiple of what is rounded; saturates."""
    return lambda x: (x * scale).clamp(max=torch.finfo(dtype).max).to(dtype).float() / scale


HONEST = (Knobs(), Knobs(p=keep), Knobs(normalised=True))
"""Right ways to treat P: rounded before or after it is normalised, or not at all."""


def flash(p: Problem, dtype: torch.dtype, tile: int, knobs: Knobs) -> Tensor:
    """o (B, Hq, n, Dv) in float64, as rounded to `dtype`; keys in tiles of `tile`."""
    s = knobs.product(products(p).float()).double() * p.scale
    plain = p.softcap is None and p.slopes is None and p.bias is None
    s = masked(p, knobs.score(s.float()).double()) if plain else p.build(p)
    s, v = s.float(), p.v[:, p.heads].float()
    if knobs.normalised:
        prob = softmax(p, s.double()).p.float()
        return ((knobs.p or to(dtype))(prob) @ v).to(dtype).double()
    m = torch.full_like(s[..., :1], -torch.inf)
    total, acc = torch.zeros_like(m), v.new_zeros(*s.shape[:-1], v.shape[-1])
    for start in range(0, p.lk, tile):
        part, values = s[..., start : start + tile], v[:, :, start : start + tile]
        m_new = torch.maximum(m, part.amax(-1, keepdim=True))
        base = m_new.masked_fill(m_new == -torch.inf, 0)
        prob, rescale = torch.exp(part - base), torch.exp(m - base)
        total = knobs.total(total * rescale + prob.sum(-1, keepdim=True))
        acc = acc * rescale
        rounded = (knobs.p or to(dtype))(prob)
        for at in range(0, part.shape[-1], knobs.step or tile):
            cut = slice(at, at + (knobs.step or tile))
            acc = knobs.accumulator(acc + rounded[..., cut] @ values[:, :, cut])
        m = m_new
    if p.sinks is not None:
        sink = p.sinks.float()[..., None]
        m_new = torch.maximum(m, sink)
        rescale = torch.exp(m - m_new)
        total, acc = total * rescale + torch.exp(sink - m_new), acc * rescale
    return (acc * knobs.reciprocal(1 / total.masked_fill(total == 0, 1))).to(dtype).double()


def suspects(p: Problem, dtype: torch.dtype) -> Iterator[tuple[str, Knobs]]:
    """Sentences and knobs that depend on the tiles of keys, for inputs of this dtype."""
    name = p.case.dtype
    for label, coarse in COARSER.get(name, {}).items():
        yield f"P is rounded to {label} before P V", Knobs(p=to(coarse))
    if name != "fp32":
        yield f"P is truncated to {name}, not rounded", Knobs(p=truncated(dtype))
    for label, coarse in HALVES.items():
        yield f"the denominator is summed in {label}", Knobs(total=to(coarse))
        yield f"the reciprocal of the denominator is rounded to {label}", Knobs(reciprocal=to(coarse))
        yield f"the accumulator of P V is rounded to {label} from tile to tile", Knobs(accumulator=to(coarse))
        for step in (16, 32):
            yield f"P V is accumulated in {label}", Knobs(accumulator=to(coarse), step=step)


def fp8_suspects(p: Problem) -> Iterator[tuple[str, Knobs]]:
    """P of FP8 in another format or with another scale."""
    for label, dtype in FP8.items():
        for scale in P_SCALES:
            with_scale = f"multiplied by {scale:g}" if scale != 1 else "without a scale"
            yield f"P is rounded to {label} {with_scale} before P V", Knobs(p=scaled(dtype, scale))


def score_suspects() -> Iterator[tuple[str, Knobs]]:
    """Scores that are rounded before or after the scale, or both, with every right way to treat P."""
    for label, coarse in HALVES.items():
        for product, score in ((keep, to(coarse)), (to(coarse), keep), (to(coarse), to(coarse))):
            for honest in HONEST:
                yield f"scores (Q K^T) are rounded to {label}", replace(honest, product=product, score=score)


@dataclass(frozen=True)
class Rounding:
    """A rounding that explains an error, and the share of the squared error that it explains."""

    what: str
    share: float

    @property
    def sentence(self) -> str:
        return f"{self.what} (an emulator that does so makes {100 * self.share:.0f} % of the error of o)"


def explain(
    p: Problem, sample: Sample, dtype: torch.dtype, budget: Budget, honest_p: Round | None = None
) -> Rounding | None:
    """The rounding that explains most of the error of o; None when none does. honest_p: of P, with FP8 inputs."""
    size = sample.want.square().mean()
    error = sample.error.square()
    if not p.lk or not error.isfinite().all() or not size or float(error.mean() / size) > SMALL**2:
        return None
    total = float(error.sum())

    def left(tile: int, knobs: Knobs) -> float:
        return float((sample.got - flash(p, dtype, tile, knobs)).square().sum())

    best: Rounding | None = None
    for tile in TILES:
        honest = min(left(tile, knobs) for knobs in (HONEST if honest_p is None else (Knobs(p=honest_p),)))
        scores = score_suspects() if tile == TILES[0] else ()
        known = itertools.chain(scores, suspects(p, dtype)) if honest_p is None else fp8_suspects(p)
        for what, knobs in known:
            if budget.spent:
                return best
            share = 1 - left(tile, knobs) / total if total else 0.0
            enough = total * (1 - share) <= GAIN * honest and share >= SHARE
            if enough and (best is None or share > best.share + 1e-3):
                best = Rounding(what, share)
    return best


def exponential(p: Problem, sample: Sample) -> str:
    """A clause when P is wrong by a factor that depends on the fraction of its exponents in base 2 only: a coarse exp2.

    P_j is a product of exponentials: exp(s_j - m_t) in its tile t, and exp(m_u - m_(u+1)) for each later tile. With g_b
    the relative error of an exponential whose fraction lies in bin b, and N_jb how many factors of P_j do,
    o - truth is, to first order, sum over b of g_b sum_j N_jb p_j (v_j - o): g is found by least squares.
    """
    if not p.lk or not sample.error.isfinite().all():
        return ""
    best = max((_by_fraction(p, sample, tile) for tile in TILES), key=lambda found: found[1])
    if not best[1] > SHARE:
        return ""
    return (
        f"exp is too coarse: P is wrong by up to {100 * best[0]:.2g} %, by the fraction of its exponent in base 2 "
        f"(explains {100 * best[1]:.0f} % of the error of o)"
    )


def _by_fraction(p: Problem, sample: Sample, tile: int) -> tuple[float, float]:
    """Half the range of g with key tiles of this size, and the share of the squared error that it explains."""
    s = p.build(p)
    maxima = running(p, s, tile)
    inside, later = _bin(s - maxima), _bin(maxima[..., :-tile:tile] - maxima[..., tile::tile])
    weights, v, error = softmax(p, s).p, p.v[:, p.heads], sample.error.flatten()
    columns = []
    for b in range(BINS):
        chain = (later == b).double().flip(-1).cumsum(-1).flip(-1)
        chain = torch.nn.functional.pad(chain, (0, 1)).repeat_interleave(tile, -1)[..., : p.lk]
        part = weights * ((inside == b) + chain)
        columns.append((part @ v - part.sum(-1, keepdim=True) * sample.want).flatten())
    basis = torch.stack(columns, 1)
    # A fraction that no key has makes an empty column: a small ridge keeps its unknown at 0.
    normal = basis.mT @ basis
    if not normal.any():
        return 0.0, 0.0
    ridge = 1e-12 * float(normal.diagonal().max()) * torch.eye(BINS, dtype=normal.dtype, device=normal.device)
    gains = torch.linalg.solve(normal + ridge, basis.mT @ error)
    share = 1 - float((error - basis @ gains).square().sum() / error.square().sum())
    return float(gains.max() - gains.min()) / 2, share


def _bin(exponent: Tensor) -> Tensor:
    binary = (exponent * LOG2E).nan_to_num(nan=0.0, neginf=0.0)
    return ((binary - binary.floor()) * BINS).long().clamp(0, BINS - 1)
