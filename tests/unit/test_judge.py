"""The judge: bounds, noise floor, exact bits; where wrong elements lie; tables of limits."""

from __future__ import annotations

import math

import pytest
import torch

import oracles
from pytest_flashattn import tolerances
from pytest_flashattn.cases import Case
from pytest_flashattn.judge import against_bound, against_noise, against_value, identical, ulp
from pytest_flashattn.localise import where
from pytest_flashattn.matrices import TableError
from pytest_flashattn.verdict import Measure, Verdict


def _truth(value: torch.Tensor, random: float = 0.1, fixed: float = 0.01) -> oracles.Truth:
    value = value.double()
    return oracles.Truth(value, torch.full_like(value, random), torch.full_like(value, fixed))


def test_the_bound_is_lam_times_random_plus_fixed() -> None:
    truth = _truth(torch.zeros(1, 1, 2, 2))
    assert against_bound("o", torch.full((1, 1, 2, 2), 0.309), truth, 3.0).ok
    measure = against_bound("o", torch.full((1, 1, 2, 2), 0.311), truth, 3.0)
    assert not measure.ok
    assert (measure.beyond, measure.total) == (4, 4)
    assert measure.ratio == pytest.approx(0.311 / 0.31)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_matches(bad: float) -> None:
    got = torch.zeros(1, 1, 2, 2)
    got[0, 0, 1, 0] = bad
    measure = against_bound("o", got, _truth(torch.zeros(1, 1, 2, 2)), 3.0)
    assert not measure.ok
    assert measure.worst is not None
    assert measure.worst["index"] == [0, 0, 1, 0]


def test_infinities_match_only_with_their_sign() -> None:
    want = torch.tensor([[[-math.inf, 0.0]]], dtype=torch.float64)
    limit = torch.full_like(want, 0.5)
    assert against_value("lse", want.float(), want, limit).ok
    assert not against_value("lse", -want.float(), want, limit).ok
    assert not against_value("lse", torch.zeros(1, 1, 2), want, limit).ok


def test_nan_in_the_oracle_is_a_fault_of_ours() -> None:
    with pytest.raises(ValueError, match="fault of pytest-flashattn"):
        against_bound("o", torch.zeros(1, 1, 1, 1), _truth(torch.full((1, 1, 1, 1), math.nan)), 3.0)


def test_a_verdict_without_measures_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one measure"):
        Verdict.of([])


def test_the_noise_floor_sees_one_noisy_block_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.zeros(1, 1, 512, 64)
    noise = torch.randn(value.shape, generator=generator) * 0.05
    emulated = torch.randn(value.shape, generator=generator) * 0.05
    truth = _truth(value)
    whole, block = against_noise("o", noise, truth, emulated, tensor=1.5, block=2.0)
    assert whole.ok
    assert block.ok
    assert whole.grade == "A"
    noise[:, :, 256:384] *= 3
    whole, block = against_noise("o", noise, truth, emulated, tensor=1.9, block=2.0)
    assert whole.ok, "one block of four at three times the noise is sqrt(3) over the tensor"
    assert not block.ok
    assert not against_noise("o", noise * 2, truth, emulated, tensor=1.5, block=9.0)[0].ok
    noise[0, 0, 0, 0] = math.nan
    assert not against_noise("o", noise, truth, emulated, tensor=1e9, block=1e9)[0].ok


def test_one_query_row_averages_no_luck_away() -> None:
    """All rows of dk share one error of Delta: an emulator that happened to be nearly exact is no floor for them."""
    generator = torch.Generator().manual_seed(0)
    value = torch.zeros(1, 1, 128, 64)
    error = torch.randn(value.shape, generator=generator) * 0.15
    lucky = torch.randn(value.shape, generator=generator) * 0.05
    whole, block = against_noise("dk", error, _truth(value), lucky, tensor=2.0, block=2.0)
    assert not whole.ok
    assert not block.ok
    assert all(m.ok for m in against_noise("dk", error, _truth(value), lucky, tensor=2.0, block=2.0, draws=1))


def test_identical_counts_bits() -> None:
    a = torch.zeros(1, 1, 2, 2)
    b = a.clone()
    assert identical("o", a, b).ok
    b[0, 0, 1, 1] = 1e-30
    measure = identical("o", a, b)
    assert not measure.ok
    assert measure.beyond == 1


def test_ulp() -> None:
    assert ulp(1.0, torch.float16) == 2.0**-10
    assert ulp(1.5, torch.bfloat16) == 2.0**-7
    assert ulp(0.0, torch.float16) == 2.0**-24
    assert ulp(1e-7, torch.float16) == 2.0**-24


def test_where_names_rows_heads_and_columns() -> None:
    wrong = torch.zeros(2, 4, 256, 64, dtype=torch.bool)
    wrong[:, 1, 128:192] = True
    assert where(wrong) == "where: rows 128-191 of 256, head 1 of 4"
    assert where(torch.ones(1, 2, 3, 4, dtype=torch.bool)).startswith("where: everywhere")
    wrong = torch.zeros(1, 1, 64, 8, dtype=torch.bool)
    wrong[..., ::2, 7] = True
    assert "rows 32 scattered of 64" in where(wrong)
    assert "column 7 of 8" in where(wrong)


def test_json_round_trip() -> None:
    verdict = Verdict.of(
        [Measure("o", "bound", math.nan, 0.1, 1, 2, {"index": [0], "got": math.inf, "want": 0.0, "error": 1.0})]
    )
    again = Verdict.from_dict(verdict.to_dict())
    assert again.status == "failed"
    assert math.isnan(again.measures[0].ratio)


def test_every_row_that_matches_applies_and_the_widest_counts() -> None:
    plain, grouped = Case(), Case(heads=4, kv_heads=2)
    assert tolerances.limits("o", plain).lam == 3.0
    assert tolerances.limits("dk", plain).tensor > tolerances.limits("o", plain).tensor
    assert tolerances.limits("o", grouped) == tolerances.limits("o", plain)
    assert tolerances.limits("dk", Case(heads=4, kv_heads=2, dtype="fp32")) == tolerances.limits(
        "o", Case(dtype="fp32")
    )
    constant = tolerances.limits("o", Case(family="constant"))
    assert constant.tensor > tolerances.limits("o", plain).tensor
    assert tolerances.limits("o", Case(scale=0.0)) == constant, "a scale of 0 makes every score equal"


GOOD = '[[bound]]\nlam = 3.0\nwhy = ""\n[[noise]]\ntensor = 1.5\nblock = 2.0\nwhy = ""\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GOOD + "[[boundd]]\n", "unknown rule"),
        (GOOD.replace("lam", "lamb"), "unknown key 'lamb'"),
        (GOOD.replace("3.0", '"3"'), "must be a positive number"),
        (GOOD.replace("3.0", "-1"), "must be a positive number"),
        (GOOD.replace('why = ""', "", 1), "needs a `why`"),
        (GOOD.replace("[[bound]]", '[[bound]]\nquantity = "o"'), "one row without keys"),
        ("lam = ", "not valid TOML"),
    ],
)
def test_a_broken_tolerance_table_gets_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(TableError, match=r"mine\.toml") as error:
        tolerances.parse_table(text, "mine.toml")
    assert sentence in str(error.value)
