"""Two subjects taking turns: warm-up until stable, then rounds in which each is timed once, in random order.

What happens to the machine happens to both: the ratio of a round is free of it, the median of the ratios is the result.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from . import interval
from .clock import Clock, Timing, stopwatch
from .plan import Plan
from .subject import Subject

WARM_WINDOW, WARM_CHANGE, WARM_MOST, WARM_SECONDS = 3, 0.02, 30, 2.0
DRIFT = 0.05
OUTLIER = 3.0

Witness = Callable[[int, list[Timing]], None]
"""Sees every round right after it: its number and the timing of each subject."""


@dataclass
class Samples:
    """Of one subject. first: wall seconds of its first call, compilation included; warm: calls until stable; seconds:
    one time a round; late: rounds after which the device was still busy; host: seconds a call keeps the host (CUDA).
    """

    first: float = 0.0
    warm: int = 0
    stable: bool = True
    late: int = 0
    host: float | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> interval.Interval:
        return interval.median(self.seconds)

    def notices(self) -> list[str]:
        """What makes these samples doubtful."""
        found = [] if self.stable else [f"not stable after {self.warm} warm-up calls"]
        third = len(self.seconds) // 3
        drift = statistics.median(self.seconds[-third:]) / statistics.median(self.seconds[:third]) - 1
        if abs(drift) > DRIFT:
            found.append(f"the time drifted by {drift:+.0%}: heat, a clock that is throttled, or other work")
        low, _, high = statistics.quantiles(self.seconds, n=4)
        far = sum(x > high + OUTLIER * (high - low) for x in self.seconds)
        if far > len(self.seconds) // 20:
            found.append(f"{far} of {len(self.seconds)} rounds are outliers")
        return found


def first_call(clock: Clock, subject: Subject) -> float:
    """Wall seconds of a subject's first call, with all that is compiled or loaded for it. Raises what it raises."""
    subject.before()
    subject.refresh()
    clock.wait()
    began = stopwatch()
    subject.call()
    clock.wait()
    return stopwatch() - began


def once(clock: Clock, subject: Subject) -> Timing:
    subject.before()
    return clock.time(subject.refresh, subject.call)


def warm_up(clock: Clock, subject: Subject, samples: Samples) -> None:
    """Call until the last few calls take as long as the few before them."""
    began, taken = stopwatch(), []
    while True:
        taken.append(once(clock, subject).seconds)
        new, old = taken[-WARM_WINDOW:], taken[-2 * WARM_WINDOW : -WARM_WINDOW]
        if len(old) == WARM_WINDOW and abs(statistics.median(new) / statistics.median(old) - 1) <= WARM_CHANGE:
            break
        if len(taken) >= WARM_MOST or (len(taken) >= 2 * WARM_WINDOW and stopwatch() - began > WARM_SECONDS):
            samples.stable = False
            break
    samples.warm = len(taken)


def take_turns(clock: Clock, subjects: list[Subject], samples: list[Samples], plan: Plan, witness: Witness) -> None:
    """Time one subject, or two in turns, until `plan` is content; fills `samples`. All have had their first call."""
    for subject, own in zip(subjects, samples, strict=True):
        warm_up(clock, subject, own)
    order = list(range(len(subjects)))
    shuffled = random.Random(0)
    began = stopwatch()
    for number in range(plan.most):
        for values in {id(s.values): s.values for s in subjects}.values():
            values.draw()
        shuffled.shuffle(order)
        timings = {which: once(clock, subjects[which]) for which in order}
        for which, own in enumerate(samples):
            own.seconds.append(timings[which].seconds)
            own.late += timings[which].is_late
            own.host = timings[which].host
        witness(number, [timings[which] for which in range(len(subjects))])
        done = number + 1
        # Looked at now and then, and never at a limit: a run that stops when the verdict suits would favour it.
        if done >= plan.least and done % plan.least == 0:
            taken = [own.seconds for own in samples]
            found = interval.ratio(*taken) if len(taken) == 2 else interval.median(taken[0])
            if found.half_width <= plan.precision or stopwatch() - began > plan.seconds:
                return
