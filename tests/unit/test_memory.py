"""Whether a case fits: what is free, and the sentence when it is not enough."""

from __future__ import annotations

import pytest
import torch

from pytest_flashattn import memory
from pytest_flashattn.cases import Case

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
