"""Your own tests, with the plugin's fixtures: `pytest test_my_attention.py --flashattn-impl=my_attention:attention`."""

import pytest
import torch


# The check of a chapter on cases of a chapter: its verdict is recorded like the suite's.
@pytest.mark.flashattn_cases("forward", matrix="smoke")
def test_forward(flashattn_check, flashattn_case):
    verdict = flashattn_check("forward.matches_oracle", flashattn_case)
    assert verdict.worst.ratio < 1


# Cases of your own, written as ids.
@pytest.mark.parametrize(
    "flashattn_case", ["bf16-b1-h8-kv2-q1-k777-d128", "fp16-b2-h4-q100-k100-d64-causal"], indirect=True
)
def test_decoding(flashattn_check, flashattn_case):
    flashattn_check("shapes.matches_oracle", flashattn_case)


# The pieces: tensors, the float64 truth with its bound, and the implementation called by the contract.
@pytest.mark.flashattn_cases("causal", matrix="smoke")
def test_by_hand(flashattn_impl, flashattn_inputs, flashattn_oracle):
    x = flashattn_inputs
    out, _ = flashattn_impl.call(x.q, x.k, x.v, x.options())
    truth = flashattn_oracle["o"]
    error = (out.double() - truth.value).abs()
    assert (error <= truth.limit(3.0)).all()


# On a machine without such a GPU this test is unmet, and says why.
@pytest.mark.sm90
def test_on_hopper(flashattn_impl, flashattn_device):
    q = torch.randn(1, 8, 4096, 128, dtype=torch.bfloat16, device=flashattn_device)
    out, _ = flashattn_impl.call(q, q, q, {"causal": True})
    assert out.isfinite().all()
