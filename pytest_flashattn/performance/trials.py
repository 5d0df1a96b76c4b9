"""The verdicts of the lane: time one implementation on a case against the baseline, verify what it returned, decide."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

from .. import implementation as implementations
from ..cases import Case
from ..implementation import Implementation, ImplementationError
from ..memory import exhausted, shortage
from ..verdict import Measure, Verdict
from . import clock, devices, interval, machine, pairing, thresholds, work
from .pairing import Samples
from .plan import BASELINES, Plan, current
from .subject import Subject, Values
from .verification import Verification

LENGTHEN = "lengthen the measurement: --benchmark-max-time=10"


def timed(implementation: Implementation, case: Case, direction: str) -> Verdict:
    """The verdict on the time of one call in `direction`; its `extra["performance"]` holds all that was measured."""
    plan = current()
    if lack := unfit(implementation, case, direction, plan):
        return lack
    ticks, values = clock.clock_for(implementation.device), Values(case, implementation.device)
    subjects, samples = [Subject(implementation, values, direction)], [Samples()]
    samples[0].first = pairing.first_call(ticks, subjects[0])
    why_not = ""
    try:
        peer = _peer(plan.baseline, implementation, values, direction)
        samples.append(Samples(first=pairing.first_call(ticks, peer)))
        subjects.append(peer)
    except (_NoPeer, ImplementationError, RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not exhausted(error):
            raise
        why_not = str(error).splitlines()[0]
    verification = Verification(*subjects)
    pairing.take_turns(ticks, subjects, samples, plan, verification)
    state = gpu_state(implementation.device)
    if fault := cheats(samples[0]):
        return Verdict.failed(fault)
    measures, wrong = verification.judge()
    if wrong:
        return Verdict("failed", wrong, tuple(measures))
    if samples[0].median.value < ticks.shortest:
        return too_short(ticks, samples[0])
    found = _facts(implementation, case, direction, samples[0])
    found |= {"clock": ticks.kind, "clock_says": ticks.says, "peak_memory": peak_memory(subjects[0])}
    found |= {"sm_mhz": state["sm_mhz"], "notices": state["notices"] + samples[0].notices(), "no_reference": why_not}
    for peer, others in zip(subjects[1:], samples[1:], strict=True):
        against = interval.ratio(samples[0].seconds, others.seconds)
        found |= {"reference": peer.implementation.spec, "reference_seconds": others.median.value}
        found |= {"ratio": [against.value, against.low, against.high]}
        found["notices"] += [f"baseline: {notice}" for notice in others.notices()]
    return _decided(found, case, direction, implementation.device, measures, plan)


def unfit(implementation: Implementation, case: Case, direction: str, plan: Plan) -> Verdict | None:
    """Why the case is not timed at all."""
    if case.dtype not in work.ITEMSIZE:
        return Verdict("unmet", f"the performance lane times {', '.join(work.ITEMSIZE)}")
    if case.layout != "plain" or case.dout != "plain" or case.family != "normal":
        return Verdict("unmet", "the performance lane times N(0, 1) in plain memory: no layouts, no input families")
    if changed := clock.tampered():
        return Verdict.failed(f"replaced {', '.join(changed)}: no time that it tells would mean anything")
    operations = work.flops(case, direction, implementation.support.alignment)
    if implementation.device.type != "cuda" and operations > plan.wall_flops:
        return Verdict("unmet", f"too long for a CPU: {1e-9 * operations:,.0f} GFLOP a call")
    lack = shortage(case, implementation.device)
    return Verdict("unmet", lack) if lack else None


class _NoPeer(Exception):
    """Why there is nothing to compare with."""


def _peer(baseline: str | None, implementation: Implementation, values: Values, direction: str) -> Subject:
    """The baseline, on the same values. Raises _NoPeer."""
    device, case = implementation.device, values.case
    spec = baseline or BASELINES.get(device.type)
    if spec is None:
        raise _NoPeer(f"no bundled kernel runs on {device.type}")
    try:
        peer = loaded(spec, str(device))
    except ValueError as error:
        raise _NoPeer(f"{spec}: {error}") from error
    if gap := peer.support.gap(case, () if direction == "forward" else ("backward",)):
        raise _NoPeer(f"{spec} {gap}")
    if {"causal", "cross"} <= case.features and peer.support.alignment != implementation.support.alignment:
        raise _NoPeer(f"{spec} has another diagonal")
    return Subject(peer, values, direction)


@functools.cache
def loaded(spec: str, device: str) -> Implementation:
    """The baseline, loaded once. Raises UnknownImplementation."""
    return implementations.load(spec, device=device)


def cheats(own: Samples) -> str:
    """What was wrong with the timing itself, as a sentence; empty when nothing was."""
    if changed := clock.tampered():
        return f"replaced {', '.join(changed)} while it was timed: no time that it tells would mean anything"
    if own.late > len(own.seconds) // 2:
        return (
            f"the device went on working after {own.late} of {len(own.seconds)} calls had ended: "
            "work on a stream that the caller's does not wait for is not in the time"
        )
    return ""


def too_short(ticks: clock.Clock, own: Samples) -> Verdict:
    """The verdict on a call that the clock is too coarse for."""
    seconds, least = 1e6 * own.median.value, 1e6 * ticks.shortest
    return Verdict("unmet", f"too short for CUDA events: {seconds:.1f} µs a call, {least:.0f} are needed")


def gpu_state(device: torch.device) -> dict[str, Any]:
    """The state of a GPU right after it was at work, for the facts; the slowdowns are notices."""
    if device.type != "cuda":
        return {"sm_mhz": None, "notices": []}
    index = torch.cuda.current_device() if device.index is None else device.index
    mhz, slow = machine.under_load(index)
    return {"sm_mhz": mhz, "notices": [f"the driver reports a {reason}" for reason in slow]}


def _facts(implementation: Implementation, case: Case, direction: str, own: Samples) -> dict[str, Any]:
    median, alignment = own.median, implementation.support.alignment
    tflops = 1e-12 * work.flops(case, direction, alignment) / median.value
    device = device_of(implementation.device)
    return {
        "implementation": implementation.spec,
        "direction": direction,
        "device": device[1],
        "samples": own.seconds,
        "seconds": [median.value, median.low, median.high],
        "rounds": len(own.seconds),
        "tflops": tflops,
        "gbps": 1e-9 * work.least_bytes(case, direction, alignment) / median.value,
        "peak_share": devices.share(case, device[1], tflops),
        "first_call": own.first,
        "warm_up_calls": own.warm,
        "host_seconds": own.host,
    }


def device_of(device: torch.device) -> tuple[str, str]:
    """Kind and name of a device, as thresholds and peaks know it."""
    return device.type, torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_memory(subject: Subject) -> int | None:
    """Bytes that a call takes at most, its results among them, on top of its inputs; None on a CPU, which does not say.

    Of a backward alone: on top of what its forward has kept.
    """
    device = subject.values.device
    if device.type != "cuda":
        return None
    subject.before()
    subject.refresh()
    torch.cuda.synchronize(device)
    gc.collect()  # a graph of an earlier call that is freed during this one would be subtracted from its peak
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    subject.call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _decided(
    found: dict[str, Any], case: Case, direction: str, device: torch.device, measures: list[Measure], plan: Plan
) -> Verdict:
    limits, where = thresholds.load(plan.thresholds), device_of(device)
    said: list[tuple[str, str]] = []
    limit = limits.ratio_limit(case, direction, where)
    if limit is not None and "ratio" in found:
        against = interval.Interval(*found["ratio"])
        said.append((against.at_most(limit), f"{shown(against)} x the time of {found['reference']}, limit {limit:g}"))
        found["ratio_limit"] = limit
    floor = limits.floor_limit(case, direction, where)
    if floor is not None:
        low, high = (found["tflops"] * found["seconds"][0] / found["seconds"][i] for i in (2, 1))
        reached = interval.Interval(found["tflops"], low, high)
        said.append((reached.at_least(floor), f"{shown(reached)} TFLOP/s, at least {floor:g} asked for"))
        found["floor"] = floor
    extra = {"performance": found}
    if not said:
        why = found["no_reference"] or "no row of the thresholds is about this case"
        return Verdict("unmet", f"undecided: nothing to compare with ({why})", tuple(measures), extra=extra)
    for status in ("failed", "undecided"):
        if texts := [text for verdict, text in said if verdict == status]:
            text = "; ".join(texts)
            if status == "failed":
                return Verdict("failed", f"too slow: {text}", tuple(measures), extra=extra)
            return Verdict("unmet", f"undecided: {text}; {LENGTHEN}", tuple(measures), extra=extra)
    return Verdict.of(measures).with_(extra=extra)


def shown(x: interval.Interval) -> str:
    return f"{x.value:.3g} [{x.low:.3g}, {x.high:.3g}]"
