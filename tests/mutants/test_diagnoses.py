"""The first diagnosis of a killed mutant names its fault, for at least 85 of 100; the others are listed in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .diagnoses import LUCK, PHRASES, named
from .mutants import MUTANTS
from .visible import kill_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md"
LEAST = 0.85


def test_every_mutant_has_its_phrases() -> None:
    assert set(PHRASES) == set(MUTANTS), "say in diagnoses.py what a diagnosis of each mutant must contain"
    assert not [name for name, phrases in PHRASES.items() if not all(map(str.strip, phrases))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile, which one mutant calls
def test_first_diagnosis_names_the_fault() -> None:
    """The share over all mutants, killed where the suite kills them; the misses are those that the docs list."""
    kills = {name: kill_of(mutant) for name, mutant in MUTANTS.items()}
    killed = {name: kill.verdict for name, kill in kills.items() if kill is not None}
    missed = {name for name, verdict in killed.items() if not named(name, verdict)}
    share = 1 - len(missed) / len(killed)
    assert share >= LEAST, f"{share:.1%} named; missed: {', '.join(sorted(missed))}"
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M))
    assert missed - LUCK == listed - LUCK, "the list of misses in docs/diagnosis.md is another one"
    broken = {name: kill.verdict.extra for name, kill in kills.items() if kill and "diagnosis" in kill.verdict.extra}
    assert not broken, f"the diagnosis itself failed: {broken}"
