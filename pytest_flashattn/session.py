"""The course of a session: configure, start, book each report, conclude. The hooks of plugin.py delegate to here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import capability, collection, fixtures, options, state
from .collection import ROOT
from .performance import lane

if TYPE_CHECKING:
    from .state import State


def configure(config: pytest.Config) -> State:
    """Read the options and take the suite's arguments out of the command line. Raises UsageError for bad ones."""
    for line in capability.MARKERS.values():
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(fixtures, "flashattn-fixtures")
    settings = options.read(config)
    run = state.create(config, collection.select(config, settings), settings)
    if lane.wanted(run.selection):
        config.pluginmanager.register(lane, "flashattn-performance")
    return run


def start(run: State) -> None:
    """Before anything is collected: everything that can be a usage error is one here, not in the middle of the run."""
    if run.is_worker:
        return
    if run.selection:
        if not run.settings.impl and not run.collect_only:
            raise pytest.UsageError(f"the suite needs an implementation; {state.NAME_ONE}")
        collection.validate(run.config)
    if run.selection or run.settings.fuzz:
        from . import fuzz

        fuzz.validate(run.settings, run.selection)
    if run.collect_only:
        return
    if lane.wanted(run.selection):
        lane.validate(run)
    if run.settings.json is not None:
        from .report.json_report import Journal

        run.journal = Journal(run.settings.json)
    try:
        run.load_all()
    except pytest.UsageError:
        if run.journal is not None:
            run.journal.discard()
        raise


def header(run: State) -> list[str]:
    if not run.settings.impl or run.is_worker:
        return []
    from .report import terminal

    return terminal.header(run)


def collected(run: State, items: Sequence[pytest.Item]) -> list[str]:
    if not run.settings.impl or run.collect_only or run.is_worker:
        return []
    from .report import terminal

    return [terminal.machine(run, sum(item.nodeid.startswith(f"{ROOT}/") for item in items))]


def book(run: State, report: pytest.TestReport) -> None:
    """Enter a report in the ledger, and in the journal at once."""
    if not hasattr(report, "flashattn"):
        run.others_passed += report.when == "call" and report.passed
        return
    record = run.ledger.enter(report)
    if record is not None and run.journal is not None:
        run.journal.enter(record)


def prepare_worker(node: Any, run: State) -> None:
    """Tell an xdist worker where to leave its last words."""
    if run.notes is None:
        import tempfile

        folder = tempfile.TemporaryDirectory(prefix="flashattn-")
        run.config.add_cleanup(folder.cleanup)
        run.notes = Path(folder.name)
    node.workerinput["flashattn_notes"] = str(run.notes)


def explain_crash(run: State, nodeid: str, report: pytest.TestReport) -> None:
    """A worker died on a test: by the watchdog's or our hand, with a note, or by the implementation's."""
    from . import outcomes
    from .verdict import Verdict
    from .watchdog import read_note

    note = read_note(run.notes, nodeid)
    if note is None and not nodeid.startswith(f"{ROOT}/"):
        return  # a user's own test: pytest-xdist's own words on it suffice
    verdict = Verdict.failed(note or f"the process died while it ran this case ({report.longrepr})")
    own = not nodeid.startswith(f"{ROOT}/")
    outcomes.finish(nodeid, verdict, report, run, covers=[], own=own, device=run.ledger.device)


def conclude(run: State, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """At the end, however it came: audit, exit status, JSON. Only ever turns a 0 into a 1."""
    ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    run.finished = exitstatus in ended and not session.shouldstop and not session.shouldfail
    if run.collect_only or run.idle:
        return
    run.ledger.audit(run, finished=run.finished)
    judged = run.ledger.touched or (run.selection and run.settings.impl)
    conformant = all(line.ok for line in run.ledger.closing(run, finished=run.finished))
    if judged and not conformant and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if run.journal is not None:
        from .report.json_report import document

        run.journal.finish(document(run, run.ledger, finished=run.finished))


def summarise(run: State, reporter: pytest.TerminalReporter) -> None:
    if run.idle or run.collect_only:
        return
    from .report import terminal

    terminal.summary(reporter, run, run.ledger)


def say_closing(run: State) -> None:
    """The last line. A session that had nothing to do with us gets none."""
    reporter = run.config.pluginmanager.getplugin("terminalreporter")
    if run.idle or run.collect_only or reporter is None:
        return
    if not run.ledger.touched and not run.settings.impl:
        return
    from .report import terminal

    terminal.closing(reporter, run.ledger.closing(run, finished=run.finished))
