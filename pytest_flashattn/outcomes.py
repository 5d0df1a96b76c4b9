"""From a test's outcome to its verdict, on the side where the test runs (the process itself, or an xdist worker).

The record is a JSON-able dict set on the report as `report.flashattn`; xdist carries it to the controller.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from . import capability, watchdog
from .collection import BY_NAME_ONLY, ROOT, facts
from .fixtures import PUBLIC
from .verdict import Verdict

if TYPE_CHECKING:
    from .state import State

VERDICTS = pytest.StashKey[list[Verdict]]()
OUTPUT_LIMIT = 2000
TIMED = frozenset(("flashattn_case", "flashattn_check"))
LETTERS = {"declared": "d", "unmet": "u", "excused": "x"}


def settle(item: pytest.Item, verdict: Verdict) -> Verdict:
    """Record the verdict; a failure fails the test, and what was not judged ends it as a skip with its reason."""
    item.stash.setdefault(VERDICTS, []).append(verdict)
    if verdict.status == "failed":
        pytest.fail(verdict.text() or "failed", pytrace=False)
    if verdict.status != "verified":
        pytest.skip(verdict.reason)
    return verdict


def concerns(item: pytest.Item) -> bool:
    """Whether a test is the suite's, or a user's own that takes our fixtures or carries our markers."""
    if is_suite(item) or any(item.get_closest_marker(word) for word in capability.NEEDS):
        return True
    return not PUBLIC.isdisjoint(getattr(item, "fixturenames", ()))


def is_timed(item: pytest.Item) -> bool:
    """Whether --flashattn-timeout holds for a test: a user's own takes as long as it likes unless it runs our cases."""
    return is_suite(item) or not TIMED.isdisjoint(getattr(item, "fixturenames", ()))


def is_suite(item: pytest.Item) -> bool:
    return item.nodeid.startswith(f"{ROOT}/")


def attach(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, run: State) -> None:
    """Give the report its record when this phase decided the test; shape what the user reads."""
    suite = is_suite(item)
    if suite:
        report.sections = [(name, _shortened(text)) for name, text in report.sections]
    verdict = _decided(item, call, report, suite)
    if verdict is None:
        return
    notice_poison(report, run)
    if isinstance(verdict, str):
        hardware = [word for word in capability.NEEDS if item.get_closest_marker(word)]
        report.flashattn = {"status": verdict, "covers": hardware, "device": _device(run)}  # type: ignore[attr-defined]
        return
    finish(item.nodeid, verdict, report, run, covers=_covers(item, verdict, run), own=not suite)
    record = report.flashattn
    item.user_properties.append(("flashattn_status", record["status"]))
    if (worst := verdict.worst) is not None:
        item.user_properties.append(("flashattn_worst", f"{worst.ratio:.3g} {worst.quantity}"))


def _decided(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, suite: bool
) -> Verdict | str | None:
    """The verdict of this phase; None when it decides nothing; "passed" for an own test that ran no check of ours."""
    given = _together(item.stash.get(VERDICTS, []))
    if report.when == "teardown":
        return Verdict.failed(f"teardown: {_sentence(call)}") if report.failed else None
    if report.failed:
        judged = call.excinfo is not None and call.excinfo.errisinstance(pytest.fail.Exception)
        if judged and given is not None and given.status == "failed":
            return given
        return Verdict.failed(f"{'could not be set up: ' if report.when == 'setup' else ''}{_sentence(call)}")
    if report.skipped:
        return given if given is not None and given.status in ("declared", "unmet") else None
    if report.when == "setup":
        return None
    if given is not None and given.status == "verified":
        return given.with_(seconds=given.seconds or round(call.duration, 4))
    return Verdict.failed("the test compared nothing") if suite else "passed"


def _together(verdicts: list[Verdict]) -> Verdict | None:
    """One verdict for a test that ran several checks: the last decides, since any but "verified" ends the test."""
    if len(verdicts) < 2:
        return verdicts[0] if verdicts else None
    measures = tuple(m for verdict in verdicts for m in verdict.measures)
    return verdicts[-1].with_(measures=measures, seconds=sum(verdict.seconds for verdict in verdicts))


def _sentence(call: pytest.CallInfo[None]) -> str:
    """The exception as one line, with the place it came from: never a traceback of ours."""
    if call.excinfo is None:
        return "no reason known"
    if call.excinfo.errisinstance((pytest.fail.Exception, pytest.skip.Exception)):
        return str(call.excinfo.value)
    # Asking for a fixture that cannot be found has a long text of its own; its first lines suffice everywhere.
    last = call.excinfo.traceback[-1]
    text = " ".join(call.excinfo.exconly().split())
    return f"{text[:500]} ({os.path.basename(str(last.path))}:{last.lineno + 1})"


def _shortened(text: str) -> str:
    if len(text) <= OUTPUT_LIMIT:
        return text
    return f"{text[:OUTPUT_LIMIT]}\n… {len(text) - OUTPUT_LIMIT:,} more characters, cut by pytest-flashattn"


def _device(run: State) -> list[str]:
    device = run.device()
    return [] if device is None else [device.kind, device.name, str(device)]


def _covers(item: pytest.Item, verdict: Verdict, run: State) -> list[str]:
    """The words of --flashattn-require that this test stands for."""
    what = facts(item.nodeid, run.settings)
    # The chapter fp8 also judges emulations: it is the device that stands for the hardware of that name.
    words = {what["chapter"]} - set(capability.NEEDS)
    words |= {word for word in capability.NEEDS if item.get_closest_marker(word)}
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("flashattn_case") if callspec is not None else None
    if case is not None and not isinstance(case, str):
        words |= {case.dtype, *case.features}
    if any(measure.quantity in ("dq", "dk", "dv") for measure in verdict.measures):
        words.add("backward")
    if any(measure.quantity == "lse" for measure in verdict.measures):
        words.add("lse")
    device = run.device()
    return sorted(words | set(device.covers() if device else ()))


def finish(
    nodeid: str,
    verdict: Verdict,
    report: pytest.TestReport,
    run: State,
    *,
    covers: list[str],
    own: bool = False,
    device: list[str] | None = None,
) -> None:
    """Apply --flashattn-require and the expectations; put record, outcome and text on the report."""
    what = facts(nodeid, run.settings)
    device = _device(run) if device is None else device
    excuse, verdict = _judged(nodeid, verdict, what["implementation"], device, run)
    smallest = verdict.extra.get("smallest", what["case"])
    replay = replay_line(nodeid, {**what, "case": smallest}, run) if not own else ""
    report.flashattn = {  # type: ignore[attr-defined]
        "id": nodeid,
        **what,
        **verdict.to_dict(),
        "replay": replay,
        "covers": covers,
        "device": device,
        "expectation": excuse,
    }
    if verdict.status == "failed" and not (own and report.failed and not verdict.measures):
        report.outcome = "failed"
        report.longrepr = "\n".join(filter(None, [verdict.text(), replay and f"replay: {replay}"]))
    elif verdict.status in ("declared", "unmet", "excused"):
        report.outcome = "skipped"
        report.longrepr = (nodeid.partition("::")[0], 0, f"{verdict.status}: {verdict.reason}")


def _judged(nodeid: str, verdict: Verdict, spec: str, device: list[str], run: State) -> tuple[int | None, Verdict]:
    """The verdict after the user's word on it, and which entry of the expectations spoke."""
    if verdict.status in ("declared", "unmet"):
        for word in run.settings.require:
            if word in verdict.reason.replace(",", " ").replace(";", " ").split():
                reason = f"required {word}, but {verdict.status}: {verdict.reason}"
                return None, verdict.with_(status="failed", reason=reason)
        return None, verdict
    names = [spec, *(name for name, s in run.settings.names().items() if s == spec)]
    where = (device[0], device[1]) if device else ("", "")
    for index, entry in enumerate(run.expectations):
        if not entry.matches_id(nodeid) or not entry.applies_to(where, names):
            continue
        if entry.expired:
            if verdict.status == "failed":
                note = f"its excuse expired on {entry.until}: {entry.text()}"
                return index, verdict.with_(diagnosis=(*verdict.diagnosis, note))
        elif verdict.status == "failed":
            return index, verdict.with_(status="excused", reason=entry.text())
        # A pattern cannot fit draws exactly, and a time can lie at its limit: there it excuses, and promises nothing.
        elif verdict.status == "verified" and facts(nodeid, run.settings)["chapter"] not in BY_NAME_ONLY:
            remedy = f"remove the entry {entry.id!r} from the expectations"
            reason = f"expected to fail ({entry.text()}) but verified: {remedy}"
            return index, verdict.with_(status="failed", reason=reason)
        return index, verdict
    return None, verdict


def is_excused(nodeid: str, spec: str, run: State) -> bool:
    """Whether the expectations excuse a failure of this test."""
    return _judged(nodeid, Verdict.failed(""), spec, _device(run), run)[1].status == "excused"


def replay_line(nodeid: str, what: dict[str, Any], run: State) -> str:
    """A line to paste that runs this one case on this one implementation."""
    plain = f"{nodeid.partition('[')[0]}[{what['case']}]" if what["case"] else nodeid
    return f'pytest "{plain}" {run.settings.replay_options(what["implementation"])}'


def gate(item: pytest.Item, run: State) -> None:
    """In setup: end the test as unmet when the machine lacks what its markers ask for."""
    if reason := capability.gap(item, run.settings.device):
        settle(item, Verdict("unmet", reason))


def notice_poison(report: pytest.TestReport, run: State) -> None:
    """After a failure: does the CUDA context still work? If a kernel broke it, later results would say nothing."""
    if run.poisoned or report.when != "call" or not report.failed or not run.has_loaded:
        return
    from . import trial

    run.poisoned = trial.poisoned()


def stop_if_poisoned(item: pytest.Item, run: State) -> None:
    """In teardown, when the failure has been reported: stop the session, or let xdist replace this worker."""
    if not run.poisoned:
        return
    if run.is_worker:
        watchdog.die(item.nodeid, f"{run.poisoned}; the worker was replaced", run)
    item.session.shouldstop = run.poisoned


def teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, Any] | None:
    """The words and letters of what was not judged, and of our cases that setup failed; None leaves them to pytest."""
    status = getattr(report, "flashattn", {}).get("status")
    if status == "failed" and report.when == "setup" and report.nodeid.startswith(f"{ROOT}/"):
        return status, "F", "FAILED"
    if status not in LETTERS or not report.skipped:
        return None
    return status, LETTERS[status], (status.upper(), {"yellow": True})
