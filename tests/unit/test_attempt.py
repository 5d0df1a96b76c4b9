"""One call: what comes back must be there when it comes back, and of the dtype that autograd promises."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_flashattn import attempt
from pytest_flashattn.cases import Case
from pytest_flashattn.implementation import Implementation, ImplementationError, load
from pytest_flashattn.inputs import make_inputs

CASE = Case.parse("bf16-b1-h1-q8-k8-d16")


def on_cuda() -> Implementation:
    subject: Any = types.SimpleNamespace(device=torch.device("cuda"))
    return subject


def test_a_result_written_after_it_was_read_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is faked: waiting for it is when the other stream writes."""
    o = torch.full((4,), torch.nan)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: o.fill_(1))
    with pytest.raises(ImplementationError, match="returned before its result was written"):
        attempt._settle(on_cuda(), o)


def test_a_result_that_is_there_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    attempt._settle(on_cuda(), torch.tensor([1.0, torch.nan, -torch.inf]), None)


def test_running_out_of_memory_is_no_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "synchronize", full)
    with pytest.raises(torch.OutOfMemoryError):
        attempt._settle(on_cuda())


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.float()


def test_a_gradient_of_another_dtype_fails() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q.grad_dtype = None
        return _Widened.apply(q) + 0 * (k + v)

    subject = load(attention, device="cpu")
    with pytest.raises(ImplementationError, match="the gradient of q is float32, expected bfloat16"):
        attempt.backward(subject, make_inputs(CASE))
