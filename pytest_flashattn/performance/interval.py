"""What repeated samples decide: the median, an interval that holds it, a verdict only where that decides. Torch-free.

The interval is between order statistics, which assumes nothing of the distribution: of n samples each lies below the
median with probability 1/2, so that the j-th smallest and the j-th largest enclose it with the probability that a
binomial(n, 1/2) says (David and Nagaraja, Order Statistics, 7.1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.99


@dataclass(frozen=True)
class Interval:
    """A value, and between what it lies with CONFIDENCE."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval, as a share of the value."""
        return (self.high - self.low) / (2 * self.value)

    def at_most(self, limit: float) -> str:
        """What it says of an upper limit: "verified" (all of it within), "failed" (all of it beyond), "undecided"."""
        if self.high <= limit:
            return "verified"
        return "failed" if self.low > limit else "undecided"

    def at_least(self, limit: float) -> str:
        """The same for a lower limit."""
        if self.low >= limit:
            return "verified"
        return "failed" if self.high < limit else "undecided"

    def over(self, other: Interval) -> Interval:
        """This divided by `other`, the two being independent: widths add in quadrature, as logarithms."""
        value = self.value / other.value
        if not (self.low and other.low):
            return Interval(value, 0.0, math.inf)
        up = math.hypot(math.log(self.high / self.value), math.log(other.value / other.low))
        down = math.hypot(math.log(self.value / self.low), math.log(other.high / other.value))
        return Interval(value, value * math.exp(-down), value * math.exp(up))


def median(samples: Sequence[float]) -> Interval:
    """The median of positive `samples`; an interval from 0 to infinity where they are too few (under 8).

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("the median of no samples")
    ordered, rank = sorted(samples), _rank(len(samples))
    value = statistics.median(ordered)
    if rank is None:
        return Interval(value, 0.0, math.inf)
    return Interval(value, ordered[rank], ordered[-1 - rank])


def ratio(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The median of first / second, sample by sample: what both of a pair suffer (heat, clocks) cancels.

    Raises ValueError for sequences of different lengths.
    """
    return median([a / b for a, b in zip(first, second, strict=True)])


def _rank(n: int) -> int | None:
    """How many samples may be left out at either end; None where not even all of them suffice."""
    tail, rank = 0.0, None
    for j in range(n // 2):
        tail += math.comb(n, j) / 2**n
        if tail > (1 - CONFIDENCE) / 2:
            break
        rank = j
    return rank
