"""pytest's rim of the lane: registered as a plugin when chapter `performance` is asked for, and at no other time.

pytest-benchmark keeps the statistics, the storage and the comparison. It is given the samples by its public interface
alone: a timer that stands still, and a target that moves it on by one sample a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from ..chapters import TIMED
from ..options import SETTINGS

if TYPE_CHECKING:
    from ..cases import Case
    from ..collection import Selection
    from ..fixtures import RunCheck
    from ..implementation import Implementation
    from ..state import State
    from ..verdict import Verdict

CHAPTER = "performance"
assert CHAPTER in TIMED

SERIALLY = "pytest flashattn-suite/performance -n0, and the options of this run"
KEPT = ("implementation", "direction", "clock", "tflops", "gbps", "peak_share", "peak_memory", "first_call",
        "warm_up_calls", "host_seconds", "sm_mhz", "seconds", "reference", "reference_seconds", "ratio", "ratio_limit",
        "floor", "notices")  # fmt: skip
"""What goes into `extra_info`."""


def wanted(selection: Selection) -> bool:
    return selection.takes(CHAPTER)


def validate(run: State) -> None:
    """Raises UsageError, one sentence, when the lane cannot run; takes the clocks before an implementation can."""
    from ..matrices import TableError
    from . import thresholds

    if not run.config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(
            f"flashattn-suite/{CHAPTER} needs pytest-benchmark, which is not installed or switched off: "
            "pip install 'pytest-flashattn[bench]'"
        )
    try:
        thresholds.load(run.settings.thresholds)
    except TableError as error:
        raise pytest.UsageError(f"--flashattn-thresholds: {error}") from None
    from . import trials  # which takes the clocks

    if run.settings.baseline is not None:
        try:
            run.make_importable()
            trials.loaded(run.settings.baseline, "cpu")
        except ValueError as error:
            raise pytest.UsageError(f"--flashattn-baseline: {' '.join(str(error).split())}") from None


class Replay:
    """A clock that stands still, and a target that moves it on by one of `samples` (seconds) at each call."""

    def __init__(self) -> None:
        self.now = 0.0
        self._samples: list[float] = []

    def timer(self) -> Callable[[], float]:
        def measured_seconds() -> float:  # its name stands in pytest-benchmark's JSON
            return self.now

        return measured_seconds

    def feed(self, benchmark: Any, samples: Sequence[float]) -> None:
        self._samples = list(reversed(samples))
        benchmark.pedantic(self._advance, rounds=len(samples), iterations=1)

    def _advance(self) -> None:
        self.now += self._samples.pop()


@pytest.fixture
def _flashattn_replay(request: pytest.FixtureRequest) -> Replay:
    """Ahead of `benchmark`, which takes its timer from the marker."""
    replay = Replay()
    request.node.add_marker(pytest.mark.benchmark(timer=replay.timer()))
    return replay


@pytest.fixture
def flashattn_timed(
    request: pytest.FixtureRequest, _flashattn_replay: Replay, benchmark: Any, flashattn_impl: Implementation
) -> RunCheck:
    """Run a check that measures, hand its samples to pytest-benchmark, settle the test."""

    def check(name: str, case: Case, /) -> Verdict:
        from .. import outcomes

        verdict = _run(request, name, flashattn_impl, case)
        found = verdict.extra.get("performance")
        if found is not None:
            benchmark.group = f"{found['direction']} {case.id}" if _several(request) else found["direction"]
            benchmark.extra_info.update({key: found[key] for key in KEPT if key in found})
            _flashattn_replay.feed(benchmark, found["samples"])
        return outcomes.settle(request.node, verdict)

    return check


@pytest.fixture
def flashattn_alone(request: pytest.FixtureRequest, flashattn_impl: Implementation) -> RunCheck:
    """Run a check that compares times and keeps no statistics."""

    def check(name: str, case: Case, /) -> Verdict:
        from .. import outcomes

        return outcomes.settle(request.node, _run(request, name, flashattn_impl, case))

    return check


def _run(request: pytest.FixtureRequest, name: str, implementation: Implementation, case: Case) -> Verdict:
    from .. import trial
    from ..verdict import Verdict
    from .plan import Plan, in_force

    config = request.config
    if why := _switched_off(config):
        return Verdict("unmet", f"not measured: {why}")
    settings = config.stash[SETTINGS]
    plan = Plan(
        baseline=settings.baseline,
        thresholds=settings.thresholds,
        seconds=float(config.getoption("benchmark_max_time")),
        least=max(Plan.least, int(config.getoption("benchmark_min_rounds"))),
    )
    with in_force(plan):
        return trial.run_check(name, implementation, case, diagnose=False)


def _switched_off(config: pytest.Config) -> str:
    """Why pytest-benchmark measures nothing in this run; empty when it does."""
    if hasattr(config, "workerinput"):
        return f"several processes share the machine (pytest-xdist); run it by itself: {SERIALLY}"
    if config.getoption("benchmark_disable") and not config.getoption("benchmark_enable"):
        return "--benchmark-disable was given"
    return ""


def _several(request: pytest.FixtureRequest) -> bool:
    return len(request.config.stash[SETTINGS].impl) > 1


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """The GPU, its driver and the versions, next to what pytest-benchmark says of the CPU."""
    from . import machine

    machine_info[machine.SECTION] = machine.describe(config.stash[SETTINGS].device)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_compare_machine_info(machine_info: dict[str, Any], compared_benchmark: dict[str, Any]) -> None:
    """Raises UsageError when --benchmark-compare names a run on another GPU or driver."""
    from . import machine

    old = compared_benchmark.get("machine_info", {}).get(machine.SECTION, {})
    if different := machine.differences(old, machine_info[machine.SECTION]):
        raise pytest.UsageError(f"--benchmark-compare: not the same machine: {'; '.join(different)}")
