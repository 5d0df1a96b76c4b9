"""Where all P of a column or a row round alike their errors add up: the bound must hold a correct kernel there too.

The emulator, with exactly the roundings that tensor cores require, on keys that weigh alike; the same dO in every row,
as sum().backward() makes it, or a gradient of the log-sum-exp alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracles


def problem(lq: int, lk: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(1, 2, lk, 64, generator=generator).to(dtype)
    return torch.full((1, 2, lq, 64), 1.5, dtype=dtype), torch.full((1, 2, lk, 64), 0.75, dtype=dtype), v


def needed(got: Tensor, truth: oracles.Truth) -> float:
    """The smallest lambda whose bound holds for every element."""
    excess = (got.double() - truth.value).abs() - truth.fixed
    return float(torch.where(excess > 0, excess / truth.random, 0.0).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lq", "lk"), [(512, 65), (512, 100), (1024, 111), (300, 300), (257, 13)])
@pytest.mark.parametrize("upstream", ["ones", "lse alone"])
def test_bound_holds_where_roundings_are_alike(lq: int, lk: int, dtype: torch.dtype, upstream: str) -> None:
    spec = oracles.AttentionSpec()
    for seed in range(4):
        q, k, v = problem(lq, lk, dtype, seed)
        do = torch.ones(1, 1, 1, 1, dtype=dtype).expand(1, 2, lq, 64)
        dlse = None
        if upstream == "lse alone":
            do, dlse = torch.zeros_like(do), torch.randn(1, 2, lq, generator=torch.Generator().manual_seed(seed))
        truths = oracles.evaluate(q, k, v, spec, do=do, dlse=dlse, arithmetic=oracles.Arithmetic.of(dtype))
        got = oracles.emulate(q, k, v, spec, do=do, dlse=dlse)
        for name in ("dq", "dk", "dv"):
            assert needed(got[name], truths[name]) <= 3, (name, seed)


@pytest.mark.parametrize("scale", [-0.125, 1.0])
def test_bound_holds_where_all_underflow(scale: float) -> None:
    """Scores that rise steeply with the key: most P of fp16 are below its smallest number, in every row alike."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 1, 211, 128, generator=generator) for _ in range(3))
        ramp = torch.linspace(1, 0, 211)[:, None] * 12 * 128**0.5 / (0.4 * 128)
        q, k, v = (q.abs() * 0.5).half(), (k.abs() * 0.1 + ramp).half(), v.half()
        do, spec = torch.ones(1, 1, 1, 1).half().expand(1, 1, 211, 128), oracles.AttentionSpec(scale=scale)
        truths = oracles.evaluate(q, k, v, spec, do=do, arithmetic=oracles.Arithmetic.of(torch.float16))
        got = oracles.emulate(q, k, v, spec, do=do)
        for name in ("dq", "dk", "dv"):
            assert needed(got[name], truths[name]) <= 3, (name, seed)


def test_bound_is_no_wider_where_weights_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The maxima are for equal weights: with others the bound is what it was without them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 130, 64, generator=generator).bfloat16() for _ in range(4))
    arithmetic, spec = oracles.Arithmetic.of(torch.bfloat16), oracles.AttentionSpec(causal=True)
    with_maxima = oracles.evaluate(q, k, v, spec, do=do, arithmetic=arithmetic)
    monkeypatch.setattr("oracles._tiles._flat", lambda p, terms: False)
    without = oracles.evaluate(q, k, v, spec, do=do, arithmetic=arithmetic)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(with_maxima[name].random, without[name].random)
