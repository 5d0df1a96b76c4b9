"""FP8 quantisers: shapes of descales, accuracy, zeros and what is not finite, the rotation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oracles.quantise import DIMS, PER, dequantise, quantise, random_signs, relative_rms, rotate, spread

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES = {"tensor": (), "group": (2, 2), "head": (2, 4), "block": (2, 4, 4)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantised(x: Tensor, per: str, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    return quantise(x, dtype, per=per, block=64, group=2)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("per", PER)
def test_each_value_is_the_nearest_of_its_format(per: str, dtype: torch.dtype) -> None:
    """Within half a step of its own binade, which is what rounding to the nearest means; amax is hit exactly."""
    x = normal(2, 4, 200, 64)
    values, descale = quantised(x, per, dtype)
    assert descale.shape == SHAPES[per]
    assert descale.dtype == torch.float32
    assert values.shape == x.shape
    assert values.float().abs().max() == torch.finfo(dtype).max
    scaled = x.double() / spread(descale.double(), x, 64)
    exponent = torch.frexp(scaled.abs().clamp_min(torch.finfo(dtype).smallest_normal))[1]
    step = torch.ldexp(torch.ones_like(scaled), exponent - 1) * torch.finfo(dtype).eps
    assert ((values.double() - scaled).abs() <= (0.5 + 1e-6) * step).all()


def test_a_descale_is_that_of_its_own_rows() -> None:
    x = normal(2, 4, 200, 64)
    for per, same in (
        ("group", lambda b, h, row: (b, h // 2)),
        ("head", lambda b, h, row: (b, h)),
        ("block", lambda b, h, row: (b, h, row // 64)),
    ):
        _, descale = quantised(x, per)
        amax: dict[tuple[int, ...], float] = {}
        for b in range(2):
            for h in range(4):
                for row in range(200):
                    key = same(b, h, row)
                    amax[key] = max(amax.get(key, 0.0), float(x[b, h, row].abs().max()))
        for key, largest in amax.items():
            assert float(descale[key]) == pytest.approx(largest / 448, rel=1e-6)


@pytest.mark.parametrize("per", PER)
def test_dequantised_values_are_near_and_finer_scales_are_nearer(per: str) -> None:
    heads = torch.exp2(torch.tensor([0.0, 14.0, 14.0, 14.0]))[:, None, None]
    x = normal(2, 4, 200, 64) * heads  # next to the others the first head is subnormal
    first = x[:, :1]
    values, descale = quantised(x, per)
    got = dequantise(values, descale, block=64)[:, :1]
    error = relative_rms(got, first)
    if per in ("head", "block"):
        assert 0.02 < error < 0.03
    else:
        assert 0.06 < error < 0.5


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("per", PER)
def test_zeros_have_scale_one(per: str, dtype: torch.dtype) -> None:
    values, descale = quantised(torch.zeros(2, 4, 200, 64), per, dtype)
    assert (descale == 1).all()
    assert (values.float() == 0).all()


def test_a_block_of_zeros_spoils_nothing() -> None:
    x = normal(1, 2, 192, 64)
    x[:, 0, 64:128] = 0
    values, descale = quantise(x, per="block", block=64)
    assert descale[0, 0, 1] == 1
    assert not values.isnan().any()
    assert relative_rms(dequantise(values, descale, block=64), x) < 0.03


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_not_finite_stays_alone(dtype: torch.dtype) -> None:
    """Infinities saturate, NaN stays; the others are what they are without them."""
    x = normal(1, 1, 64, 64)
    x[0, 0, 0, :3] = 0
    clean, clean_scale = quantise(x, dtype)
    x[0, 0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    values, descale = quantise(x, dtype)
    assert torch.equal(descale, clean_scale)
    largest = torch.finfo(dtype).max
    assert values[0, 0, 0, :2].tolist() == [largest, -largest]
    assert values[0, 0, 0, 2].isnan()
    assert torch.equal(values.flatten()[3:], clean.flatten()[3:])
    everything = quantise(torch.full((1, 1, 2, 2), math.nan), dtype)
    assert everything.descale == 1
    assert everything.values.isnan().all()


def test_numbers_below_the_range_of_the_scale_are_flushed() -> None:
    values, descale = quantise(torch.full((1, 1, 2, 64), 1e-44))
    assert descale == 2.0**-126
    assert (values.float() == 0).all()


def test_empty_tensors() -> None:
    for per in PER:
        values, descale = quantise(torch.zeros(1, 2, 0, 64), per=per, group=2)
        assert values.shape == (1, 2, 0, 64)
        assert dequantise(values, descale).shape == (1, 2, 0, 64)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": torch.float16}, "dtype must be"),
        ({"per": "row"}, "per must be one of"),
        ({"x": torch.zeros(2, 3)}, r"floating point \(B, H, L, D\)"),
        ({"block": 0}, "must be positive"),
        ({"group": 3}, "divide 4 heads"),
    ],
)
def test_bad_input_gets_one_sentence(change: dict, sentence: str) -> None:
    arguments = {"x": torch.zeros(1, 4, 8, 64), "dtype": torch.float8_e4m3fn, **change}
    x, dtype = arguments.pop("x"), arguments.pop("dtype")
    with pytest.raises(ValueError, match=sentence):
        quantise(x, dtype, **arguments)


def test_a_descale_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"descale \(4,\) fits no tensor"):
        spread(torch.ones(4), torch.zeros(1, 4, 8, 64))


# -- the rotation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", DIMS)
def test_the_rotation_is_orthogonal_and_a_hadamard_matrix(d: int) -> None:
    signs = random_signs(d, 1)
    matrix = rotate(torch.eye(d, dtype=torch.float64), signs)
    assert torch.allclose(matrix @ matrix.mT, torch.eye(d, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(matrix.abs(), torch.full((d, d), d**-0.5, dtype=torch.float64), atol=1e-14)
    small = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    want = torch.ones(1, 1, dtype=torch.float64)
    while len(want) < d:
        want = torch.kron(small, want)
    assert torch.allclose(matrix, signs.double()[:, None] * want * d**-0.5, atol=1e-14)


@pytest.mark.parametrize("d", DIMS)
def test_products_survive_the_rotation_and_outliers_do_not(d: int) -> None:
    q, k, signs = normal(1, 2, 33, d), normal(1, 2, 65, d, seed=1), random_signs(d)
    k[..., 3] *= 50
    before, after = (a.double() @ b.double().mT for a, b in ((q, k), (rotate(q, signs), rotate(k, signs))))
    assert (before - after).abs().max() < 1e-5 * before.abs().max()
    assert rotate(k, signs).abs().max() < 0.5 * k.abs().max()
    assert {float(s) for s in signs} == {1.0, -1.0}
    assert torch.equal(signs, random_signs(d))
    assert not torch.equal(signs, random_signs(d, 1))


def test_other_head_dims_and_signs_are_refused() -> None:
    with pytest.raises(ValueError, match="head dims 64, 128, 256, got 96"):
        rotate(torch.zeros(1, 1, 2, 96), torch.ones(96))
    with pytest.raises(ValueError, match=r"signs must be \(64,\)"):
        rotate(torch.zeros(1, 1, 2, 64), torch.ones(32))


def test_relative_rms() -> None:
    assert relative_rms(torch.tensor([1.1, 2.2]), torch.tensor([1.0, 2.0])) == pytest.approx(0.1)
    assert relative_rms(torch.zeros(3), torch.zeros(3)) == 0
