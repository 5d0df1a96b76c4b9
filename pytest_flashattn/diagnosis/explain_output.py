"""Why o or lse is wrong."""

from __future__ import annotations

from . import experiments, fits, forward, history, lse, rounding, shape
from .alternative import TILES, Alternative
from .failure import LOOKS, Failure, told
from .match import Finding, Sample, tightest
from .model import Problem, empty_rows

HONEST = 1.25
"""Error left by a fitted scale, as a multiple of an honest emulator's, up to which the scale explains the rest."""


NEARLY = 0.1
"""Error left by a fitted scale, as a share of the error, up to which the rest needs no explanation."""


def output(failure: Failure) -> list[str]:
    """Lines on o: memory of calls, NaN, alternatives, then smaller and smaller errors."""
    call = failure.call
    if said := history.contradicted(failure.calls, call, failure.outputs):
        return [said]
    problem, sample = failure.sampled()
    if not sample.got.isfinite().all() and (said := _not_finite(failure)):
        return [said]
    best = _alternatives(failure, problem, sample)
    if best and best[0].match.exact and best[0].match.whole:
        return told(best, "o")
    if said := history.stale(failure.calls, call, failure.outputs["o"]):
        return [said]
    repeated = experiments.repeated(failure)
    if best and best[0].match.exact:
        return [repeated, *told(best, "o")]
    factor = shape.whole_factor(problem, sample)
    if repeated or factor:
        return [factor, repeated]
    if said := experiments.contiguous(failure):
        return [said, *told(best, "o")]
    if lines := _imprecise(failure, problem, sample) or told(best, "o"):
        return lines
    coarse = rounding.exponential(problem, sample)
    return [shape.row_factors(sample) or (LOOKS + coarse if coarse else "")]


def _alternatives(failure: Failure, problem: Problem, sample: Sample) -> list[Finding]:
    arithmetic = failure.arithmetic()
    trial = forward.Trial(
        problem,
        sample,
        failure.screen(problem, sample),
        failure.sample("lse", problem.rows) if "lse" in failure.outputs else None,
        forward.noise_of(problem, arithmetic.u_out, arithmetic.u_p),
        failure.budget,
    )
    sticky = history.sticky(failure.notebook.calls, failure.call)
    found = trial.findings((*sticky, *forward.alternatives(problem)))
    if not any(f.match.exact and f.match.whole for f in found):
        fitted = (fit(problem, sample) for fit in (fits.head_map, fits.key_counts) if not failure.budget.spent)
        found += trial.findings(a for a in fitted if a is not None)
    return tightest(found)


def _not_finite(failure: Failure) -> str:
    """Where NaN in o comes from, when an experiment tells."""
    stale = experiments.unwritten(failure, "o")
    if stale is not None:
        at = shape.place("o", stale)
        return f"o is never written{f' in {at}' if at else ''}: it holds what its memory held before the call"
    return experiments.surroundings(failure) or experiments.positive_scale(failure)


def _imprecise(failure: Failure, problem: Problem, sample: Sample) -> list[str]:
    """Small errors: a rounding too many, an imprecise scale."""
    found = rounding.explain(problem, sample, failure.dtype, failure.budget.renewed(), failure.honest_p())
    if found and found.share > rounding.SURE:
        return [LOOKS + found.sentence]
    scale = fits.scale(problem, sample)
    if scale is not None and _leaves_noise_only(failure, problem, sample, scale):
        return [LOOKS + scale.sentence]
    return [LOOKS + found.sentence] if found else []


def _leaves_noise_only(failure: Failure, p: Problem, sample: Sample, scale: Alternative) -> bool:
    """Whether a fitted scale explains the error but for what an honest kernel has, or nearly all of it."""
    emulated = rounding.flash(p, failure.dtype, TILES[0], rounding.Knobs(p=failure.honest_p()))
    pairs = ((emulated, sample.want), (sample.got, sample.want), (sample.got, forward.forward(scale.change(p)).o))
    honest, before, after = (float((a - b).square().mean().sqrt()) for a, b in pairs)
    return after <= HONEST * honest or after <= NEARLY * before


def rounded(failure: Failure) -> list[str]:
    """A rounding too many in an o whose elements are all within their bounds."""
    found = rounding.explain(*failure.sampled(), failure.dtype, failure.budget, failure.honest_p())
    return [LOOKS + found.sentence] if found else []


def log_sum_exp(failure: Failure) -> list[str]:
    """Lines on lse, o being right."""
    problem, sample = failure.problem(), failure.sample("lse")
    if bool(empty_rows(problem).any()):
        stale = experiments.unwritten(failure, "lse")
        if stale is not None:
            at = shape.place("lse", stale) or "any row"
            return [f"lse is never written in {at}: it holds what its memory held before the call"]
    arithmetic = failure.arithmetic()
    noise = forward.noise_of(problem, arithmetic.u_out, arithmetic.u_p)
    return told(tightest(lse.try_all(problem, sample, noise, failure.budget)), "lse")
