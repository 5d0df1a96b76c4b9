"""Runs Python under Triton's interpreter: it is chosen when Triton is imported, so that takes a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, interpret: bool = True, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """`python *arguments` at the root of the repository, on one thread and without a GPU."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def check(code: str, *, interpret: bool = True) -> str:
    """Run code that asserts; what it printed. A failure shows the whole traceback."""
    with tempfile.TemporaryDirectory() as folder:  # Triton reads the source of a kernel from its file
        script = Path(folder) / "checked.py"
        script.write_text(code)
        result = python(str(script), interpret=interpret)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
