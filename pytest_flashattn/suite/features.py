"""Window, softcap, ALiBi, bias, mask, sinks, Dv != D."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_window(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Two-sided windows, measured on the same diagonal as causal."""
    flashattn_check("features.window", flashattn_case)


def test_softcap(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """c * tanh(s / c), before the mask."""
    flashattn_check("features.softcap", flashattn_case)


def test_alibi(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """-slope * distance to the diagonal."""
    flashattn_check("features.alibi", flashattn_case)


def test_bias(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """An additive bias in its broadcast patterns, and its gradient where declared."""
    flashattn_check("features.bias", flashattn_case)


def test_mask(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """A boolean mask (True = visible), with rows that see nothing."""
    flashattn_check("features.mask", flashattn_case)


def test_sinks(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """One extra logit a head in the denominator, and its gradient where declared."""
    flashattn_check("features.sinks", flashattn_case)


def test_value_dim(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Values narrower or wider than keys."""
    flashattn_check("features.value_dim", flashattn_case)
