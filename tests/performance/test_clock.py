"""The clocks, and the rounds that are taken with them."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_flashattn.performance import clock, interval, machine, pairing
from pytest_flashattn.performance.growth import as_exponent
from pytest_flashattn.performance.pairing import Samples
from pytest_flashattn.performance.plan import Plan


class Simulated:
    """A clock that tells times from a model: what the whole machine does, and noise of its own for every call."""

    kind, says, shortest = "wall", "simulated", 0.0

    def __init__(self, seed: int, noise: float) -> None:
        self.drawn, self.noise, self.state = random.Random(seed), noise, 1.0

    def time(self, refresh: Callable[[], None], call: Callable[[], Any]) -> clock.Timing:
        self.state *= math.exp(self.drawn.gauss(0, 0.002))  # heat, throttling: slow, and the same for all
        return clock.Timing(call() * self.state * math.exp(self.drawn.gauss(0, self.noise)), [])

    def wait(self) -> None: ...


def subject(seconds: float) -> Any:
    values = SimpleNamespace(draw=lambda: None)
    return SimpleNamespace(before=lambda: None, refresh=lambda: None, call=lambda: seconds, values=values)


def ratio(seed: int, mine: float, noise: float = 0.01, plan: Plan = Plan(seconds=60)) -> interval.Interval:  # noqa: B008
    samples = [Samples(), Samples()]
    ticks = Simulated(seed, noise)
    pairing.take_turns(ticks, [subject(mine), subject(1.0)], samples, plan, lambda number, timings: None)
    return interval.ratio(samples[0].seconds, samples[1].seconds)


def test_results_are_copied_as_they_are_when_the_call_returns() -> None:
    out = torch.zeros(4)
    written = threading.Event()

    def call() -> list[Tensor]:
        threading.Thread(target=lambda: (time.sleep(0.05), out.fill_(1.0), written.set())).start()
        return [out]

    timing = clock.WallClock().time(lambda: None, call)
    written.wait(5)
    assert torch.equal(timing.results[0], torch.zeros(4))
    assert torch.equal(out, torch.ones(4))


def test_fresh_inputs_are_no_part_of_the_time() -> None:
    timing = clock.WallClock().time(lambda: time.sleep(0.1), list)
    assert timing.seconds < 0.05


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the stream of a device that there is not, in order."""
    done: list[str] = []
    monkeypatch.setattr(clock, "FLUSH_BYTES", 64)
    monkeypatch.setattr(clock, "_record", lambda event: done.append(event.name))
    monkeypatch.setattr(clock, "_wait", lambda event: done.append(f"wait for {event.name}"))
    monkeypatch.setattr(clock, "_wait_for_device", lambda device: done.append("wait for all"))
    monkeypatch.setattr(clock, "_elapsed", lambda start, end: 2.5)
    names = iter(["start", "end", "read"] * 10)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(name=next(names)))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(f"spin {cycles}"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "zero_", lambda x: done.append("flush"))
    return done


def test_the_order_in_the_stream_of_a_device(stream: list[str]) -> None:
    ticks = clock.DeviceClock(torch.device("cpu"))

    def call() -> list[Tensor]:
        stream.append("call")
        time.sleep(0.002)
        return [torch.ones(2)]

    timing = ticks.time(lambda: stream.append("fresh inputs"), call)
    order = ["fresh inputs", "flush", "start", "call", "end", "read", "wait for read", "wait for all"]
    assert stream == ["spin 1000000", *order]
    assert timing.seconds == 2.5e-3
    assert timing.host is not None
    assert timing.host >= 0.002
    ticks.time(lambda: None, call)
    spins = [int(line.removeprefix("spin ")) for line in stream if line.startswith("spin")]
    assert spins[1] >= 2 * 0.002 * clock.CYCLES_A_SECOND, "the spin outlasts what the host takes"


def test_late_is_what_outlasts_noise() -> None:
    assert clock.Timing(1e-3, [], late=5e-4).is_late
    assert not clock.Timing(1e-3, [], late=9e-5).is_late
    assert not clock.Timing(1e-2, [], late=1e-3).is_late


@pytest.mark.parametrize("what", ["time.perf_counter", "time.monotonic_ns", "torch.cuda.Event.elapsed_time"])
def test_a_clock_that_was_replaced_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.tampered() == []
    monkeypatch.setattr(what, lambda *args: 0.0)
    assert clock.tampered() == [what]


def test_rounds_go_on_until_the_ratio_is_known_well_enough() -> None:
    samples = [Samples(), Samples()]
    seen: list[int] = []
    subjects = [subject(1.0), subject(1.0)]
    ticks = Simulated(0, 0.03)
    pairing.take_turns(ticks, subjects, samples, Plan(seconds=60), lambda number, timings: seen.append(len(timings)))
    assert interval.ratio(samples[0].seconds, samples[1].seconds).half_width <= Plan.precision
    assert Plan.least < len(samples[0].seconds) == len(samples[1].seconds) == len(seen) < Plan.most
    assert set(seen) == {2}
    quick = [Samples(), Samples()]
    pairing.take_turns(ticks, subjects, quick, Plan(seconds=0.0), lambda number, timings: None)
    assert len(quick[0].seconds) == Plan.least


def test_what_slows_the_machine_does_not_move_the_ratio() -> None:
    found = ratio(3, 1.2)
    assert found.low < 1.2 < found.high
    assert found.half_width <= Plan.precision


def test_it_does_not_matter_who_comes_first_in_a_round() -> None:
    """A machine on which every second call takes 5 % longer."""
    calls = iter(range(10**6))
    ticks: Any = SimpleNamespace(time=lambda refresh, call: clock.Timing(1.05 if next(calls) % 2 else 1.0, []))
    samples = [Samples(), Samples()]
    pairing.take_turns(ticks, [subject(1), subject(1)], samples, Plan(seconds=0.0), lambda number, timings: None)
    found = interval.ratio(samples[0].seconds, samples[1].seconds)
    assert found.low <= 1.0 <= found.high


@pytest.mark.parametrize("seed", range(20))
def test_two_runs_of_the_same_are_no_regression_and_a_tenth_slower_is(seed: int) -> None:
    """At 5 %, in the simulation; measurements/performance.py does the same on a GPU."""
    old, same, slower = ratio(seed, 1.0), ratio(100 + seed, 1.0), ratio(200 + seed, 1.1)
    assert same.over(old).at_most(1.05) == "verified"
    assert slower.over(old).at_most(1.05) == "failed"


def test_warm_up_ends_when_the_times_are_stable() -> None:
    taken = iter([9.0, 5.0, 3.0, 2.0, 1.5, 1.2] + [1.0] * 40)
    slow: Any = SimpleNamespace(before=lambda: None, refresh=lambda: None, call=None)
    ticks: Any = SimpleNamespace(time=lambda refresh, call: clock.Timing(next(taken), []))
    samples = Samples()
    pairing.warm_up(ticks, slow, samples)
    assert samples.stable
    assert samples.warm == 11, "the first window of three that is no faster than the three before it"
    ever = iter([2.0**-n for n in range(60)])
    ticks.time = lambda refresh, call: clock.Timing(next(ever), [])
    pairing.warm_up(ticks, slow, samples)
    assert not samples.stable
    assert samples.warm == pairing.WARM_MOST


def test_notices() -> None:
    flat = Samples(seconds=[1.0 + 1e-3 * (i % 5) for i in range(60)])
    assert flat.notices() == []
    assert "drifted by +" in Samples(seconds=[1.0 + 0.01 * i for i in range(60)]).notices()[0]
    spiky = Samples(seconds=[3.0 if i % 10 == 5 else 1.0 + 1e-3 * (i % 5) for i in range(60)])
    assert spiky.notices() == ["6 of 60 rounds are outliers"]
    assert Samples(stable=False, warm=30, seconds=flat.seconds).notices() == ["not stable after 30 warm-up calls"]


def test_slowdowns_are_those_that_are_not_everyday() -> None:
    assert machine.slowdowns("0x0000000000000004") == [], "at the power cap"
    assert machine.slowdowns("0x0000000000000044") == ["thermal slowdown by the hardware"]
    assert machine.slowdowns("0x00000000000000A8") == [
        "hardware slowdown",
        "thermal slowdown by the driver",
        "power brake",
    ]
    assert machine.slowdowns("[Not Supported]") == machine.slowdowns("") == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1980, 0x0000000000000020", (1980, ["thermal slowdown by the driver"])),
        ("[N/A], [N/A]", (None, [])),
        ("", (None, [])),
    ],
)
def test_what_the_drivers_tool_says(line: str, says: object, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1234"))

    def run(command: list[str], **options: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=line + "\n")

    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine.under_load(0) == says
    assert asked[0][:2] == ["nvidia-smi", "--id=GPU-1234"]


def test_the_exponent_of_a_doubled_length() -> None:
    found = as_exponent(interval.Interval(4.0, 2.0, 8.0))
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0)
