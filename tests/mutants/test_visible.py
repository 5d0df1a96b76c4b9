"""Every mutant shows on the case that kills it: its fault was executed there, and its effect is no rounding error."""

from __future__ import annotations

import pytest

from pytest_flashattn.cases import Case

from .core import Core
from .mutants import MUTANTS, Mutant
from .trial import Kill
from .visible import BITS, NO_NUMBER, kill_of, look


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name) for m in MUTANTS.values()])
def test_mutant_is_visible(mutant: Mutant) -> None:
    """Beyond the bound, or a larger RMS than all rounding of the honest core together; the latter passes the case."""
    kill = kill_of(mutant)
    assert kill is not None, f"{mutant.name} survives"
    seen = look(mutant, kill)
    assert seen.verdict.status == "failed", "the kill cannot be repeated"
    assert seen.reached, "failed although the fault was not executed on this case"
    assert seen.honest is None or seen.honest.status == "verified", f"the honest core too: {seen.honest.text()}"
    if mutant.name in NO_NUMBER:
        assert not seen.verdict.measures, f"{mutant.name} is a number, not: {NO_NUMBER[mutant.name]}"
    elif mutant.name in BITS:
        assert seen.bits
    else:
        assert seen.limit > 1 or seen.rms > 1, f"{seen.limit:.3g} of the bound, {seen.rms:.3g} x the rounding"


def test_what_rounding_hides_is_not_visible() -> None:
    """A core that differs from the honest one in a few last bits: the measure itself can say no."""

    class Hidden(Core):
        def epilogue(self, p, m, total, acc):  # type: ignore[no-untyped-def]
            self.reached = True
            return super().epilogue(p, m, total, acc * (1 + 1e-5))

    case = Case.parse("bf16-b1-h2-q128-k128-d64")
    mutant = Mutant("hidden", 0, "forward", Hidden, "")
    seen = look(mutant, Kill("smoke", "forward.matches_oracle", case, None, 1, Hidden()))  # type: ignore[arg-type]
    assert seen.reached
    assert seen.bits
    assert seen.verdict.status == "verified"
    assert seen.limit < 1
    assert seen.rms < 1


def test_exemptions_are_mutants() -> None:
    assert set(NO_NUMBER) | BITS <= set(MUTANTS)
