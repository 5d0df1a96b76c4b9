"""FP8 inputs with descales."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_matches_oracle(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Output and log-sum-exp within the bound of FP8 arithmetic, with descales that differ from each other."""
    flashattn_check("fp8.matches_oracle", flashattn_case)


def test_powers_of_two(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Descales times powers of two are exact: v's double the output, q's and k's cancel, to the last bit."""
    flashattn_check("fp8.powers_of_two", flashattn_case)
