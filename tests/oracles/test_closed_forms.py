"""Cases whose answer can be written down, for the dense and the streaming oracle and for evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from oracle_problems import Problem, assert_agree, problem
from torch import Tensor

from oracles import Arithmetic, dense, evaluate, streaming


def _dense(p: Problem) -> dict[str, Tensor]:
    return (
        dense.forward(p.q, p.k, p.v, p.spec)._asdict() | dense.backward(p.q, p.k, p.v, p.spec, p.do, p.dlse)._asdict()
    )


def _streaming(p: Problem) -> dict[str, Tensor]:
    o, lse = streaming.forward(p.q, p.k, p.v, p.spec, block=4)
    return {"o": o, "lse": lse} | streaming.backward(p.q, p.k, p.v, p.spec, p.do, p.dlse, block=4)._asdict()


def _evaluate(p: Problem) -> dict[str, Tensor]:
    arithmetic = Arithmetic.of(torch.bfloat16)
    truth = evaluate(p.q, p.k, p.v, p.spec, do=p.do, dlse=p.dlse, arithmetic=arithmetic)
    return {name: x.value for name, x in truth.items()}


Oracle = Callable[[Problem], dict[str, Tensor]]
every_oracle = pytest.mark.parametrize("oracle", [_dense, _streaming, _evaluate])


@every_oracle
def test_zero_queries_average_the_values(oracle: Oracle) -> None:
    p = problem(hkv=4)
    p.q.zero_()
    found = oracle(p)
    assert_agree(found["lse"], torch.full_like(p.dlse, math.log(23)), "lse")
    assert_agree(found["o"], p.v.mean(2, keepdim=True).expand_as(p.do), "o")
    assert_agree(found["dv"], p.do.sum(2, keepdim=True).expand_as(p.v) / 23, "dv")


@every_oracle
def test_scale_zero_averages_and_gives_no_gradient_to_queries_and_keys(oracle: Oracle) -> None:
    found = oracle(problem(scale=0.0))
    assert_agree(found["lse"], torch.full((2, 4, 17), math.log(23), dtype=torch.float64), "lse")
    assert (found["dq"] == 0).all()
    assert (found["dk"] == 0).all()


@every_oracle
def test_causal_average_is_a_running_mean(oracle: Oracle) -> None:
    p = problem(hkv=4, lq=23, lk=23, causal=True)
    p.k.zero_()
    count = torch.arange(1, 24, dtype=torch.float64)
    found = oracle(p)
    assert_agree(found["o"], p.v.cumsum(2) / count[:, None], "o")
    assert_agree(found["lse"], count.log().expand_as(p.dlse), "lse")


@every_oracle
def test_one_key_is_copied(oracle: Oracle) -> None:
    p = problem(hkv=4, lk=1)
    p.dlse.zero_()
    found = oracle(p)
    assert_agree(found["o"], p.v.expand_as(p.do), "o")
    assert_agree(found["lse"], (p.q * p.k).sum(-1) / math.sqrt(8), "lse")
    assert_agree(found["dv"], p.do.sum(2, keepdim=True), "dv")
    assert_agree(found["dq"], torch.zeros_like(p.q), "dq")


@every_oracle
def test_constant_values_give_that_constant(oracle: Oracle) -> None:
    p = problem(causal=True, softcap=2.0)
    p.v.fill_(1)
    p.dlse.zero_()
    found = oracle(p)
    assert_agree(found["o"], torch.ones_like(p.do), "o")
    assert_agree(found["dq"], torch.zeros_like(p.q), "dq")


@every_oracle
def test_sink_with_zero_scores_is_one_more_key_without_value(oracle: Oracle) -> None:
    p = problem(hkv=4, sinks=torch.tensor([0.0, math.log(23), -30.0, 4.0]))
    p.q.zero_()
    count = 23 + torch.tensor([1, 23, math.exp(-30), math.exp(4)], dtype=torch.float64)[None, :, None]
    found = oracle(p)
    # float32 sinks: their logarithms are rounded, so only exp(sink) to 1e-6.
    assert_agree(found["lse"], count.log().expand_as(p.dlse), "lse", 1e-6)
    assert_agree(found["o"], p.v.sum(2, keepdim=True) / count[..., None] + 0 * p.do, "o", 1e-6)


@every_oracle
def test_alibi_by_hand(oracle: Oracle) -> None:
    p = problem(b=1, hq=1, hkv=1, lq=1, lk=3, alibi_slopes=torch.tensor([0.5], dtype=torch.float64))
    p.q.zero_()
    weight = torch.tensor(
        [math.exp(-1.0), math.exp(-0.5), 1.0], dtype=torch.float64
    )  # the query stands on the last key
    found = oracle(p)
    assert_agree(found["o"][0, 0, 0], weight @ p.v[0, 0] / weight.sum(), "o")
    assert_agree(found["lse"].flatten(), weight.sum().log()[None], "lse")


@every_oracle
def test_softcap_bounds_the_scores(oracle: Oracle) -> None:
    p = problem(b=1, hq=1, hkv=1, lq=1, lk=2, d=1, softcap=3.0, scale=1.0)
    p.q.fill_(1)
    p.k.copy_(torch.tensor([2.0, -1e6])[:, None])
    expected = math.log(math.exp(3 * math.tanh(2 / 3)) + math.exp(-3))
    assert_agree(oracle(p)["lse"].flatten(), torch.tensor([expected], dtype=torch.float64), "lse")


@every_oracle
def test_rows_without_keys(oracle: Oracle) -> None:
    p = problem(lq=23, lk=9, causal=True)
    found = oracle(p)
    empty = slice(0, 23 - 9)
    assert (found["o"][:, :, empty] == 0).all()
    assert (found["lse"][:, :, empty] == -torch.inf).all()
    assert (found["dq"][:, :, empty] == 0).all()
    assert (found["lse"][:, :, 14:] > -torch.inf).all()


@every_oracle
def test_rows_without_keys_but_a_sink(oracle: Oracle) -> None:
    sinks = torch.tensor([0.5, -1, 2, 0], dtype=torch.float64)
    p = problem(mask=torch.zeros(17, 23, dtype=torch.bool), sinks=sinks)
    found = oracle(p)
    assert (found["o"] == 0).all()
    assert_agree(found["lse"], sinks[None, :, None].expand_as(p.dlse), "lse")
    assert_agree(found["dsinks"], p.dlse.sum((0, 2)), "dsinks")


@every_oracle
def test_heads_of_a_group_read_the_same_keys(oracle: Oracle) -> None:
    p = problem(hq=6, hkv=2)
    grouped = oracle(p)
    p.k, p.v = (x.repeat_interleave(3, 1) for x in (p.k, p.v))
    single = oracle(p)
    assert_agree(grouped["o"], single["o"], "o")
    assert_agree(grouped["dk"], single["dk"].unflatten(1, (2, 3)).sum(2), "dk")


@every_oracle
def test_huge_finite_values_of_hidden_keys_do_not_matter(oracle: Oracle) -> None:
    p = problem(causal=True, lq=17, lk=17)
    expected = oracle(p)["o"][:, :, :10].clone()
    p.k[:, :, 10:], p.v[:, :, 10:] = 1e30, -1e30
    assert torch.equal(oracle(p)["o"][:, :, :10], expected)


@every_oracle
def test_scores_of_a_thousand_do_not_overflow(oracle: Oracle) -> None:
    p = problem(hkv=4, scale=1.0)
    p.q, p.k = p.q * 30, p.k * 30
    found = oracle(p)
    best = (p.q @ p.k.mT).amax(-1)
    assert best.max() > 1000
    assert (found["lse"] - best >= -1e-9).all()
    assert (found["lse"] - best <= math.log(23) + 1e-9).all()
