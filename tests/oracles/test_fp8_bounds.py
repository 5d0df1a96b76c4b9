"""FP8: the bound covers right kernels, also those whose sums keep 14 bits, and rejects wrong ones."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import oracles
from oracles import Arithmetic, AttentionSpec, Truth
from oracles.arithmetic import FP8_SUMS
from oracles.quantise import dequantise, quantise
from oracles.truncated import BITS, STEP, add_products

E4M3 = torch.float8_e4m3fn
SCALE_OF_P = 256.0
LAMBDA = 3.0


def drawn(rows: int, keys: int, d: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, 1, ., d) as stored, each to be multiplied by one descale of 1."""
    g = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 1, n, d, generator=g) for n in (rows, keys, keys))
    if kind == "one sign":
        v = v.abs() + 1
    if kind == "aligned":
        q, k = q.abs(), k.abs() * 0.3
    if kind == "peaked":
        q = q * 5
    return tuple(quantise(x).values.float() * quantise(x).descale for x in (q, k, v))  # type: ignore[return-value]


def kernel(q: Tensor, k: Tensor, v: Tensor, *, tile: int = 64, sums: str) -> tuple[Tensor, Tensor]:
    """o in bf16 and lse of a blocked kernel; sums: of FP8_SUMS."""
    q, k, v = (quantise(x) for x in (q, k, v))

    def product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return add_products(total, a, b) if sums != "fp32" else total + a @ b

    qs, m = q.values.float(), torch.full((*q.values.shape[:3], 1), -math.inf)
    total, acc = torch.zeros_like(m), torch.zeros(*q.values.shape[:3], v.values.shape[3])
    factor = q.descale * k.descale * q.values.shape[-1] ** -0.5
    for start in range(0, k.values.shape[2], tile):
        part = k.values[:, :, start : start + tile].float()
        s = product(torch.zeros(*m.shape[:3], part.shape[2]), qs, part.mT) * factor
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, rescale = torch.exp(s - m_new), torch.exp(m - m_new)
        total = total * rescale + p.sum(-1, keepdim=True)
        stored = (p * SCALE_OF_P).to(E4M3).float()
        begun, values = acc * rescale, v.values[:, :, start : start + tile].float()
        own = sums == "14 bits a tile"
        acc = begun + product(torch.zeros_like(acc), stored, values) if own else product(begun, stored, values)
        m = m_new
    return (acc * v.descale / (total * SCALE_OF_P)).bfloat16(), (m + total.log()).squeeze(-1)


def needed(got: Tensor, truth: Truth) -> float:
    """The least lambda that accepts every element."""
    excess = (got.double() - truth.value).abs() - truth.fixed
    return float((excess.clamp_min(0) / truth.random).max())


@cache
def posed(rows: int, keys: int, d: int, kind: str) -> tuple[tuple[Tensor, ...], dict[str, dict[str, Truth]]]:
    inputs = drawn(rows, keys, d, kind)
    exact = [dequantise(quantise(x).values, quantise(x).descale) for x in inputs]
    each = {sums: Arithmetic.of(E4M3, p_scale=SCALE_OF_P, fp8_sums=sums) for sums in FP8_SUMS}
    return inputs, {sums: oracles.evaluate(*exact, AttentionSpec(), arithmetic=a) for sums, a in each.items()}


CASES = [
    (32, 256, 64, "normal"),
    (32, 1024, 128, "normal"),
    (8, 4096, 64, "normal"),
    (32, 512, 256, "aligned"),
    (32, 512, 64, "peaked"),
    (32, 256, 64, "one sign"),
    (8, 4096, 64, "one sign"),
]


@pytest.mark.parametrize(("rows", "keys", "d", "kind"), CASES)
def test_kernels_are_within_the_bound_of_their_sums(rows: int, keys: int, d: int, kind: str) -> None:
    """With a margin, and not far below it: a bound that nothing comes near tells nothing."""
    inputs, truths = posed(rows, keys, d, kind)
    for sums, truth in truths.items():
        o, lse = kernel(*inputs, sums=sums)
        least = 0.25 if sums == "14 bits" or kind != "one sign" else 0.0  # there the rounding of o hides that of P
        assert least <= needed(o, truth["o"]) < 0.9 * LAMBDA, sums
        assert needed(lse, truth["lse"]) < LAMBDA


def test_sums_in_14_bits_need_their_declaration() -> None:
    """Values of one sign, many keys: the accumulator loses more than the rounding of P, and only the declared bound
    covers it. So the emulator is no empty one, and neither is the term."""
    inputs, truths = posed(8, 4096, 64, "one sign")
    o, _ = kernel(*inputs, sums="14 bits")
    assert needed(o, truths["fp32"]["o"]) > 2 * LAMBDA
    assert float((truths["14 bits"]["o"].limit(LAMBDA) / truths["14 bits"]["o"].value.abs()).max()) < 0.4  # not blind
    long = posed(8, 4096, 64, "normal")[1]
    assert float((long["14 bits"]["o"].random / long["fp32"]["o"].random).median()) < 1.5  # of both signs: hardly wider


@pytest.mark.parametrize("sums", FP8_SUMS)
@pytest.mark.parametrize("fault", ["zeros", "P in e5m2", "value 20 % off", "last 32 keys lost"])
def test_wrong_kernels_are_rejected(fault: str, sums: str) -> None:
    """By the element bound or by the noise floor, as in `judge`: RMS error of at most 1.5 times the emulator's."""
    inputs, truths = posed(32, 256, 64, "normal")
    truth = truths[sums]["o"]
    spec, options = (
        AttentionSpec(),
        {"p_dtype": E4M3, "p_scale": SCALE_OF_P, "out_dtype": torch.bfloat16, "fp8_sums": sums},
    )
    emulated = oracles.emulate(*inputs, spec, **options)["o"]
    wrong = {
        "zeros": lambda: torch.zeros_like(emulated),
        "P in e5m2": lambda: oracles.emulate(*inputs, AttentionSpec(), p_dtype=torch.float8_e5m2)["o"],
        "value 20 % off": lambda: emulated * 1.2,
        "last 32 keys lost": lambda: kernel(inputs[0], *(x[:, :, :-32] for x in inputs[1:]), sums=sums)[0],
    }[fault]()
    noise = [float((x.double() - truth.value).square().mean().sqrt()) for x in (wrong, emulated)]
    assert needed(wrong, truth) > LAMBDA or noise[0] > 1.5 * noise[1]


def test_a_scale_of_p_narrows_the_bound() -> None:
    inputs, truths = posed(32, 512, 64, "peaked")
    unscaled = oracles.evaluate(*inputs, AttentionSpec(), arithmetic=Arithmetic.of(E4M3))["o"]
    ratio = unscaled.random / truths["fp32"]["o"].random
    assert float(ratio.min()) > 0.99
    assert float(ratio.max()) > 1.1


def test_arithmetic_of_fp8() -> None:
    a = Arithmetic.of(E4M3, p_scale=256.0)
    assert (a.u_out, a.u_p, a.tiny_p, a.u_mma) == (2.0**-8, 2.0**-4, 2.0**-18, 0.0)
    assert Arithmetic.of(E4M3, p_dtype=torch.bfloat16, p_scale=256.0).tiny_p == 2.0**-126
    assert Arithmetic.of(torch.bfloat16) == replace(Arithmetic.of(torch.bfloat16), u_scaled=0.0, u_mma=0.0)
    with pytest.raises(ValueError, match="fp8_sums is one of"):
        Arithmetic.of(torch.bfloat16, fp8_sums="14 bits")
    with pytest.raises(ValueError, match="p_scale must be positive"):
        Arithmetic.of(E4M3, p_scale=0)


# -- the sums themselves ----------------------------------------------------------------------------------------------


def test_sums_of_few_bits_are_exact() -> None:
    """Small integers fit into 14 bits: nothing is lost."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, shape, generator=g).float() for shape in ((2, 5, 96), (2, 96, 7)))
    start = torch.randint(-3, 4, (2, 5, 7), generator=g).float()
    assert torch.equal(add_products(start, a, b), start + a @ b)


def test_what_is_below_the_last_bit_kept_is_lost() -> None:
    large, small = torch.tensor([[1.0]]), torch.full((1, 1), 2.0**-BITS)
    assert add_products(torch.zeros(1, 1), torch.cat([large, small], 1), torch.ones(2, 1)) == 1
    assert add_products(torch.zeros(1, 1), torch.cat([large, 2 * small], 1), torch.ones(2, 1)) == 1 + 2.0 ** (1 - BITS)
    assert add_products(torch.zeros(1, 1), torch.cat([large, -1.5 * small], 1), torch.ones(2, 1)) == 1  # towards zero


def test_a_sum_of_ones_stops_growing() -> None:
    """2^15 ones: from 2^14 on a one lies below the last bit."""
    ones = torch.ones(1, 2**15)
    total = add_products(torch.zeros(1, 1), ones, ones.mT)
    assert total == 2.0**BITS
    assert STEP == 32
