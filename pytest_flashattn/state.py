"""What one run holds: settings, selection, expectations, loaded implementations. One object on the config's stash.

Nothing here is global: `pytester` runs several sessions in one process.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from . import capability, expectations, options
from .collection import Selection

if TYPE_CHECKING:
    from pathlib import Path

    from .implementation import Implementation
    from .ledger import Ledger
    from .report.json_report import Journal

NAME_ONE = "no implementation is named: give --flashattn-impl=module:attribute, or flashattn_impl in the ini file"


@dataclass
class State:
    """One run.

    notes: a folder in which dying xdist workers leave their last words for the controller. poisoned: why the CUDA
    context is broken. finished: false when the run was cut short. others_passed: tests that do not use us.
    """

    config: pytest.Config
    settings: options.Settings
    selection: Selection
    expectations: tuple[expectations.Expectation, ...]
    notes: Path | None = None
    poisoned: str | None = None
    journal: Journal | None = None
    finished: bool = True
    others_passed: int = 0
    _ledger: Ledger | None = None
    _loaded: dict[str, Implementation] = field(default_factory=dict)

    @property
    def ledger(self) -> Ledger:
        """The controller's book, opened when there is something to enter: other sessions do not pay for it."""
        if self._ledger is None:
            from .ledger import Ledger

            self._ledger = Ledger()
        return self._ledger

    @property
    def idle(self) -> bool:
        """Whether this process has nothing to conclude: an xdist worker, or a session that is none of our business."""
        return self.is_worker or (self._ledger is None and not self.settings.impl and not self.selection)

    @property
    def is_worker(self) -> bool:
        return hasattr(self.config, "workerinput")

    @property
    def is_controller(self) -> bool:
        """Whether this process only distributes tests to xdist workers, and so must leave the GPU alone."""
        return self.config.pluginmanager.hasplugin("dsession")

    @property
    def collect_only(self) -> bool:
        return bool(self.config.getoption("collectonly"))

    @property
    def has_loaded(self) -> bool:
        """Whether an implementation has been imported, and torch with it."""
        return bool(self._loaded)

    def implementation(self, name: str) -> Implementation:
        """The implementation of this short name, loaded once. Raises ValueError with one sentence if it cannot be."""
        if name not in self._loaded:
            self.make_importable()
            with warnings.catch_warnings():
                # torch warns at its import (without numpy, say): under -W error that would end the session.
                warnings.simplefilter("ignore")
                from . import implementation

            if self.is_worker:
                _share_cores(self.config)

            s = self.settings
            spec = s.names()[name]
            self._loaded[name] = implementation.load(spec, convention=s.convention, support=s.support, device=s.device)
        return self._loaded[name]

    def make_importable(self) -> None:
        """Put the current folder on the path: `python -m pytest` does so and `pytest` does not, but a kernel usually
        lies there.
        """
        # Last, so that it shadows nothing.
        here = os.fspath(self.config.invocation_params.dir)
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)

    def load_all(self) -> None:
        """Load every implementation. Raises UsageError, one sentence, for the first that cannot be."""
        try:
            capability.check_device(self.settings.device)
            for name in self.settings.names():
                self.implementation(name)
        except ValueError as error:  # UnknownImplementation is one
            raise pytest.UsageError(" ".join(str(error).split())) from None

    def device(self) -> capability.Device | None:
        """The device under the tests, or None as long as nothing has needed torch (or in an xdist controller)."""
        if self.is_controller or ("torch" not in sys.modules and not self._loaded):
            return None
        return capability.probe(self.settings.device)


STATE = pytest.StashKey[State]()


def of(config: pytest.Config) -> State:
    return config.stash[STATE]


def create(config: pytest.Config, selection: Selection, settings: options.Settings) -> State:
    """The state of this run; reads the expectations file. Raises UsageError for a file that cannot be used."""
    entries = expectations.load(expectations.find(settings.expect, config.rootpath))
    state = State(config, settings, selection, entries)
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if "flashattn_notes" in worker:
        from pathlib import Path

        state.notes = Path(worker["flashattn_notes"])
    config.stash[STATE] = state
    return state


def _share_cores(config: pytest.Config) -> None:
    # Each worker would start as many threads as there are cores; together they are many times slower than one.
    import torch

    workers = int(config.workerinput["workercount"])  # type: ignore[attr-defined]
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // workers)))
