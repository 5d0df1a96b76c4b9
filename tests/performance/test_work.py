"""Operations and bytes against counting: a mask of pairs, tensor by tensor."""

from __future__ import annotations

import pytest
import torch

from oracles import AttentionSpec
from pytest_flashattn.cases import Case
from pytest_flashattn.performance import devices, work

CASES = [
    "bf16-b2-h3-q7-k7-d16",
    "bf16-b2-h3-q7-k7-d16-causal",
    "fp16-b1-h4-kv2-q5-k11-d8-dv24-causal",
    "fp32-b1-h2-q11-k5-d8-causal",
    "bf16-b1-h1-q9-k9-d8-w2.3",
    "bf16-b1-h1-q9-k9-d8-w2.x-causal",
    "bf16-b1-h1-q4-k12-d8-w2.0",
    "bf16-b1-h1-q4-k12-d8-wx.1",
    "bf16-b1-h1-q1-k9-d8-causal",
]


def counted(case: Case, alignment: str) -> torch.Tensor:
    """(Lq, Lk): which pairs one head sees."""
    spec = AttentionSpec(causal=case.causal, window=case.window, alignment=alignment)  # type: ignore[arg-type]
    seen = spec.visible(torch.arange(case.q), torch.arange(case.k), case.q, case.k)
    pairs = torch.ones(case.q, case.k, dtype=torch.bool)
    return pairs if seen is None else pairs & seen.reshape(case.q, case.k)


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("case", [Case.parse(text) for text in CASES], ids=str)
def test_pairs_and_keys_are_those_of_the_oracle(case: Case, alignment: str) -> None:
    pairs = counted(case, alignment)
    assert work.visible_pairs(case, alignment) == int(pairs.sum())
    heads = case.batch * case.heads
    assert work.flops(case, "forward", alignment) == heads * int(pairs.sum()) * 2 * (case.d + case.dv)
    keys, item = int(pairs.any(0).sum()), work.ITEMSIZE[case.dtype]
    read = heads * case.q * case.d + case.batch * case.kv_heads * keys * (case.d + case.dv)
    assert work.least_bytes(case, "forward", alignment) == item * (read + heads * case.q * case.dv)


def test_full_attention_has_the_published_count() -> None:
    """4 B H N^2 D, 2.5 times that for a backward (arXiv:2205.14135, 2307.08691)."""
    case = Case.parse("bf16-b4-h32-q4096-k4096-d64")
    assert work.flops(case, "forward") == 4 * 4 * 32 * 4096**2 * 64
    assert work.flops(case, "backward") == 2.5 * work.flops(case, "forward")
    assert work.flops(case, "forward_backward") == 3.5 * work.flops(case, "forward")


def test_products_of_a_backward() -> None:
    """Q K^T, dS K and dS^T Q are over D, dO V^T and P^T dO over Dv."""
    narrow, wide = Case.parse("bf16-b1-h1-q8-k8-d16-dv1"), Case.parse("bf16-b1-h1-q8-k8-d16-dv33")
    assert work.flops(wide, "backward") - work.flops(narrow, "backward") == 64 * 2 * 2 * 32
    assert work.flops(wide, "forward") - work.flops(narrow, "forward") == 64 * 2 * 32
    for case in (narrow, wide):
        parts = work.flops(case, "forward") + work.flops(case, "backward")
        assert work.flops(case, "forward_backward") == parts


def test_bytes_of_a_backward() -> None:
    """q, k, v, o, dO in, dq, dk, dv out, and four bytes of lse a row."""
    case = Case.parse("bf16-b1-h2-q8-k16-d32")
    rows, keys = 2 * 8 * 32 * 2, 2 * 16 * 32 * 2
    assert work.least_bytes(case, "backward") == (rows + 2 * keys) + 2 * rows + 4 * 2 * 8 + (rows + 2 * keys)
    assert work.least_bytes(case, "forward") == 2 * rows + 2 * keys
    with_bias = Case.parse("bf16-b1-h2-q8-k16-d32-bias.1hqk")
    assert work.least_bytes(with_bias, "forward") == 2 * rows + 2 * keys + 2 * 2 * 8 * 16


def test_a_row_without_keys_costs_nothing() -> None:
    case = Case.parse("bf16-b1-h1-q8-k4-d8-causal")
    assert work.visible_pairs(case) == 4 + 3 + 2 + 1
    assert work.visible_pairs(Case.parse("bf16-b1-h1-q4-k0-d8-causal")) == 0


def test_share_of_the_peak() -> None:
    bf16, fp32 = Case(dtype="bf16"), Case(dtype="fp32")
    peak = devices.peak("NVIDIA H200")
    assert peak is not None
    assert devices.share(bf16, "NVIDIA H200", peak.tflops / 2) == 0.5
    assert devices.share(fp32, "NVIDIA H200", 10.0) is None
    assert devices.share(bf16, "CPU", 10.0) is None
