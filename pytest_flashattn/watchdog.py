"""A case that does not return. A native call cannot be interrupted, so the process ends, after saving what it knows.

Alone, the process books the case as failed, writes every report and ends with status 1. An xdist worker leaves a note
and dies; xdist replaces it, and the controller books the case as failed with the note as its reason.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .state import State

GRACE = 20.0
"""Seconds the reports of other plugins may take once the process is doomed."""


_deadline = math.inf


def remaining() -> float:
    """Seconds until the running test counts as a hang; infinite without a limit."""
    return _deadline - time.monotonic()


class Watchdog:
    """Watches one test at a time; a kernel that holds the GIL for ever is beyond it."""

    def __init__(self, item: pytest.Item, run: State) -> None:
        self.item, self.run = item, run
        self._lock = threading.Lock()
        self._over = False
        seconds = 0.0 if run.config.getoption("usepdb") else run.settings.timeout
        self._timer = threading.Timer(seconds, self._bark) if seconds else None

    def __enter__(self) -> None:
        global _deadline
        self._main = threading.get_ident()
        if self._timer is not None:
            _deadline = time.monotonic() + self._timer.interval
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        global _deadline
        _deadline = math.inf
        with self._lock:  # either the test is over or the watchdog has barked, never both
            self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _bark(self) -> None:
        with self._lock:
            if self._over:
                return
            where = _innermost(self._main)
            limit = f"{self.run.settings.timeout:g} s"
            reason = f"did not return within {limit}: a hang, or --flashattn-timeout is too short{where}"
            if self.run.is_worker:
                die(self.item.nodeid, reason, self.run)
            _end_session(self.item, reason, self.run)


def die(nodeid: str, reason: str, run: State) -> None:
    """End this xdist worker; the controller finds `reason` under the node id."""
    if run.notes is not None:
        (run.notes / _key(nodeid)).write_text(reason, encoding="utf-8")
    os._exit(1)


def read_note(notes: Path | None, nodeid: str) -> str | None:
    """The last words of a worker that died on this test, if it left any."""
    path = notes / _key(nodeid) if notes is not None else None
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else None


def _key(nodeid: str) -> str:
    return hashlib.sha256(nodeid.encode()).hexdigest()[:32]


def _innermost(thread: int) -> str:
    """Where the hanging thread is, as the end of a sentence: its innermost frame of Python."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else None
    return f" (in {stack[-1].name}, {os.path.basename(stack[-1].filename)}:{stack[-1].lineno})" if stack else ""


def _end_session(item: pytest.Item, reason: str, run: State) -> None:
    from . import outcomes
    from .verdict import Verdict

    last_resort = threading.Timer(GRACE, os._exit, [1])
    last_resort.daemon = True
    last_resort.start()
    manager = item.config.pluginmanager
    if (capture := manager.getplugin("capturemanager")) is not None:
        capture.suspend_global_capture(in_=True)
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
    outcomes.finish(item.nodeid, Verdict.failed(reason), report, run, covers=[], own=not outcomes.is_suite(item))
    session = item.session
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    session.shouldstop = "a case did not return: the process ends here, for a native call cannot be interrupted"
    try:
        item.ihook.pytest_runtest_logreport(report=report)
        # Not the runner's: it would tear fixtures down under the feet of the call that hangs.
        runner = [plugin for plugin in [manager.getplugin("runner")] if plugin is not None]
        finish = manager.subset_hook_caller("pytest_sessionfinish", remove_plugins=runner)
        finish(session=session, exitstatus=session.exitstatus)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)
