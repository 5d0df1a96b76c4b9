"""Markers, gating, --flashattn-require, and sessions that are none of our business."""

from __future__ import annotations

import pytest

from conftest import Run, error, last_line

OWN = """
    import pytest
    @pytest.mark.sm90
    def test_hopper(): pass
    @pytest.mark.sm90(exact=True)
    def test_wgmma(): pass
    @pytest.mark.fp8
    def test_fp8(): pass
    @pytest.mark.sm80
    def test_ampere(): pass
"""
ABSENT = "sm90 needs compute capability 9.0; this machine has no CUDA device"


def test_own_markers_on_a_laptop(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makepyfile(OWN)
    result = trial(None, "--strict-markers", "-m", "sm90", matrix=None)
    assert result.ret == 1
    assert result.parseoutcomes() == {"unmet": 2, "deselected": 2}
    assert last_line(result).startswith(f"not judged: nothing was verified: {ABSENT} (1 unmet)")


def test_own_markers_on_a_gpu(pytester: pytest.Pytester, trial: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(OWN)
    monkeypatch.setenv("FAKE_DEVICE", "h100")
    assert trial(None, matrix=None).parseoutcomes() == {"passed": 4}
    monkeypatch.setenv("FAKE_DEVICE", "a100")
    result = trial(None, matrix=None)
    assert result.parseoutcomes() == {"passed": 1, "unmet": 3}
    assert result.ret == 0
    assert last_line(result) == "flashattn: 1 of your own tests passed, 0 declared, 3 unmet (sm90, fp8)"


def test_laptop_run_of_a_whole_repository_stays_green(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makepyfile("import pytest\ndef test_plain(): pass\n@pytest.mark.sm90\ndef test_gpu(): pass")
    assert trial(None, matrix=None).ret == 0


def test_suite_on_an_architecture(pytester: pytest.Pytester, trial: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trial("good", "-m", "sm90")
    assert result.ret == 1
    assert ABSENT in last_line(result)
    assert set(result.parseoutcomes()) == {"unmet"}
    monkeypatch.setenv("FAKE_DEVICE", "h100")
    result = trial("good", "-m", "sm90", "--flashattn-require=sm90,backward")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["flashattn: NVIDIA H100 (sm_90), *"])
    assert trial("good", "-m", "not sm90").ret == 0


def test_require_hardware(trial: Run) -> None:
    result = trial("good", "--flashattn-require=sm90")
    assert result.ret == 1
    assert last_line(result).endswith("required sm90, but nothing that covers it was verified")
    result = trial("good", "-m", "sm90", "--flashattn-require=sm90", "flashattn-suite/lse")
    assert set(result.parseoutcomes()) == {"failed"}
    result.stdout.fnmatch_lines([f"required sm90, but unmet: {ABSENT}"])


def test_require_feature(trial: Run) -> None:
    assert trial("good", "--flashattn-require=backward,causal,bf16").ret == 0
    result = trial("good", "--flashattn-require=window", "flashattn-suite/features")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["required window, but declared: lacks window*", "not conformant: *"])


@pytest.mark.parametrize("workers", [[], ["-n2"]])
def test_unmet_under_xdist(pytester: pytest.Pytester, trial: Run, workers: list[str]) -> None:
    pytester.makepyfile(OWN)
    result = trial(None, "-rs", *workers, process=bool(workers), matrix=None)
    assert result.parseoutcomes()["unmet"] == 4
    assert result.ret == 1


def test_fixtures_without_an_implementation(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makepyfile(
        """
        import pytest
        def test_impl(flashattn_impl): pass
        def test_check(flashattn_check): pass
        def test_case(flashattn_case): pass
        @pytest.mark.flashattn_cases("lse", matrix="smoke")
        def test_cases(flashattn_case): assert flashattn_case.dtype
        """
    )
    result = trial(None, matrix=None)
    assert result.parseoutcomes()["errors"] == 3
    result.stdout.fnmatch_lines(
        ["no implementation is named: give --flashattn-impl=*", "flashattn_case needs cases: *"]
    )


def test_a_session_of_others_is_left_alone(pytester: pytest.Pytester, trial: Run) -> None:
    assert trial(None, matrix=None).ret == pytest.ExitCode.NO_TESTS_COLLECTED
    pytester.makepyfile("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('x')")
    result = trial(None, matrix=None)
    assert result.parseoutcomes() == {"passed": 1, "skipped": 1}
    assert not [line for line in result.outlines if line.startswith("flashattn")]
    assert " in " in last_line(result)
    result = trial("good", "test_a_session_of_others_is_left_alone.py", matrix=None)
    assert result.ret == 0


def test_disabled_leaves_no_trace(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_subprocess("-p", "no:flashattn", "-p", "no:pytest_flashattn.plugin", "--help")
    result.stdout.no_fnmatch_line("*flashattn-*")
    result = pytester.runpytest_subprocess("-p", "no:flashattn", "--markers")
    result.stdout.no_fnmatch_line("*sm90*")
    result = pytester.runpytest_subprocess("-p", "no:flashattn", "--fixtures")
    result.stdout.no_fnmatch_line("*flashattn_*")


def test_nothing_named_nothing_run(trial: Run) -> None:
    assert "no module" in error(trial(None, "--flashattn-impl=x:y", matrix=None))
