"""`--flashattn-fuzz=N`: what pytest needs of it. Drawing and shrinking themselves are in `strategies`.

The draws are the cases of chapter `fuzz`: each is a test with an id, so selection, timeouts, xdist, expectations and
reports treat it like any other, and its id replays it without Hypothesis. The first failure of each kind is shrunk
where it happens, within its own test.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from .chapters import DRAWN
from .features import FEATURES
from .options import SETTINGS
from .support import Support

if TYPE_CHECKING:
    from .cases import Case
    from .collection import Selection
    from .implementation import Implementation
    from .options import Settings
    from .state import State
    from .verdict import Verdict

CHAPTER = "fuzz"
assert CHAPTER in DRAWN

DRAWS = pytest.StashKey[dict[str, list["Case"]]]()
SHRUNK = pytest.StashKey[set[tuple[str, str]]]()


def validate(settings: Settings, selection: Selection) -> None:
    """Raises UsageError when draws are asked for that nothing would run, or a run of the chapter without any."""
    picks = [pick for pick in selection.picks if pick.chapter == CHAPTER]
    if settings.fuzz and not picks:
        raise pytest.UsageError(
            f"--flashattn-fuzz: the paths given leave it out; add flashattn-suite/{CHAPTER} to them"
        )
    if settings.fuzz and importlib.util.find_spec("hypothesis") is None:
        raise pytest.UsageError(
            "--flashattn-fuzz needs Hypothesis, which is not installed: pip install 'pytest-flashattn[fuzz]'"
        )
    if not settings.fuzz and any(not pick.case for pick in picks):
        raise pytest.UsageError(f"flashattn-suite/{CHAPTER} draws its cases: say how many with --flashattn-fuzz=N")


def draws(config: pytest.Config) -> dict[str, list[Case]]:
    """The drawn cases by short name of the implementation; by "", over all features, when none is named.

    Drawn once a session. Raises ValueError when an implementation cannot be loaded.
    """
    from . import state

    settings = config.stash[SETTINGS]
    if DRAWS not in config.stash:
        supports = {"": Support(features=frozenset(FEATURES))}
        if names := settings.names():
            supports = {name: state.of(config).implementation(name).support for name in names}
        config.stash[DRAWS] = {name: _draw(support, settings) for name, support in supports.items()}
    return config.stash[DRAWS]


def _draw(support: Support, settings: Settings) -> list[Case]:
    if not settings.fuzz:
        return []
    from . import strategies

    return [replace(case, seed=settings.seed) for case in strategies.draw(support, settings.fuzz, settings.seed)]


def explain(name: str, implementation: Implementation, case: Case, verdict: Verdict, run: State) -> Verdict:
    """The failed `verdict` of check `name` on a drawn case, with the smallest case that fails in the same way.

    Once for each kind of failure. A failure that is expected or broke the device stays as it is, and so does one of a
    case that was not drawn but asked for.
    """
    from . import outcomes, trial

    settings, spec = run.settings, implementation.spec
    mine = draws(run.config).get(next(n for n, s in settings.names().items() if s == spec), [])
    shrunk = run.config.stash.setdefault(SHRUNK, set())
    kind = _kind(verdict)
    if case not in mine or (spec, kind) in shrunk:
        return verdict
    if trial.poisoned() or outcomes.is_excused(_nodeid(name, case), spec, run):
        return verdict
    from . import strategies  # not sooner: a case that is asked for by its id needs no Hypothesis

    shrunk.add((spec, kind))
    verdicts: dict[str, Verdict] = {}

    def fails(smaller: Case) -> bool:
        if trial.poisoned() or outcomes.is_excused(_nodeid(name, smaller), spec, run):
            return False
        try:
            found = trial.run_check(name, implementation, replace(smaller, seed=settings.seed), diagnose=False)
        except Exception:  # an error of ours on a smaller case must not replace what was found
            return False
        verdicts[smaller.id] = found
        return found.status == "failed" and _kind(found) == kind

    # A test that hangs is the watchdog's to end: shrinking stays well below its limit.
    seconds = min(strategies.SECONDS, settings.timeout / 2 or math.inf)
    failing = replace(case, seed=0)
    smallest, runs = strategies.shrink(
        implementation.support, settings.fuzz, settings.seed, failing, fails, seconds=seconds
    )
    cost = f"draw {mine.index(case) + 1} of {len(mine)}; {runs} run{'s' * (runs != 1)} to shrink it"
    if smallest == failing:
        return verdict.with_(diagnosis=(*verdict.diagnosis, f"no smaller case fails like this ({cost})"))
    lines = [f"smallest case that fails like this: {smallest.id} ({cost})", verdicts[smallest.id].text()]
    return verdict.with_(diagnosis=(*verdict.diagnosis, *lines), extra={**verdict.extra, "smallest": smallest.id})


def _kind(verdict: Verdict) -> str:
    """What shrinking must keep, so that it does not slip from one fault to another."""
    worst = next((m for m in verdict.measures if not m.ok), None)
    if worst is None:
        return " ".join(verdict.reason.split()[:2])
    return f"{worst.quantity} {'NaN' if math.isnan(worst.ratio) else 'exact' if worst.rule == 'exact' else 'off'}"


def _nodeid(name: str, case: Case) -> str:
    return f"flashattn-suite/{CHAPTER}::test_{name.partition('.')[2]}[{case.id}]"
