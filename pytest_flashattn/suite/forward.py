"""The output, against the float64 oracle."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_matches_oracle(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Every element within the bound of the arithmetic; noise no larger than the arithmetic's own."""
    flashattn_check("forward.matches_oracle", flashattn_case)
