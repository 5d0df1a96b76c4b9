"""Intervals hold the median as often as they say, and a verdict falls only where they decide."""

from __future__ import annotations

import math
import random

import pytest

from pytest_flashattn.performance import interval
from pytest_flashattn.performance.interval import Interval


def test_ranks_are_those_of_the_binomial() -> None:
    """The 99 % interval of 15 samples leaves out two at either end; 7 samples have none (tables of the sign test)."""
    samples = [float(x) for x in range(1, 16)]
    assert interval.median(samples) == Interval(8.0, 3.0, 13.0)
    assert interval.median(samples[:8]) == Interval(4.5, 1.0, 8.0)
    assert interval.median(samples[:7]) == Interval(4.0, 0.0, math.inf)
    with pytest.raises(ValueError, match="no samples"):
        interval.median([])


def test_the_interval_holds_the_median_of_a_skewed_distribution() -> None:
    drawn = random.Random(1)
    held = 0
    for _ in range(2000):
        found = interval.median([drawn.expovariate(1.0) for _ in range(30)])
        held += found.low <= math.log(2) <= found.high
    assert held >= 0.985 * 2000


def test_a_verdict_only_where_the_interval_decides() -> None:
    assert [Interval(1.0, 0.9, high).at_most(1.05) for high in (1.05, 1.06)] == ["verified", "undecided"]
    assert [Interval(1.2, low, 1.3).at_most(1.05) for low in (1.05, 1.06)] == ["undecided", "failed"]
    assert [Interval(9, low, 11).at_least(8.0) for low in (8.0, 7.9)] == ["verified", "undecided"]
    assert [Interval(7, 6, high).at_least(8.0) for high in (8.0, 7.9)] == ["undecided", "failed"]


def test_a_ratio_is_free_of_what_both_suffer() -> None:
    drawn = random.Random(2)
    drift = [1 + 0.5 * i / 40 for i in range(40)]
    second = [d * drawn.gauss(1, 1e-3) for d in drift]
    first = [1.1 * d * drawn.gauss(1, 1e-3) for d in drift]
    found = interval.ratio(first, second)
    assert found.low < 1.1 < found.high
    assert found.half_width < 2e-3
    with pytest.raises(ValueError, match="zip"):
        interval.ratio([1.0], [1.0, 2.0])


def test_widths_of_a_quotient_add_in_quadrature() -> None:
    found = Interval(2.0, 2.0 * math.exp(-0.03), 2.0 * math.exp(0.03)).over(
        Interval(1.0, math.exp(-0.04), math.exp(0.04))
    )
    assert found.value == 2.0
    assert found.low == pytest.approx(2.0 * math.exp(-0.05))
    assert found.high == pytest.approx(2.0 * math.exp(0.05))
    assert Interval(1.0, 0.0, math.inf).over(Interval(1.0, 0.9, 1.1)) == Interval(1.0, 0.0, math.inf)
