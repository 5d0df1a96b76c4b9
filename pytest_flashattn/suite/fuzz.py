"""Cases drawn at random, judged by everything that can be asked of any case."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_matches_oracle(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Output, log-sum-exp, gradients, gradients through the log-sum-exp; future keys unseen; the same bits again."""
    flashattn_check("fuzz.matches_oracle", flashattn_case)
