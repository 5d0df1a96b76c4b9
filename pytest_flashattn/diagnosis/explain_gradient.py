"""Why gradients are wrong, o and lse being right."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from . import backward, experiments, shape
from .backward_model import start
from .failure import Failure, told
from .match import Sample, tightest
from .model import Problem, empty_rows


def gradients(failure: Failure) -> list[str]:
    """Lines on dq, dk, dv, dbias and dsinks together."""
    problem = failure.problem()
    samples = {n: failure.sample(n) for n in failure.outputs if n in failure.expected and n.startswith("d")}
    if said := not_finite(problem, samples) or experiments.spoilt(failure):
        return [said]
    flows = failure.call is not None and bool(failure.call.keywords.get("lse_gradient"))
    tape = start(problem, failure.inputs.dlse.double() if flows else None, frozenset(samples))
    best = tightest(backward.try_all(tape, samples, failure.budget))
    whole = bool(best) and best[0].match.exact and best[0].match.whole
    repeated = "" if whole else experiments.repeated(failure)
    if best and best[0].match.exact:
        return [repeated, *told(best, "every gradient")]
    factors = [shape.whole_factor(problem, sample) for sample in samples.values()]
    if repeated or any(factors):
        return [repeated, *factors]
    said = experiments.contiguous(failure)
    return [said] if said else told(best, "the gradients")


def not_finite(p: Problem, samples: Mapping[str, Sample]) -> str:
    """Which rows NaN or inf in gradients come from, where that can be told."""
    bad = {n: (~s.got.isfinite()).any(-1) for n, s in samples.items() if s.got.dim() == 4}
    in_dq = "dq" in bad and bool(bad["dq"].any())
    finite_dq = "dq" in bad and not in_dq
    if in_dq and not (bad["dq"] & ~empty_rows(p)).any():
        return "the backward gives NaN for query rows that see no key: exp(-inf - -inf), or 0 * inf"
    sums = [n for n in ("dk", "dv") if n in bad and bad[n].any()]
    if not sums:
        return ""
    who = " and ".join(sums)
    visible = p.visible()
    if visible is None:
        visible = torch.ones(1, 1, dtype=torch.bool, device=p.q.device)
    seen = visible.expand(*p.q.shape[:2], len(p.rows), p.lk).any(-2).flatten(0, 1).any(0)
    if not any((bad[n] & seen).any() for n in sums):
        return f"{who} of keys that no query row sees are never written (they ought to be 0)"
    if not finite_dq:
        return ""
    return (
        f"{who} are NaN though dq is finite: rows that do not exist, those that pad the last query tile, enter the "
        "sums over rows (inf * 0 is NaN)"
    )
