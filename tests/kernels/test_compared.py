"""The kernels that are there to be compared with: FlashAttention-1's loop order, and the backward that adds dQ up."""

from __future__ import annotations

import pytest
import torch
from interpreted import check

pytest.importorskip("triton")

from reference_kernels import backward_atomic, compiling, forward_v1

RUN = """
import itertools, torch, oracles
from reference_kernels.backward_atomic import backward_atomic
from reference_kernels.configs import Config
from reference_kernels.forward_v1 import forward_v1

def worst(dtype, shape, causal, config):
    b, h, kv, lq, lk, d = shape
    torch.manual_seed(0)
    q = torch.randn(b, lq, h, d).to(dtype).transpose(1, 2)
    k, v = (torch.randn(b, kv, lk, d).to(dtype) for _ in "kv")
    do = torch.randn(b, h, lq, d).to(dtype)
    spec = oracles.AttentionSpec(scale=0.2, causal=causal)
    truth = oracles.evaluate(q, k, v, spec, do=do, arithmetic=oracles.Arithmetic.of(dtype))
    o, lse = forward_v1(q, k, v, scale=0.2, causal=causal, config=config)
    dq, dk, dv = backward_atomic(do, q, k, v, o, lse, scale=0.2, causal=causal, config=config)
    for name, got in {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        wrong = ~((got.double() - truth[name].value).abs() <= truth[name].limit(3.0)) & (got != truth[name].value)
        assert not wrong.any(), (dtype, shape, causal, config, name)
"""


def test_both_are_right_in_any_tile_dtype_and_length() -> None:
    check(
        RUN
        + """
for dtype, causal in itertools.product((torch.float16, torch.bfloat16, torch.float32), (False, True)):
    for shape in ((2, 4, 2, 100, 170, 24), (1, 2, 1, 150, 70, 64), (1, 1, 1, 1, 45, 64), (1, 1, 1, 64, 64, 16)):
        worst(dtype, shape, causal, None)
    worst(dtype, (1, 2, 1, 90, 130, 16), causal, Config(16, 64, 1, 1))
    worst(dtype, (1, 2, 1, 130, 90, 16), causal, Config(64, 16, 1, 1))
"""
    )


def test_without_keys_and_without_queries() -> None:
    check(
        """
import torch
from reference_kernels.backward_atomic import backward_atomic
from reference_kernels.forward_v1 import forward_v1

for lq, lk in ((5, 0), (0, 5)):
    q, k = torch.randn(1, 2, lq, 16), torch.randn(1, 2, lk, 16)
    o, lse = forward_v1(q, k, k)
    assert o.shape == q.shape and not o.any() and (lse == -torch.inf).all()
    dq, dk, dv = backward_atomic(q, q, k, k, o, lse)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape and not any(x.any() for x in (dq, dk, dv))
"""
    )


@pytest.mark.parametrize(("d", "dv", "scale"), [(160, 160, 0.1), (64, 32, 0.1), (64, 64, -0.1), (64, 64, float("nan"))])
def test_refusals_name_what_is_taken(d: int, dv: int, scale: float) -> None:
    q, v = torch.zeros(1, 1, 4, d), torch.zeros(1, 1, 4, dv)
    with pytest.raises(NotImplementedError, match="forward_v1 takes a positive scale and D = Dv up to 128"):
        forward_v1.forward_v1(q, q, v, scale=scale)
    if scale > 0:
        with pytest.raises(NotImplementedError, match="backward_atomic takes D = Dv up to 128"):
            backward_atomic.backward_atomic(v, q, q, v, v, v[..., 0], scale=scale)


@pytest.mark.parametrize("module", [forward_v1, backward_atomic])
def test_it_compiles_within_its_budgets(module) -> None:
    results = compiling.compile_all([(case, 90) for case in module.compile_cases(90)])
    assert [sentence for result in results for sentence in compiling.violations(result)] == []
    assert all(result.counts["wgmma"] > 0 for result in results)
    assert module.compile_cases(89) == []
