"""Put the performance lane itself on trial on a GPU; one JSON file, to which each run of a part adds.

    python measurements/performance.py --out measurements/h200/performance.json --only lane      (three times, say)
    python measurements/performance.py --out measurements/h200/performance.json --only compare,table,memory

lane       chapter performance on 24 points, forward and backward, as a user runs it, compilation included: seconds of
           the whole run, ratio to the bundled kernel at each point, and how far the runs so far differ in it
compare    20 comparisons of an implementation with its run before, and 20 of one that takes 10 % longer with that, by
           the command `compare --fail-on=5%`: how often it says "slower"
table      PyTorch's backends, flex_attention and the bundled kernels side by side, by one command
memory     peak memory of the definition and of the bundled kernels over N (`python -m pytest_flashattn memory`)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "performance"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cheats import Slower
from performance_tables import spread
from plugin import by_name

from pytest_flashattn import matrices, trial
from pytest_flashattn.__main__ import main as command
from pytest_flashattn.cases import Case
from pytest_flashattn.implementation import Implementation, load
from pytest_flashattn.performance import machine
from pytest_flashattn.performance.lane import KEPT
from pytest_flashattn.performance.plan import Plan, in_force

ROOT = Path(__file__).resolve().parents[1]
CHAPTER = "flashattn-suite/performance"
BUNDLED = "reference_kernels:flash_attention"
SIDE_BY_SIDE = (*(f"pytest_flashattn.peers:{name}" for name in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn",
                                                                "flex_compiled")), BUNDLED)  # fmt: skip
COMPARED = ("bf16-b2-h16-q2048-k2048-d128-causal",)
TABLE_LENGTHS = (1024, 4096, 16384)
TIMES, SLOWDOWN, LIMIT = 20, 0.10, "5%"


def grid() -> list[Case]:
    """The 24 points: 16k tokens, hidden 2048."""
    cases = matrices.cases_for("performance", "forward", "default", 0)
    return [case for case in cases if case.batch * case.q == 16384 and case.heads * case.d == 2048]


def nodes(cases: list[Case], directions: tuple[str, ...] = ("forward", "backward")) -> list[str]:
    return [f"{CHAPTER}::test_{direction}[{case.id}]" for direction in directions for case in cases]


def suite(folder: Path, *args: str) -> tuple[dict[str, Any], float, str]:
    """A run of the lane, with empty caches of compiled kernels: its JSON, its wall seconds, what it printed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    own = ["-p", "no:cacheprovider", "--benchmark-quiet", "--flashattn-json=lane.json", "--flashattn-timeout=0"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *by_name(), *own, *args],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    path = folder / "lane.json"
    if not path.is_file():
        raise SystemExit(f"the lane wrote no report:\n{done.stdout[-3000:]}")
    return json.loads(path.read_text(encoding="utf-8")), seconds, done.stdout


def rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What each test measured, without its samples."""
    found = []
    for result in document["results"]:
        row = {"check": result["check"], "case": result["case"], "status": result["status"], "reason": result["reason"]}
        row["implementation"] = result["implementation"]
        row |= {key: result["performance"][key] for key in KEPT if key in result.get("performance", {})}
        found.append(row)
    return found


def lane(before: list[dict[str, Any]] | None, cases: list[Case], spec: str) -> list[dict[str, Any]]:
    """One more run of the lane, after those of `before`."""
    with tempfile.TemporaryDirectory() as folder:
        document, seconds, text = suite(Path(folder), *nodes(cases), f"--flashattn-impl={spec}")
    print(text[text.find("= flashattn =") :], flush=True)
    run = {"implementation": spec, "seconds": round(seconds, 1), "totals": document["totals"], "rows": rows(document)}
    runs = [*(before or []), run]
    print(f"lane: {seconds:.0f} s; spread of the ratio: {spread(runs)}", flush=True)
    return runs


def compare(cases: list[Case], spec: str) -> dict[str, Any]:
    """How often the command says "slower" of the same implementation, and of one that takes 10 % longer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    honest = load(spec, device=device)
    slower = load(Slower(SLOWDOWN, honest.function), support=honest.support, device=device)
    plan = Plan(baseline=None if spec != BUNDLED else "pytest_flashattn.peers:sdpa_flash")
    found: dict[str, Any] = {label: {"exits": [], "verdicts": [], "percent": []} for label in ("same", "slower")}
    with tempfile.TemporaryDirectory() as name, in_force(plan):
        old = Path(name) / "honest-0.json"
        write(old, honest, cases)
        for number in range(TIMES):
            files = {"same": Path(name) / f"honest-{number + 1}.json", "slower": Path(name) / f"slower-{number}.json"}
            for label, subject in (("same", honest), ("slower", slower)):
                write(files[label], subject, cases)
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    status = command(["compare", str(old), str(files[label]), f"--fail-on={LIMIT}"])
                lines = [
                    line.strip("| ").split("|")
                    for line in printed.getvalue().splitlines()
                    if line.startswith("| ") and "[" in line
                ]
                found[label]["exits"].append(status)
                found[label]["verdicts"] += [line[-1].strip() for line in lines]
                found[label]["percent"] += [float(line[-3].strip().rstrip("%")) for line in lines]
            old = files["same"]
            said = {label: dict(Counter(of["verdicts"])) for label, of in found.items()}
            print(f"compare {number + 1}/{TIMES}: {said}", flush=True)
    about = {"implementation": spec, "baseline": plan.baseline or "bundled", "cases": [case.id for case in cases]}
    return {**about, "comparisons": TIMES, "limit": LIMIT, "slowdown": SLOWDOWN, **found}


def write(path: Path, implementation: Implementation, cases: list[Case]) -> None:
    """A file as pytest-benchmark writes it, of the forward of `cases`."""
    benchmarks = []
    for case in cases:
        verdict = trial.run_check("performance.forward", implementation, case, diagnose=False)
        found = verdict.extra.get("performance")
        if found is None:
            raise SystemExit(f"{case.id}: {verdict.status}: {verdict.text() or verdict.reason}")
        info = {key: found[key] for key in KEPT if key in found}
        benchmarks.append({"fullname": f"{CHAPTER}::test_forward[{case.id}]", "extra_info": info})
    machine_info = {machine.SECTION: machine.describe("auto")}
    path.write_text(json.dumps({"machine_info": machine_info, "benchmarks": benchmarks}), encoding="utf-8")


def table(cases: list[Case], specs: tuple[str, ...]) -> dict[str, Any]:
    """One command, several implementations."""
    wanted = [case for case in cases if case.q in TABLE_LENGTHS] or cases
    options = [f"--flashattn-impl={spec}" for spec in specs]
    with tempfile.TemporaryDirectory() as folder:
        document, seconds, text = suite(Path(folder), *nodes(wanted), *options)
    print(text[text.find("= flashattn =") :], flush=True)
    return {"implementations": list(specs), "seconds": round(seconds, 1), "rows": rows(document)}


def memory() -> list[str]:
    """The lines of the command's table."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command(["memory"])
    print(printed.getvalue(), flush=True)
    return printed.getvalue().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--only", default="lane,compare,table,memory", help="parts, separated by commas")
    parser.add_argument("--impl", default="pytest_flashattn.peers:sdpa_flash", help="of lane and compare")
    parser.add_argument(
        "--small", action="store_true", help="cases that a CPU can do: proves that the script works, measures nothing"
    )
    arguments = parser.parse_args()
    if not (torch.cuda.is_available() or arguments.small):
        parser.error("this machine has no CUDA device; every part measures one")
    cases = matrices.cases_for("performance", "forward", "smoke", 0)[:2] if arguments.small else grid()
    compared = cases if arguments.small else [Case.parse(text) for text in COMPARED]
    specs = (arguments.impl, "reference_kernels.naive:naive_attention") if arguments.small else SIDE_BY_SIDE
    out: Path = arguments.out
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    report |= {"date": date.today().isoformat(), "machine": machine.describe("auto")}
    parts: dict[str, Callable[[], Any]] = {
        "lane": lambda: lane(report.get("lane"), cases, arguments.impl),
        "compare": lambda: compare(compared, arguments.impl),
        "table": lambda: table(cases, specs),
        "memory": memory,
    }
    for name in arguments.only.split(","):
        if name not in parts:
            parser.error(f"no part {name!r}; parts: {', '.join(parts)}")
        report[name] = parts[name]()
        report.setdefault("commands", {})[name] = f"python measurements/performance.py --only {name}"
        if name == "lane":
            report["spread"] = spread(report["lane"])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")  # a later part may not end


if __name__ == "__main__":
    main()
