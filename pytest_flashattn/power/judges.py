"""Who says that an implementation fails a step: our own check, or the rules of other projects on the same case."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from .. import trial
from ..attempt import Outputs
from ..examination import declared_outputs, inputs_for
from ..implementation import Implementation, ImplementationError, Unsupported
from ..inputs import Inputs
from . import rules
from .plan import Step

OWN = ""
"""The name of our own verdict among those of rules."""


class Judge(Protocol):
    """Judges a step: those who are right first, for what a rule holds against them is not to its credit."""

    def base(self, honest: Implementation) -> str:
        """Prepare the step with the honest implementation, and why the step fails it; "" when it does not."""

    def faults(self, subject: Implementation, *, right: bool = False) -> dict[str, str]:
        """By name of a judge, why it fails the subject; nothing where it passes, or declares that it cannot do this."""


def judge_of(step: Step) -> Judge:
    return Check(step) if step.check else Rules(step)


def names(step: Step) -> list[str]:
    """Whose verdicts `judge_of` the step gives."""
    return [OWN] if step.check else list(rules.RULES)


class Check:
    """Our own verdict."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def base(self, honest: Implementation) -> str:
        return self.faults(honest).get(OWN, "")

    def faults(self, subject: Implementation, *, right: bool = False) -> dict[str, str]:
        try:
            verdict = trial.run_check(self.step.check, subject, self.step.case, diagnose=False)
        except Exception as error:  # the check itself: pytest, too, would fail the case
            return {OWN: f"the check broke: {type(error).__name__}: {error}"}
        return {OWN: verdict.text().partition("\n")[0]} if verdict.status == "failed" else {}


class Rules:
    """The verdicts of RULES on what one call and its gradients return."""

    def __init__(self, step: Step) -> None:
        self.case = step.case
        self._bases: dict[str, rules.Baseline] = {}
        self._right: dict[str, list[Outputs]] = {}

    def base(self, honest: Implementation) -> str:
        self.faults(honest)
        return ""

    def faults(self, subject: Implementation, *, right: bool = False) -> dict[str, str]:
        if trial.gate(subject, self.case):
            return {}
        inputs = inputs_for(subject, self.case)
        try:
            outputs = declared_outputs(subject, inputs)
        except Unsupported:
            return {}
        except ImplementationError as fault:  # any test would notice
            return dict.fromkeys(rules.RULES, str(fault))
        base = self._base(subject, inputs)
        if right:
            self._bases[subject.support.alignment] = replace(base, honest=(*base.honest, outputs))
            return {name: "" for name, rule in rules.RULES.items() if not rule.passes(outputs, base)}
        return {name: "" for name, rule in rules.RULES.items() if rule.catches(outputs, base)}

    def _base(self, subject: Implementation, inputs: Inputs) -> rules.Baseline:
        alignment = subject.support.alignment
        if alignment not in self._bases:
            backward = subject.support.gap(self.case, ("backward",)) is None
            self._bases[alignment] = rules.baseline(subject, inputs, backward=backward)
        return self._bases[alignment]
