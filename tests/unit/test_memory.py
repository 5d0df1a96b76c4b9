"""Whether a case fits: what is free, and the sentence when it is not enough."""

from __future__ import annotations

import pytest
import torch

from pytest_flashattn import memory, trial
from pytest_flashattn.cases import Case
from pytest_flashattn.implementation import load
from pytest_flashattn.support import Support

CASE = Case.parse("bf16-b1-h2-q64-k64-d64")
GPU = torch.device("cuda", 0)


def gpu(monkeypatch: pytest.MonkeyPatch, *, free: int, reserved: int, allocated: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)


def test_what_the_allocator_has_cached_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, free=1 << 20, reserved=70 << 30, allocated=1 << 30)
    assert memory.free(GPU) == (1 << 20) + (69 << 30)
    assert memory.shortage(CASE, GPU) is None


def test_a_case_that_does_not_fit_is_said_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, free=1 << 28, reserved=1 << 30, allocated=1 << 30)
    assert memory.shortage(CASE, GPU) == "needs about 0.5 GiB on cuda:0, 0.2 GiB are free"


def test_a_cpu_says_what_the_system_says() -> None:
    assert memory.shortage(CASE, torch.device("cpu")) is None


SHORT = (
    torch.OutOfMemoryError("tried to allocate 99 GiB"),
    MemoryError("of the host"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: out of memory"),
)
FAULTS = (
    RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: shared memory, Required: 294912"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("CUDA error: out of memory"),
)


@pytest.mark.parametrize("error", [*SHORT, *FAULTS], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_memory_that_ran_out_is_no_fault(error: Exception, backward: bool) -> None:
    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, q: torch.Tensor) -> torch.Tensor:
            if not backward:
                raise error
            return torch.zeros_like(q)

        @staticmethod
        def backward(ctx: object, do: torch.Tensor) -> torch.Tensor:
            raise error

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Raising.apply(q)
        return out

    subject = load(attention, support=Support(features=frozenset({"backward"})), device="cpu")
    verdict = trial.run_check("backward.matches_oracle", subject, Case.parse("fp32-b1-h1-q8-k8-d8"), diagnose=False)
    assert verdict.status == ("unmet" if error in SHORT else "failed"), verdict
