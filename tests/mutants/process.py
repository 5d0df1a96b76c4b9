"""The suite in a process of its own: for implementations that hang, crash, or search this process's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
_INSTALLED = any(entry.name == "flashattn" for entry in metadata.entry_points(group="pytest11"))


@dataclass(frozen=True)
class Run:
    """Exit status, the results of the JSON report, and all that was printed."""

    status: int
    results: list[dict[str, Any]]
    text: str

    def of(self, status: str) -> list[dict[str, Any]]:
        return [result for result in self.results if result["status"] == status]


def run_suite(spec: str, *args: str, folder: Path, seconds: float = 300) -> Run:
    """`pytest ARGS --flashattn-impl=SPEC` in `folder`, which holds no configuration; `mutants.…` can be imported there.

    Raises subprocess.TimeoutExpired after `seconds`: then not even the plugin's own watchdog has ended it.
    """
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    plugin = [] if _INSTALLED else ["-p", "pytest_flashattn.plugin"]
    own = [f"--flashattn-impl={spec}", f"--flashattn-json={report}", "-p", "no:cacheprovider"]
    # mutants.X, not tests.mutants.X: `tests` is no package of ours, and another's may be installed.
    path = os.pathsep.join(filter(None, [str(REPO), str(REPO / "tests"), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *own, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        timeout=seconds,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    found = json.loads(report.read_text(encoding="utf-8"))["results"] if report.is_file() else []
    return Run(done.returncode, found, done.stdout)
