"""How time and memory grow: with the length, and with what a mask leaves of the pairs.

Each check times two problems of one implementation in turns; what one returned is verified like any timed output.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..cases import Case
from ..implementation import Implementation
from ..verdict import Verdict
from . import clock, interval, pairing, thresholds, trials
from .interval import Interval
from .pairing import Samples
from .plan import current
from .subject import Subject, Values
from .verification import Verification


def exponent(implementation: Implementation, case: Case) -> Verdict:
    """p of time ~ N**p, from N / 2 to N."""
    return _compared(implementation, case, halved(case), "exponent")


def causal(implementation: Implementation, case: Case) -> Verdict:
    """Time of a causal call, as a share of a full one."""
    return _compared(implementation, case, replace(case, causal=False), "causal")


def window(implementation: Implementation, case: Case) -> Verdict:
    """Time of a call with a window, as a share of one without."""
    return _compared(implementation, case, replace(case, window=None), "window")


def memory(implementation: Implementation, case: Case) -> Verdict:
    """Peak memory of forward and backward at N, in that at N / 2."""
    ticks, taken = clock.clock_for(implementation.device), []
    for size in (halved(case), case):
        subject = Subject(implementation, Values(size, implementation.device), "forward_backward")
        pairing.first_call(ticks, subject)
        if (peak := trials.peak_memory(subject)) is None:
            return Verdict("unmet", f"{implementation.device.type.upper()} memory has no peak that can be read")
        taken.append(peak)
    small, large = taken
    grows = large / small
    found = {"quantity": "memory", "bytes": taken, "notices": []}
    return decided("memory", Interval(grows, grows, grows), implementation, case, found)


def halved(case: Case) -> Case:
    return replace(case, q=case.q // 2, k=case.k // 2)


def as_exponent(times: Interval) -> Interval:
    """What a ratio of times says of the power with which they grow when a length doubles."""
    return Interval(math.log2(times.value), math.log2(times.low) if times.low else -math.inf, math.log2(times.high))


def _compared(implementation: Implementation, case: Case, other: Case, quantity: str) -> Verdict:
    plan = current()
    for size in (case, other):
        if lack := trials.unfit(implementation, size, "forward", plan):
            return lack
    ticks = clock.clock_for(implementation.device)
    subjects = [Subject(implementation, Values(size, implementation.device), "forward") for size in (case, other)]
    samples = [Samples(), Samples()]
    for subject, own in zip(subjects, samples, strict=True):
        own.first = pairing.first_call(ticks, subject)
    verification = Verification(subjects[0])
    pairing.take_turns(ticks, subjects, samples, plan, verification)
    if fault := trials.cheats(samples[0]) or trials.cheats(samples[1]):
        return Verdict.failed(fault)
    measures, wrong = verification.judge()
    if wrong:
        return Verdict("failed", wrong, tuple(measures))
    if short := next((own for own in samples if own.median.value < ticks.shortest), None):
        return trials.too_short(ticks, short)
    times = interval.ratio(samples[0].seconds, samples[1].seconds)
    found = {
        "quantity": quantity,
        "seconds": [own.median.value for own in samples],
        "times": [times.value, times.low, times.high],
        "notices": [notice for own in samples for notice in own.notices()],
    }
    measured = as_exponent(times) if quantity == "exponent" else times
    return decided(quantity, measured, implementation, case, found).with_(measures=tuple(measures))


WORDS = {
    "exponent": "time grows as N**{}",
    "causal": "a causal call takes {} of a full one",
    "window": "a call with a window takes {} of one without",
    "memory": "memory is {} x as large at twice the length",
}


def decided(quantity: str, measured: Interval, implementation: Implementation, case: Case, found: dict) -> Verdict:
    """The verdict on one growing quantity."""
    where = trials.device_of(implementation.device)
    limit = thresholds.load(current().thresholds).growth_limit(quantity, case, "forward", where)
    extra = {
        "growth": {
            **found,
            "says": WORDS[quantity],
            "value": [measured.value, measured.low, measured.high],
            "limit": limit,
        }
    }
    said = WORDS[quantity].format(trials.shown(measured))
    if limit is None:
        return Verdict("unmet", f"undecided: no row of the thresholds is about it ({said})", extra=extra)
    status = measured.at_most(limit)
    if status == "undecided":
        return Verdict("unmet", f"undecided: {said}, limit {limit:g}; {trials.LENGTHEN}", extra=extra)
    return Verdict(status, f"{said}, limit {limit:g}" if status == "failed" else "", extra=extra)
