"""peers.fa3 finds FlashAttention-3 under either of its names, and says what is missing where it is not installed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from pytest_flashattn import peers, trial
from pytest_flashattn.cases import Case
from pytest_flashattn.implementation import load


@pytest.fixture(autouse=True)
def _forget() -> Any:
    peers._fa3.cache_clear()
    yield
    peers._fa3.cache_clear()


@pytest.mark.parametrize("name", ["flash_attn_interface", "fa3_fwd_interface"])
def test_it_is_called_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(name)
    module.flash_attn_func = lambda q, k, v, **options: (q.shape, options)
    for other in ("flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, other, module if other == name else None)
    q = torch.zeros(1, 8, 2, 64)
    shape, options = peers.fa3(q, q, q, causal=True, softmax_scale=0.5)
    assert shape == (1, 8, 2, 64)
    assert options["causal"]
    assert options["softmax_scale"] == 0.5


def test_where_it_is_not_installed_it_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    subject = load("pytest_flashattn.peers:fa3", device="cpu")
    assert subject.convention.name == "flash-attn"
    case = Case.parse("bf16-b1-h1-q8-k8-d64")
    verdict = trial.run_check("forward.matches_oracle", subject, case, diagnose=False)
    assert verdict.status == "declared"
    assert "pip install fa3-fwd" in verdict.reason
