"""Verdicts, exit status, closing line, table, replay line, JSON, JUnit."""

from __future__ import annotations

import pytest

from conftest import Run, last_line, load_json


def test_conformant(trial: Run) -> None:
    result = trial("good")
    assert result.ret == 0
    assert last_line(result).startswith("conformant: ")
    assert "declared (" in last_line(result)
    assert last_line(result).endswith(", 0 unmet")
    result.stdout.fnmatch_lines(
        [
            "flashattn: kern:good, canonical call; fp16 bf16; causal",
            "flashattn: CPU, torch *; matrix smoke, * cases, seed 0",
            "chapter * verified * failed * declared * unmet * worst/limit * case*",
            "forward * 0.5 * o *",
        ]
    )
    assert max(map(len, result.outlines)) <= 120


def test_not_conformant(trial: Run) -> None:
    result = trial("bad", "--flashattn-seed=7")
    assert result.ret == 1
    assert last_line(result).startswith("not conformant: ")
    result.stdout.fnmatch_lines(
        [
            "o: 7 of 1,000 elements beyond the bound; worst 41.2 x the limit at [[]0, 0, 1, 2[]]: *",
            "looks like: the mask is off by one",
            'replay: pytest "flashattn-suite/*[[]*[]]" --flashattn-impl=kern:bad --flashattn-matrix=smoke *-seed=7',
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*pytest_flashattn/*")


def test_replay_line_replays(trial: Run) -> None:
    first = trial("good,bad", "flashattn-suite/causal")
    line = next(line for line in first.outlines if line.startswith("replay: "))
    node = line.split('"')[1]
    assert "@" not in node
    assert "--flashattn-impl=kern:bad" in line
    assert trial("bad", node, matrix=None).parseoutcomes() == {"failed": 1}


def test_narrow_terminal(trial: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for impls in ("good", "good,better,bad,noisy,nothing,broken"):
        result = trial(impls, "--tb=no", "--no-header", "-rN")
        table = result.outlines[next(i for i, line in enumerate(result.outlines) if "= flashattn =" in line) :]
        assert len(table) > 5
        closing = tuple(f"{name}: " for name in impls.split(","))
        assert max(len(line) for line in table if not line.startswith(closing)) <= 80


def test_quiet_is_one_line(trial: Run) -> None:
    result = trial("good", "-q")
    assert not [line for line in result.outlines if line.startswith("chapter")]
    assert last_line(result).startswith("conformant: ")


def test_nothing_verified_is_exit_1(trial: Run) -> None:
    result = trial("nothing")
    assert result.ret == 1
    assert last_line(result).startswith("not judged: nothing was verified: lacks ")


def test_side_by_side(trial: Run) -> None:
    result = trial("good,better,bad", "flashattn-suite/causal", "flashattn-suite/lse")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["chapter * good * better * bad*", "causal * 0.5 o * 0.25 o * 41.2 o*"])
    result.stdout.fnmatch_lines(["good: conformant: *", "better: conformant: *", "bad: not conformant: *"])
    assert trial("good,better", "flashattn-suite/lse").ret == 0


@pytest.mark.parametrize("workers", [[], ["-n2"], ["-n2", "--dist=loadfile"]])
def test_json(pytester: pytest.Pytester, trial: Run, workers: list[str]) -> None:
    result = trial("bad", "--flashattn-json=out.json", "--junitxml=out.xml", *workers, process=bool(workers))
    assert result.ret == 1
    out = load_json(pytester.path / "out.json")
    outcomes = result.parseoutcomes()
    assert out["complete"]
    assert out["totals"]["failed"] == outcomes["failed"]
    assert out["totals"]["verified"] == outcomes["passed"]
    assert out["totals"]["declared"] == outcomes["declared"]
    assert len(out["results"]) == sum(out["totals"].values())
    assert out["implementations"][0]["spec"] == "kern:bad"
    assert out["machine"]["device"] == "CPU"
    failed = next(r for r in out["results"] if r["status"] == "failed")
    assert failed["implementation"] == "kern:bad"
    assert failed["measures"][0]["ratio"] == 41.2
    assert failed["id"] == f"flashattn-suite/{failed['chapter']}::test_{failed['check']}[{failed['case']}]"
    assert failed["replay"].startswith("pytest ")
    assert [p.name for p in pytester.path.glob("*out.json*")] == ["out.json"]
    xml = (pytester.path / "out.xml").read_text()
    assert '<property name="flashattn_status" value="failed"' in xml
    assert '<property name="flashattn_worst" value="41.2 o"' in xml


@pytest.mark.parametrize(
    ("impl", "args", "process"),
    [("bad", ["-x"], False), ("bad", ["-n2", "-x"], True), ("interrupts", [], True), ("exits", ["--maxfail=2"], False)],
)
def test_cut_short_keeps_results(
    pytester: pytest.Pytester, trial: Run, impl: str, args: list[str], process: bool
) -> None:
    result = trial(impl, "--flashattn-json=out.json", *args, process=process)
    assert result.ret in (1, 2)
    out = load_json(pytester.path / "out.json")
    assert not out["complete"]
    assert out["totals"]["verified"] > 0
    assert last_line(result).startswith("not ")


def test_internal_error_of_another_plugin(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makepyfile(
        theirs="def pytest_runtest_logfinish(nodeid):\n    if 'lse' in nodeid: raise RuntimeError('no')"
    )
    pytester.syspathinsert()
    result = trial("good", "-p", "theirs", "--flashattn-json=out.json")
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    out = load_json(pytester.path / "out.json")
    assert not out["complete"]
    assert out["totals"]["verified"] > 0


def test_journal_survives_a_crash(pytester: pytest.Pytester, trial: Run) -> None:
    trial("crashes", "--flashattn-json=out.json", process=True)
    assert '"verified"' in (pytester.path / "out.json.partial").read_text()


def test_errors_of_ours_are_one_sentence(trial: Run) -> None:
    result = trial("broken", "flashattn-suite/lse")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["RuntimeError: an error of ours (fakes.py:*)"])
    result.stdout.no_fnmatch_line("*def run_check*")


def test_output_is_cut(trial: Run) -> None:
    result = trial("noisy", "flashattn-suite/causal", "--junitxml=out.xml")
    assert len(result.stdout.str()) < 40_000
    result.stdout.fnmatch_lines(["*more characters, cut by pytest-flashattn"])


def test_exit_inside_a_case_is_a_failure(trial: Run) -> None:
    result = trial("exits", "flashattn-suite/causal")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["SystemExit: 3 (*"])


@pytest.mark.parametrize("process", [False, True])
def test_poisoned_context_stops(trial: Run, process: bool) -> None:
    result = trial("poisons", "flashattn-suite/causal", *(["-n1"] if process else []), process=process)
    assert result.ret in (1, 2)
    result.stdout.fnmatch_lines(["*the CUDA context is broken (fake)*"])
    assert last_line(result).startswith("not conformant: ")
    if not process:
        assert result.parseoutcomes()["failed"] == 1


def test_overriding_the_implementation_fixture(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makeconftest(
        """
        import pytest
        @pytest.fixture(scope="session")
        def flashattn_impl(): raise RuntimeError("no licence")
        """
    )
    result = trial("good", "flashattn-suite/lse")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["could not be set up: RuntimeError: no licence (conftest.py:3)"])


def test_users_own_marks_have_the_last_word(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_flashattn.cases import Case
        @pytest.mark.xfail(reason="known")
        def test_xfail(flashattn_check): flashattn_check("causal.matches_oracle", Case(causal=True))
        @pytest.mark.skip(reason="not now")
        @pytest.mark.sm90
        def test_skip(): pass
        def test_caught(flashattn_check):
            with pytest.raises(pytest.fail.Exception): flashattn_check("causal.matches_oracle", Case(causal=True))
        def test_two_checks(flashattn_check):
            for causal in (False, False): flashattn_check("causal.matches_oracle", Case(causal=causal))
        """
    )
    result = trial("bad", "test_users_own_marks_have_the_last_word.py")
    assert result.parseoutcomes() == {"xfailed": 1, "skipped": 1, "passed": 2}
    assert result.ret == 0
    assert last_line(result) == "conformant: 1 verified, 1 of your own tests passed, 0 declared, 0 unmet"
