"""How far a mutant is from the honest core on the case that kills it, in units of what rounding may do there.

A mutant whose effect drowns in rounding would be killed by luck, if at all; so would one that an honest core does not
survive either. `python -m tests.mutants.visible [name …]` prints the table.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_flashattn import attempt, trial
from pytest_flashattn.cases import Case
from pytest_flashattn.examination import truth
from pytest_flashattn.implementation import Implementation
from pytest_flashattn.inputs import Inputs
from pytest_flashattn.tolerances import limits
from pytest_flashattn.verdict import Verdict

from .core import Core
from .equivalents import EQUIVALENTS
from .mutants import MUTANTS, Mutant
from .trial import Kill, first_kill, implementation, posed

NO_NUMBER = {
    "short_seq_fail": "raises",
    "mask_lastdim_assert": "raises",
    "grid_limit_raises": "raises",
    "no_valid_config": "raises",
    "raise_out_of_resources": "raises",
    "dout_stride_assert": "raises",
    "bias_grad_none": "gives no gradient",
    "bias_grad_none_without_scores": "gives no gradient",
    "none_grad_crash": "gives no gradient",
    "grad_dtype_wrong": "wrong dtype",
    "returns_float32": "wrong dtype",
    "lazy_tensor_output": "wrong type",
    "mutate_inputs": "changes its inputs",
    "mutates_input_first_call": "changes its inputs",
    "static_output_buffer": "shares memory",
    "one_key_returns_v": "shares memory",
    "undeclared_accepted": "accepts what it does not declare",
}
"""Mutants that break the contract without a wrong number on the case that kills them, and the kind of the breach."""

BITS = {"pv_race", "deterministic_ignored"}
"""Mutants that are as right as the honest core, but not twice in the same way."""

kill_of = functools.cache(first_kill)
"""The first kill of a mutant, found once for all tests that ask for it."""


@dataclass(frozen=True)
class Call:
    """One call of a check: what went in, what came out."""

    inputs: Inputs
    outputs: dict[str, Tensor]
    lse_gradient: bool


@dataclass(frozen=True)
class Sight:
    """What was seen on the killing case.

    verdict, reached: of the mutant there. honest: the verdict on the honest core; None where the mutant raises, and no
    two results can be compared. limit: the largest distance of the
    two as a multiple of the element bound. rms: their RMS distance as a multiple of the honest core's RMS error. bits:
    whether any bit differs.
    """

    verdict: Verdict
    reached: bool
    honest: Verdict | None
    limit: float
    rms: float
    bits: bool


def look(mutant: Mutant, kill: Kill) -> Sight:
    """Repeat the kill with a recorder, with as little before it as still kills; then the same with the honest core."""
    for before in ([], list(_until(kill, kill.check)), list(_until(kill, kill.check.partition(".")[0]))):
        core = mutant.make()
        subject = implementation(core)
        for check, case in before:
            trial.run_check(check, subject, case, diagnose=False)
        core.reached = False
        with recorded() as wrong:
            verdict = trial.run_check(kill.check, subject, kill.case, diagnose=False)
        if verdict.status == "failed":
            break
    if NO_NUMBER.get(mutant.name) == "raises":
        return Sight(verdict, core.reached, None, 0.0, 0.0, False)
    with recorded() as right:
        fair = replace(subject, function=_honest(subject))
        honest = trial.run_check(kill.check, fair, kill.case, diagnose=False)
    pairs = [_distance(subject, a, b) for a, b in zip(wrong, right, strict=False)]
    limit, rms = (max((p[n] for p in pairs), default=0.0) for n in (0, 1))
    return Sight(verdict, core.reached, honest, limit, rms, any(p[2] for p in pairs))


def _until(kill: Kill, chapter: str) -> Iterator[tuple[str, Case]]:
    for check, case in posed(kill.level, chapter):
        if (check, case) == (kill.check, kill.case):
            return
        yield check, case


def _honest(subject: Implementation) -> Core:
    name = "top_left" if subject.support.alignment == "top-left" else "honest"
    core: Core = EQUIVALENTS["fp8_honest" if "e4m3" in subject.support.dtypes else name].make()  # type: ignore[assignment]
    return core


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """All calls that checks make of an implementation meanwhile."""
    calls: list[Call] = []

    def recording(name: str) -> Any:
        function = getattr(attempt, name)

        def call(subject: Implementation, inputs: Inputs, **options: Any) -> dict[str, Tensor]:
            # Checks change tensors in place between calls: the copy is what went in.
            copy = inputs.with_(q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone())
            outputs: dict[str, Tensor] = function(subject, inputs, **options)
            kept = {quantity: x.detach().clone() for quantity, x in outputs.items()}
            calls.append(Call(copy, kept, options.get("lse_gradient", False)))
            return outputs

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(attempt, name, recording(name))
        yield calls


def _distance(subject: Implementation, wrong: Call, right: Call) -> tuple[float, float, bool]:
    """(share of the bound, share of the honest RMS error, whether bits differ), the largest of all quantities."""
    names = wrong.outputs.keys() & right.outputs.keys()
    backward = any(name.startswith("d") for name in names)
    expected = truth(subject, right.inputs, backward=backward, lse_gradient=right.lse_gradient)
    share = rms = 0.0
    bits = False
    for name in names:
        a, b, believed = wrong.outputs[name].double(), right.outputs[name].double(), expected[name]
        off = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
        if not off.any():
            continue
        bits = True
        bound = believed.limit(limits(name, right.inputs.case).lam)
        share = max(share, float(torch.where(off == 0, 0.0, off / bound).max()))
        own = torch.where(b == believed.value, 0.0, (b - believed.value).abs()).square().mean().sqrt()
        rms = max(rms, float(off.square().mean().sqrt() / own))
    return share, rms, bits


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    print("| mutant | reached | distance / bound | RMS distance / rounding | kind |\n|---|---|---|---|---|")
    for mutant in MUTANTS.values():
        if not names or mutant.name in names:
            kill = kill_of(mutant)
            if kill is None:
                print(f"| {mutant.name} | survives | | | |")
                continue
            seen = look(mutant, kill)
            again = "" if seen.verdict.status == "failed" else ", not killed again"
            fair = seen.honest is None or seen.honest.status == "verified"
            honest = "" if fair else f", honest core {seen.honest.status}"
            kind = NO_NUMBER.get(mutant.name, "bits" if mutant.name in BITS else "number")
            print(
                f"| {mutant.name} | {seen.reached} | {seen.limit:.3g} | {seen.rms:.3g} | {kind}{again}{honest} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
