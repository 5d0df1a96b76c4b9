"""How fast: time, and how time and memory grow; runs only when it is asked for by its path."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_forward(flashattn_timed: RunCheck, flashattn_case: Case) -> None:
    """One call without gradients."""
    flashattn_timed("performance.forward", flashattn_case)


def test_backward(flashattn_timed: RunCheck, flashattn_case: Case) -> None:
    """The gradients alone, their forward having been run."""
    flashattn_timed("performance.backward", flashattn_case)


def test_forward_backward(flashattn_timed: RunCheck, flashattn_case: Case) -> None:
    """A call and its gradients, as in training."""
    flashattn_timed("performance.forward_backward", flashattn_case)


def test_time_grows_as_the_work(flashattn_alone: RunCheck, flashattn_case: Case) -> None:
    """Twice the length takes four times as long, and not more."""
    flashattn_alone("performance.time_grows_as_the_work", flashattn_case)


def test_memory_grows_as_the_length(flashattn_alone: RunCheck, flashattn_case: Case) -> None:
    """Twice the length takes twice the memory, forward and backward: neither S nor P is stored."""
    flashattn_alone("performance.memory_grows_as_the_length", flashattn_case)


def test_causal_costs_half(flashattn_alone: RunCheck, flashattn_case: Case) -> None:
    """A causal call skips the tiles that it hides."""
    flashattn_alone("performance.causal_costs_half", flashattn_case)


def test_window_costs_less(flashattn_alone: RunCheck, flashattn_case: Case) -> None:
    """A call with a window skips the tiles that it hides."""
    flashattn_alone("performance.window_costs_less", flashattn_case)
