"""Dtype, aliasing, repetition, refusals."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_shape_dtype_device(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """The output has the shape of the contract, q's dtype and q's device (a call that breaks this raises here)."""
    flashattn_check("contract.shape_dtype_device", flashattn_case)


def test_inputs_unchanged(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """q, k, v and dO hold the same bits after the call (and after its backward)."""
    flashattn_check("contract.inputs_unchanged", flashattn_case)


def test_output_is_fresh(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """The output shares no memory with an input or with the output of the call before."""
    flashattn_check("contract.output_is_fresh", flashattn_case)


def test_fresh_memory_has_no_effect(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """The same call over memory that held NaN and over memory that held large numbers: every element is written."""
    flashattn_check("contract.fresh_memory_has_no_effect", flashattn_case)


def test_same_call_twice(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """The same call gives the same bits, with equal inputs in other memory."""
    flashattn_check("contract.same_call_twice", flashattn_case)


def test_backward_twice(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """The backward of one graph, run again (retain_graph), gives right gradients again: nothing saved is used up."""
    flashattn_check("contract.backward_twice", flashattn_case)


def test_a_then_b_then_a(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """A call of another shape and another content in between leaves no trace."""
    flashattn_check("contract.a_then_b_then_a", flashattn_case)


def test_content_is_read(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """The same tensors with new numbers in them give the new answer, not a remembered one."""
    flashattn_check("contract.content_is_read", flashattn_case)


def test_undeclared_features_raise(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Asked for a feature that it does not declare, an implementation raises, or it is right all the same."""
    flashattn_check("contract.undeclared_features_raise", flashattn_case)
