"""What is collected, under which ids, for which arguments."""

from __future__ import annotations

import pytest

from conftest import Run, error, last_line

CASE = "bf16-b1-h2-q128-k128-d64-causal"
OWN = "def test_own(): pass"


def ids(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


@pytest.fixture
def listed(trial: Run):
    return lambda *args, impl="good", **k: ids(trial(impl, "--collect-only", "-q", *args, **k))


def test_no_paths_means_own_tests_and_suite(pytester: pytest.Pytester, listed) -> None:
    pytester.makepyfile(OWN)
    found = listed()
    assert found[0].endswith("::test_own")
    assert found[1].startswith("flashattn-suite/forward::test_")
    assert len(found) > 50


def test_paths_mean_exactly_those(pytester: pytest.Pytester, listed) -> None:
    path = pytester.makepyfile(OWN)
    assert len(listed(path.name)) == 1
    assert len(listed(path.name, "--flashattn-suite=always")) > 50


@pytest.mark.parametrize(
    ("args", "prefix"),
    [
        (["flashattn-suite"], "flashattn-suite/"),
        (["flashattn-suite/"], "flashattn-suite/"),
        (["flashattn-suite/lse"], "flashattn-suite/lse::"),
        (["flashattn-suite/lse::test_matches_oracle"], "flashattn-suite/lse::test_matches_oracle["),
        (["--pyargs", "pytest_flashattn.suite"], "flashattn-suite/"),
        (["--pyargs", "pytest_flashattn.suite.lse"], "flashattn-suite/lse::"),
        (
            [f"flashattn-suite/causal::test_matches_oracle[{CASE}]"],
            f"flashattn-suite/causal::test_matches_oracle[{CASE}]",
        ),
    ],
)
def test_suite_by_name(pytester: pytest.Pytester, listed, args: list[str], prefix: str) -> None:
    pytester.makepyfile(OWN)
    found = listed(*args)
    assert found
    assert all(line.startswith(prefix) for line in found)


def test_own_path_and_chapter_together(pytester: pytest.Pytester, listed) -> None:
    path = pytester.makepyfile(OWN)
    found = listed(path.name, "flashattn-suite/lse")
    assert found[0].endswith("::test_own")
    assert all(line.startswith("flashattn-suite/lse") for line in found[1:])
    assert len(found) > 1


def test_existing_path_wins(pytester: pytest.Pytester, listed) -> None:
    pytester.mkdir("flashattn-suite").joinpath("test_mine.py").write_text(OWN)
    assert listed("flashattn-suite") == ["flashattn-suite/test_mine.py::test_own"]


def test_case_outside_the_matrix_runs_by_its_id(listed) -> None:
    node = "flashattn-suite/forward::test_matches_oracle[bf16-b3-h5-q77-k77-d64]"
    assert listed(node) == [node]


def test_several_implementations_share_an_id(listed) -> None:
    found = listed("flashattn-suite/lse::test_matches_oracle", impl="good,bad")
    assert found[0].endswith("@good]")
    assert found[1] == found[0].replace("@good]", "@bad]")
    assert listed(found[1], impl="good,bad") == [found[1]]
    assert listed(found[1].replace("@bad", ""), impl="good,bad") == found[:2]


@pytest.mark.parametrize(
    ("arg", "nearest"),
    [
        ("flashattn-suite/forwrad", "flashattn-suite/forward"),
        ("flashattn-suite/lse::test_matches_orcale", "test_matches_oracle"),
        ("flashattn-suite/lse::test_matches_oracle[bf16-b1-h2-q128-k128-dd64]", "bf16-b1-h2-q128-k128-d64"),
    ],
)
def test_selection_that_matches_nothing(trial: Run, arg: str, nearest: str) -> None:
    sentence = error(trial("good", arg))
    assert arg in sentence
    assert nearest in sentence


@pytest.mark.parametrize(("mode", "suite"), [("never", False), ("always", True), ("auto", True)])
def test_suite_ini(pytester: pytest.Pytester, listed, mode: str, suite: bool) -> None:
    pytester.makeini(f"[pytest]\nflashattn_suite = {mode}\nflashattn_impl = kern:good")
    pytester.makepyfile(OWN)
    assert (len(listed(impl=None)) > 1) is suite


def test_suite_without_implementation(trial: Run, listed) -> None:
    assert "--flashattn-impl=module:attribute" in error(trial(None, "flashattn-suite"))
    assert listed("flashattn-suite", impl=None)  # but it can be listed


def test_users_naming_does_not_matter(pytester: pytest.Pytester, listed) -> None:
    pytester.makeini("[pytest]\npython_functions = check_*\npython_files = *_spec.py\ntestpaths = nowhere")
    assert len(listed()) > 50


def test_keyword_marker_and_deselect(trial: Run, listed) -> None:
    assert all("lse::" in line for line in listed("-k", "lse"))
    nodes = listed("flashattn-suite/lse::test_matches_oracle")
    assert listed("flashattn-suite/lse::test_matches_oracle", f"--deselect={nodes[0]}") == nodes[1:]
    result = trial("good", "-k", "no_such_thing")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "no test ran" in last_line(result)


def test_last_failed(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makepyfile("def test_own(): assert 0")
    first = trial("bad", "--lf")
    failed = first.parseoutcomes()["failed"]
    second = trial("bad", "--lf")
    assert second.parseoutcomes()["failed"] == failed > 2
    assert "passed" not in second.parseoutcomes()


def test_own_cases(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.flashattn_cases("lse", matrix="smoke")
        def test_it(flashattn_case, flashattn_check):
            assert flashattn_check("lse.matches_oracle", flashattn_case).status == "verified"
        """
    )
    result = trial("good", "--strict-markers", "test_own_cases.py", matrix=None)
    assert result.ret == 0
    assert last_line(result).startswith("conformant: ")
    two = trial("good,better", "test_own_cases.py", matrix=None).parseoutcomes()
    assert two["passed"] == 2 * result.parseoutcomes()["passed"]


def test_own_cases_misnamed(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.flashattn_cases("sle")
        def test_it(flashattn_case): pass
        """
    )
    result = trial("good", "test_own_cases_misnamed.py")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*no set 'sle'*"])
    result.stdout.no_fnmatch_line("*Traceback*")
