"""The suite fails every mutant and passes every equivalent, on a CPU, in about a minute."""

from __future__ import annotations

import itertools

import pytest

from pytest_flashattn import trial
from pytest_flashattn.chapters import CHAPTERS

from .equivalents import EQUIVALENTS, Equivalent
from .mutants import MUTANTS, Mutant
from .seeds import share
from .trial import implementation, posed
from .visible import kill_of


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name) for m in MUTANTS.values()])
def test_suite_fails_mutant(mutant: Mutant) -> None:
    """Smoke kills it, or else the default cases of the chapter that is there for it; and its fault was executed."""
    kill = kill_of(mutant)
    assert kill is not None, f"{mutant.name} survives: {mutant.about}"
    assert kill.core.reached, (
        f"{kill.check} [{kill.case.id}] failed {mutant.name} although its fault was never executed"
    )


@pytest.mark.parametrize("equivalent", [pytest.param(e, id=e.name) for e in EQUIVALENTS.values()])
def test_suite_passes_equivalent(equivalent: Equivalent) -> None:
    """No false alarm on the smoke matrix, nor on two seeds' share of all (`seeds.py` does that for hundreds)."""
    subject = implementation(equivalent.make(), equivalent.convention)
    smoke = (pair for chapter in CHAPTERS for pair in posed("smoke", chapter))
    verified, failures = 0, []
    for check, case in itertools.chain(smoke, share(1), share(2)):
        verdict = trial.run_check(check, subject, case)
        verified += verdict.status == "verified"
        if verdict.status == "failed":
            failures.append(f"{check} [{case.id}] seed {case.seed}: {verdict.text()}")
    assert not failures, f"{len(failures)} false alarms; the first:\n" + "\n".join(failures[:3])
    assert verified >= (12 if "bf16" in subject.support.dtypes else 5)


def test_every_killer_exists() -> None:
    """A mutant names a chapter or a check that is there, so that nobody looks for its death in vain."""
    for mutant in MUTANTS.values():
        assert list(posed("smoke", mutant.killer)), f"{mutant.name}: {mutant.killer} poses no case"
