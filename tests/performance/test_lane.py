"""The lane as pytest runs it: what is collected, measured, stored, refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

# pytester drops the modules that a run imports: what the outer process holds already is not imported again each time.
import pytest_flashattn.checks.performance
import pytest_flashattn.ledger
import pytest_flashattn.report.terminal
import pytest_flashattn.trial  # noqa: F401

HERE, REPO = Path(__file__).parent, Path(__file__).parents[2]
LOAD = (
    []
    if any(e.name == "flashattn" for e in metadata.entry_points(group="pytest11"))
    else ["-p", "pytest_flashattn.plugin"]
)
CHAPTER = "flashattn-suite/performance"
CASE = "bf16-b1-h2-q64-k64-d32"
HONEST = "--flashattn-impl=cheats:honest"
QUICK = ("--benchmark-max-time=0.001", "--benchmark-quiet", "--flashattn-device=cpu", "-p", "no:cacheprovider")
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(…options)`: pytest in an empty folder; process=True: in a process of its own."""
    paths = [str(HERE), str(REPO), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str, process: bool = False) -> pytest.RunResult:
        start = pytester.runpytest_subprocess if process else pytester.runpytest_inprocess
        return start(*LOAD, *QUICK, *args)

    return run


def usage_error(result: pytest.RunResult) -> str:
    assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stdout.str() + result.stderr.str()
    return next(line for line in result.errlines if line.startswith("ERROR: ")).removeprefix("ERROR: ")


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_the_chapter_runs_only_when_asked_for(run: Run) -> None:
    listed = run("--collect-only", "-q", HONEST, "--flashattn-matrix=smoke").stdout.str()
    assert "flashattn-suite/forward::" in listed
    assert CHAPTER not in listed
    assert f"{CHAPTER}::test_backward[" in run("--collect-only", "-q", HONEST, CHAPTER).stdout.str()


def test_what_is_measured_is_shown_and_stored(run: Run, pytester: pytest.Pytester) -> None:
    ids = [f"{CHAPTER}::test_{direction}[{CASE}]" for direction in ("forward", "backward", "forward_backward")]
    result = run(*ids, HONEST, "--benchmark-json=b.json", "--flashattn-json=f.json", "--flashattn-thresholds=lax.toml")
    assert "cannot read" in usage_error(result)
    (pytester.path / "lax.toml").write_text('[[ratio]]\nat_most = 1000\nwhy = "anything"\n')
    result = run(*ids, HONEST, "--benchmark-json=b.json", "--flashattn-json=f.json", "--flashattn-thresholds=lax.toml")
    assert result.ret == 0, result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "CPU: wall clock, which says nothing of a GPU; medians; baseline: reference_kernels.naive:naive_attention",
            f"forward  *{CASE} *verified",
            f"forward+backward *{CASE} *verified",
        ]
    )
    document = load(pytester.path / "b.json")
    assert document["machine_info"]["flashattn"]["device"] == "CPU"
    assert [b["fullname"] for b in document["benchmarks"]] == ids
    forward, backward, both = document["benchmarks"]
    info, stats = forward["extra_info"], forward["stats"]
    assert stats["rounds"] == 15
    assert stats["median"] == pytest.approx(info["seconds"][0], rel=1e-6)
    assert info["tflops"] * stats["median"] == pytest.approx(1e-12 * 4 * 2 * 64 * 64 * 32, rel=1e-6)
    assert backward["extra_info"]["tflops"] * backward["stats"]["median"] == pytest.approx(
        2.5 * info["tflops"] * stats["median"], rel=1e-6
    )
    assert both["group"] == "forward_backward"
    assert info["ratio"][1] <= info["ratio"][0] <= info["ratio"][2]
    assert (info["clock"], info["ratio_limit"], info["peak_memory"]) == ("wall", 1000, None)
    results = load(pytester.path / "f.json")["results"]
    assert [r["status"] for r in results] == ["verified"] * 3
    assert results[0]["performance"]["samples"] == pytest.approx(stats["data"])

    compared = pytester.run(
        sys.executable, "-m", "pytest_flashattn", "compare", "b.json", "b.json", "--fail-on=1000000%"
    )
    assert compared.ret == 0
    compared.stdout.fnmatch_lines(["*3 same*"])


def test_too_slow_fails_and_is_stored(run: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "strict.toml").write_text('[[floor]]\nat_least = 1e6\nwhy = "no CPU does that"\n')
    node = f"{CHAPTER}::test_forward[{CASE}]"
    result = run(node, HONEST, "--flashattn-thresholds=strict.toml", "--benchmark-json=b.json")
    assert result.ret == 1
    result.stdout.re_match_lines([r".*too slow: \S+ \[\S+, \S+\] TFLOP/s, at least 1e\+06 asked for"])
    result.stdout.fnmatch_lines(["replay: *--flashattn-thresholds=strict.toml"])
    assert load(pytester.path / "b.json")["benchmarks"][0]["extra_info"]["floor"] == 1e6


def test_several_implementations_side_by_side(run: Run) -> None:
    node = f"{CHAPTER}::test_forward[{CASE}]"
    result = run(
        node, HONEST, "--flashattn-impl=reference_kernels.naive:naive_attention", "--flashattn-baseline=cheats:honest"
    )
    result.stdout.fnmatch_lines(["*baseline: cheats:honest"])
    result.stdout.re_match_lines(
        [r"TFLOP/s +case +honest +naive_attention +baseline", rf"forward +{CASE}( +\d[\d.e-]+){{3}}"]
    )


def test_a_wrong_result_has_no_time(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine="import cheats\nattn = cheats.CachedByAddress()\n")
    result = run(f"{CHAPTER}::test_forward[{CASE}]", "--flashattn-impl=mine:attn", "--flashattn-json=f.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["what it returned while it was timed is wrong (round *)", "o: * elements beyond the bound*"]
    )
    failed = load(pytester.path / "f.json")["results"][0]
    assert failed["status"] == "failed"
    assert "performance" not in failed


def test_a_clock_replaced_at_import_is_noticed(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine="import cheats\ncheats.patch_clocks()\nattn = cheats.honest\n")
    result = run(f"{CHAPTER}::test_forward[{CASE}]", "--flashattn-impl=mine:attn", process=True)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["replaced time.perf_counter, torch.cuda.Event.elapsed_time: *"])


def test_under_xdist_nothing_is_measured(run: Run) -> None:
    result = run(f"{CHAPTER}::test_forward[{CASE}]", HONEST, "-n1", process=True)
    assert result.ret == 1
    closing = "not judged: nothing was verified: not measured: several processes share the machine (pytest-xdist); run"
    result.stdout.fnmatch_lines([f"{closing} it by itself: pytest flashattn-suite/performance -n0, *"])


def test_benchmarks_switched_off(run: Run) -> None:
    result = run(f"{CHAPTER}::test_forward[{CASE}]", HONEST, "--benchmark-disable")
    assert result.ret == 1
    assert "not measured: --benchmark-disable was given" in result.outlines[-1]


def test_without_pytest_benchmark(pytester: pytest.Pytester, run: Run) -> None:
    result = pytester.runpytest_inprocess(*LOAD, "-p", "no:benchmark", CHAPTER, HONEST)
    assert "needs pytest-benchmark, which is not installed or switched off: pip install" in usage_error(result)


def test_a_baseline_that_is_not_there(run: Run) -> None:
    result = run(CHAPTER, HONEST, "--flashattn-baseline=cheats:honets")
    assert usage_error(result) == "--flashattn-baseline: cheats has no attribute 'honets'; did you mean honest?"


def test_what_a_cpu_cannot_do_in_time_is_unmet(run: Run) -> None:
    result = run(f"{CHAPTER}::test_forward[bf16-b32-h32-q512-k512-d64]", HONEST)
    assert result.ret == 1
    assert "too long for a CPU: 69 GFLOP a call" in result.outlines[-1]


def test_another_machine_is_refused(run: Run, pytester: pytest.Pytester) -> None:
    node = f"{CHAPTER}::test_forward[{CASE}]"
    run(node, HONEST, "--benchmark-save=first")
    stored = next((pytester.path / ".benchmarks").rglob("*.json"))
    assert run(node, HONEST, "--benchmark-compare").ret in (0, 1)
    stored.write_text(stored.read_text().replace('"device": "CPU"', '"device": "NVIDIA H200"'))
    result = run(node, HONEST, "--benchmark-compare")
    assert "--benchmark-compare: not the same machine: device 'NVIDIA H200' against 'CPU'" in usage_error(result)
