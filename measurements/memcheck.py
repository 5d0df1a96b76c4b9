"""The smoke matrix under compute-sanitizer's memcheck, one process a chapter: does a kernel touch what is not its own?

    python measurements/memcheck.py --impl reference_kernels:flash_attention --out measurements/h200/memcheck.json

Every tensor gets an allocation of its own (PyTorch's caching allocator would hide an access beyond its end). Exits with
1 if an error was found or a chapter did not come to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pytest_flashattn.chapters import CHAPTERS


def chapter(name: str, implementation: str, limit: float) -> dict[str, Any]:
    """Run one chapter; its verdicts and the sanitizer's count of errors (None: it did not come to its end)."""
    environment = os.environ | {"PYTHONPATH": sys.path[0], "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "application-only", sys.executable]
    command += ["-m", "pytest", "-p", "pytest_flashattn.plugin", "-p", "no:cacheprovider", f"flashattn-suite/{name}"]
    command += [f"--flashattn-impl={implementation}", "--flashattn-matrix=smoke"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit)
            output = done.stdout
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else ""
    errors = re.search(r"ERROR SUMMARY: (\d+) error", output)
    verdict = re.findall(r"^(?:not )?conformant.*$", output, re.M)
    row = {"chapter": name, "errors": int(errors[1]) if errors else None, "verdict": verdict[-1] if verdict else ""}
    print(f"{name:12s} errors {row['errors']}  {row['verdict']}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", required=True, help="module:attribute")
    parser.add_argument("--limit", type=float, default=240, help="seconds a chapter may take")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    names = [name for name in CHAPTERS if name != "performance"]
    with ThreadPoolExecutor(max_workers=6) as pool:
        rows = list(pool.map(lambda name: chapter(name, arguments.impl, arguments.limit), names))
    report = {
        "command": f"python measurements/memcheck.py --impl {arguments.impl}",
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "chapters": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["errors"] == 0 for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
