"""The faults that exist on a GPU only (tests/mutants/gpu): which the suite fails, and the right kernels that it passes.

python measurements/gpu_lane.py --out measurements/h200/gpu-lane.json
python measurements/gpu_lane.py --out measurements/h200/gpu-lane.json --only device0_launch      those again
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from plugin import by_name

LANE = Path(__file__).resolve().parents[1] / "tests" / "mutants" / "gpu"


class Recorder:
    """A plugin that keeps what became of each test."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test; a skip is one of its setup or call, and has its reason."""
        name = report.nodeid.rpartition("::")[2]
        test = self.tests.setdefault(name, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 1)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            test["reason"] = report.longrepr[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--workers", type=int, default=4, help="processes side by side (pytest-xdist)")
    parser.add_argument(
        "--only", default="", help="tests with this in their name, whose results replace those in the file"
    )
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; the lane runs on one")
    recorder, began = Recorder(), time.monotonic()
    plugins = [*by_name(), "-p", "no:benchmark", "-p", "no:cacheprovider"]
    status = pytest.main([str(LANE), *plugins, "-q", "-n", str(asked.workers), "-k", asked.only], plugins=[recorder])
    before = json.loads(asked.out.read_text(encoding="utf-8"))["tests"] if asked.only and asked.out.is_file() else {}
    report = {
        "command": "python measurements/gpu_lane.py",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "seconds": round(time.monotonic() - began, 1),
        "tests": dict(sorted((before | recorder.tests).items())),
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
