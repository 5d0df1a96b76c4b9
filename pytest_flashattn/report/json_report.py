"""The JSON file of `--flashattn-json`: the source of every other report, schema 1.

A journal beside it, PATH.partial, gets each result as it comes, so that not even a crash of the process loses one. The
file itself appears in one step when the run ends, however it ends, and the journal goes.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest

if TYPE_CHECKING:
    from ..ledger import Ledger, Record
    from ..state import State

SCHEMA = 1
INTERNAL = ("suite", "covers", "device", "expectation", "extra")
MEASURED = ("performance", "growth")
"""What chapter performance has on top of a verdict: the samples and what was made of them."""


class Journal:
    """Opened before the first test. Raises UsageError when PATH cannot be written: then, not after the run."""

    def __init__(self, path: Path) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        try:
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a folder")
            self._file: TextIO = self.partial.open("w", encoding="utf-8")
        except OSError as error:
            raise pytest.UsageError(f"--flashattn-json: cannot write {path}: {error.strerror or error}") from None

    def enter(self, record: Record) -> None:
        self._file.write(json.dumps(_public(record)) + "\n")
        self._file.flush()

    def discard(self) -> None:
        """The run never began."""
        self._file.close()
        self.partial.unlink(missing_ok=True)

    def finish(self, document: dict[str, Any]) -> None:
        self._file.close()
        # In the folder of the target, for os.replace is atomic within one file system only.
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)
        self.partial.unlink(missing_ok=True)


def document(run: State, ledger: Ledger, *, finished: bool) -> dict[str, Any]:
    """The whole report. complete: false when the run was cut short; problems: what no single test can say."""
    s = run.settings
    device = ledger.device or ["cpu", "unknown", "unknown"]
    return {
        "schema": SCHEMA,
        "complete": finished,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": {"device": device[2], "kind": device[0], "gpu": device[1] if device[0] == "cuda" else None,
                    "platform": platform.platform()},
        "settings": {"matrix": s.matrix, "fuzz": s.fuzz, "seed": s.seed, "device": s.device,
                     "require": list(s.require)},
        "implementations": [_implementation(run, name, spec) for name, spec in s.names().items()],
        "totals": ledger.totals(),
        "problems": ledger.problems,
        "results": [_public(record) for record in ledger.records.values()],
    }  # fmt: skip


def _implementation(run: State, name: str, spec: str) -> dict[str, Any]:
    loaded = run.implementation(name)
    return {
        "spec": spec,
        "name": name,
        "convention": loaded.convention.name,
        "features": sorted(loaded.support.features),
        "dtypes": sorted(loaded.support.dtypes),
    }


def _public(record: Record) -> Record:
    measured = {key: record["extra"][key] for key in MEASURED if key in record.get("extra", {})}
    return {key: value for key, value in record.items() if key not in INTERNAL} | measured


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Of what shapes a result, read off the installed packages: nothing is imported for it."""
    found = {"python": platform.python_version()}
    for name in ("pytest-flashattn", "pytest", "torch", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
