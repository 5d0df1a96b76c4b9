"""Processes: hangs, crashes, xdist workers, start-up. Every test here costs a process or two."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from conftest import LOAD, Run, error, last_line, load_json

CAUSAL = "flashattn-suite/causal::test_matches_oracle"


def test_hang_ends_the_process_with_reports(pytester: pytest.Pytester, trial: Run) -> None:
    args = [
        "--flashattn-timeout=0.3",
        "--flashattn-json=out.json",
        "--junitxml=out.xml",
        "flashattn-suite/forward",
        CAUSAL,
    ]
    result = trial("hangs", *args, process=True)
    assert result.ret == 1
    assert last_line(result).startswith("not conformant: 1 failed, ")
    result.stdout.fnmatch_lines(["did not return within 0.3 s: a hang*(in run_check, fakes.py:*)", "replay: pytest *"])
    out = load_json(pytester.path / "out.json")
    assert not out["complete"]
    assert out["totals"]["failed"] == 1
    assert out["totals"]["verified"] > 0
    assert 'failures="1"' in (pytester.path / "out.xml").read_text()


def test_hang_in_a_worker(pytester: pytest.Pytester, trial: Run) -> None:
    nodes = [line for line in trial("good", CAUSAL, "--collect-only", "-q").outlines if "::" in line][:2]
    others = "flashattn-suite/lse::test_matches_oracle"
    args = ["-n1", "--flashattn-timeout=0.3", "--flashattn-json=out.json", nodes[0], others]
    result = trial("hangs", *args, process=True)
    assert result.ret == 1
    out = load_json(pytester.path / "out.json")
    assert out["totals"]["failed"] >= 1
    assert out["totals"]["verified"] >= 1
    failed = next(r for r in out["results"] if r["status"] == "failed")
    assert failed["reason"].startswith("did not return within 0.3 s")
    result.stdout.no_fnmatch_line("*Traceback*")


def test_crash_in_a_worker(pytester: pytest.Pytester, trial: Run) -> None:
    args = ["-n1", "--flashattn-json=out.json", "flashattn-suite/numerics::test_one_key", CAUSAL, "-k", "one_key or b1"]
    result = trial("crashes", *args, process=True)
    assert result.ret == 1
    out = load_json(pytester.path / "out.json")
    assert out["totals"]["verified"] == 1
    failed = next(r for r in out["results"] if r["status"] == "failed")
    assert failed["reason"].startswith("the process died while it ran this case (worker 'gw0' crashed")
    assert failed["replay"]


def test_crash_can_be_excused(pytester: pytest.Pytester, trial: Run) -> None:
    (pytester.path / "flashattn-expect.toml").write_text('[[expect]]\nid = "*causal*"\nreason = "segfault, #1"')
    args = ["-n1", "flashattn-suite/numerics::test_one_key", f"{CAUSAL}[bf16-b1-h2-q128-k128-d64-causal]"]
    result = trial("crashes", *args, process=True)
    assert result.ret == 0, result.stdout.str()


def test_failure_to_load_in_a_worker(trial: Run) -> None:
    result = trial("workerless", "-n1", "flashattn-suite/lse::test_matches_oracle", process=True)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*--flashattn-impl=kern:workerless: there is no module 'kern'*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_selection_error_under_xdist(trial: Run) -> None:
    assert "nearest: flashattn-suite/lse" in error(trial("good", "-n1", "flashattn-suite/lsee", process=True))


def test_listing_imports_no_torch_and_no_implementation(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import sys
        def pytest_unconfigure(): print('TORCH', 'torch' in sys.modules, 'kern' in sys.modules)
        """
    )
    pytester.makepyfile(kern="def attn(q, k, v): pass", test_a="def test_a(): pass")
    for args in (["--flashattn-impl=kern:attn", "--collect-only", "-q"], ["test_a.py"], ["--help"]):
        result = pytester.runpytest_subprocess(*LOAD, *args, "-p", "no:cacheprovider")
        result.stdout.fnmatch_lines(["*TORCH False False"])


IMPORT = """
import pytest, sys, time
start = time.perf_counter()
import pytest_flashattn.plugin
print(time.perf_counter() - start, *sys.modules)
"""


def test_import_is_cheap() -> None:
    seconds, names = [], ""
    for _ in range(3):
        first, names = subprocess.check_output([sys.executable, "-c", IMPORT], text=True).split(maxsplit=1)
        seconds.append(float(first))
    assert min(seconds) < 0.015
    assert not {"torch", "numpy", "tabulate", "triton"} & set(names.split())


def test_real_implementation(pytester: pytest.Pytester, bare: Run) -> None:
    """Nothing faked: an eager kernel found in the current folder, verified; the same without its mask, failed."""
    pytester.makepyfile(
        kern="""
        import torch
        def attn(q, k, v, *, causal=False, scale=None):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            s = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
            if causal:
                s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(s.shape[3] - s.shape[2]), -torch.inf)
            return (torch.softmax(s, -1).nan_to_num() @ v.float()).to(q.dtype)
        def blind(q, k, v, *, causal=False): return attn(q, k, v)
        """,
        test_own="""
        import pytest
        @pytest.mark.parametrize("flashattn_case", ["bf16-b1-h4-kv2-q33-k65-d32-causal"], indirect=True)
        def test_own(flashattn_impl, flashattn_inputs, flashattn_oracle, flashattn_device):
            i = flashattn_inputs
            out, _ = flashattn_impl.call(i.q, i.k, i.v, {"causal": True})
            truth = flashattn_oracle["o"]
            assert out.device.type == flashattn_device.type == "cpu"
            wrong = flashattn_impl.spec.endswith("blind")
            assert bool(((out.double() - truth.value).abs() <= truth.limit(4)).all()) is not wrong
        """,
    )
    node = "flashattn-suite/causal::test_matches_oracle[bf16-b1-h2-q128-k128-d64-causal]"
    impls = ["--flashattn-impl=kern:attn", "--flashattn-impl=kern:blind"]
    result = bare(*impls, node, "test_own.py", "--flashattn-json=out.json", "--flashattn-device=cpu")
    assert result.ret == 1
    assert result.parseoutcomes() == {"failed": 1, "passed": 3}
    result.stdout.fnmatch_lines(["attn: conformant: 1 verified*", "blind: not conformant: 1 failed*"])
    results = json.loads((pytester.path / "out.json").read_text())["results"]
    assert {r["implementation"]: r["status"] for r in results} == {"kern:attn": "verified", "kern:blind": "failed"}
    assert re.search(r"replay: .*causal\]\" --flashattn-impl=kern:blind --flashattn-device=cpu", result.stdout.str())
