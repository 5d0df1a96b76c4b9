"""The diagonal, and nothing beyond it."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_matches_oracle(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Causal output within the bound; rows that see no key are exactly 0."""
    flashattn_check("causal.matches_oracle", flashattn_case)


def test_future_keys_have_no_effect(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Replace what the first half of the rows must not see."""
    flashattn_check("causal.future_keys_have_no_effect", flashattn_case)
