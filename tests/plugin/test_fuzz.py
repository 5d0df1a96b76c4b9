"""`--flashattn-fuzz`: what is drawn runs like any case, a failure is shrunk, and its replay line works by itself."""

from __future__ import annotations

import re
import shlex

import pytest

import pytest_flashattn.fuzz
import pytest_flashattn.strategies  # noqa: F401 - imported once, not by each run
from conftest import Run, error, last_line, load_json
from pytest_flashattn.cases import Case

FUZZ = ("flashattn-suite/fuzz", "--flashattn-fuzz=30")
TEST = "flashattn-suite/fuzz::test_matches_oracle"


def ids(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


@pytest.fixture
def listed(trial: Run):
    return lambda *args, impl="good", **k: ids(trial(impl, "--collect-only", "-q", *args, **k))


def test_draws_are_cases_like_others(pytester: pytest.Pytester, trial: Run) -> None:
    result = trial("good", *FUZZ, "--flashattn-json=out.json")
    assert result.ret == 0
    assert last_line(result).startswith("conformant: 30 verified")
    assert "fuzz 30, 30 cases" in result.stdout.str()
    out = load_json(pytester.path / "out.json")
    assert out["settings"]["fuzz"] == 30
    assert len({r["case"] for r in out["results"]}) == 30
    assert {r["chapter"] for r in out["results"]} == {"fuzz"}
    assert not list(pytester.path.rglob(".hypothesis"))


def test_draws_depend_on_the_seed_alone(listed) -> None:
    first = listed(*FUZZ)
    assert first == listed(*FUZZ)
    assert first != listed(*FUZZ, "--flashattn-seed=1")
    assert len(first) == 30


def test_draws_come_after_the_suite_when_asked_for(listed) -> None:
    whole, with_draws = listed(), listed("--flashattn-fuzz=5")
    assert with_draws[: len(whole)] == whole
    assert all(line.startswith(TEST) for line in with_draws[len(whole) :])
    assert len(with_draws) == len(whole) + 5


def test_each_implementation_has_draws_within_its_support(listed) -> None:
    found = listed(*FUZZ, impl="good,nothing")
    own = [line.partition("[")[2].removesuffix("@nothing]") for line in found if line.endswith("@nothing]")]
    assert sum(line.endswith("@good]") for line in found) == 30
    assert len(own) == 30
    for case in map(Case.parse, own):
        assert (case.dtype, case.d, case.features) == ("fp32", 1, frozenset())


def test_a_failure_is_shrunk_and_replays(
    pytester: pytest.Pytester, trial: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = trial("bad", *FUZZ, "--flashattn-json=out.json")
    assert result.ret == 1
    text = result.stdout.str().partition(" short test summary info ")[0]  # which repeats it all where CI is set
    smallest = "bf16-b1-h1-q1-k1-d64-causal"
    where = re.findall(r"^(?:smallest case that|no smaller case) fails? like this.*", text, re.M)
    assert len(where) == 1, "one kind of failure is shrunk once"
    results = load_json(pytester.path / "out.json")["results"]
    failed = [r for r in results if r["status"] == "failed"]
    number = next(n for n, r in enumerate(results, 1) if r["status"] == "failed")
    assert re.search(rf"\(draw {number} of 30; \d+ runs? to shrink it\)", where[0])
    assert "causal" in failed[0]["case"]
    replay = shlex.split(failed[0]["replay"])
    assert replay[:2] == ["pytest", f"{TEST}[{smallest}]"]

    monkeypatch.setenv("FAKE_WITHOUT_HYPOTHESIS", "1")
    again = trial(None, *replay[1:], matrix=None)
    assert again.ret == 1
    assert last_line(again).startswith("not conformant: 1 failed")
    assert again.parseoutcomes() == {"failed": 1}


def test_a_failure_is_shrunk_in_a_worker(pytester: pytest.Pytester, trial: Run) -> None:
    result = trial("bad", "-n2", *FUZZ, "--flashattn-json=out.json", process=True)
    assert result.ret == 1
    out = load_json(pytester.path / "out.json")
    assert sum(out["totals"].values()) == 30
    replays = {r["replay"].split('"')[1] for r in out["results"] if r["status"] == "failed"}
    assert f"{TEST}[bf16-b1-h1-q1-k1-d64-causal]" in replays
    assert not list(pytester.path.rglob(".hypothesis"))


def test_a_hang_while_drawing_ends_the_process(pytester: pytest.Pytester, trial: Run) -> None:
    result = trial("hangs", *FUZZ, "--flashattn-timeout=0.3", "--flashattn-json=out.json", process=True)
    assert result.ret == 1
    failed = [r for r in load_json(pytester.path / "out.json")["results"] if r["status"] == "failed"]
    assert [r["reason"].partition(":")[0] for r in failed] == ["did not return within 0.3 s"]
    assert failed[0]["replay"].startswith(f'pytest "{TEST}[')


def test_what_is_expected_is_neither_shrunk_nor_held_to_fail(pytester: pytest.Pytester, trial: Run) -> None:
    entry = '[[expect]]\nid = "*::test_matches_oracle[*bf16*"\nreason = "bf16 is not ready"\n'
    (pytester.path / "flashattn-expect.toml").write_text(entry)
    result = trial("bad", *FUZZ, "--flashattn-json=out.json")
    results = load_json(pytester.path / "out.json")["results"]
    status = {r["status"] for r in results if r["case"].startswith("bf16")}
    assert status == {"excused", "verified"}, "a draw that verifies although a pattern names it is no failure"
    smallest = re.search(r"test_matches_oracle\[(\S+)\]\" --flashattn-impl", result.stdout.str())
    assert smallest
    assert not smallest[1].startswith("bf16")
    (pytester.path / "flashattn-expect.toml").write_text('[[expect]]\nid = "flashattn-suite/fuzz::*"\nreason = "all"\n')
    assert trial("bad", *FUZZ).ret == 0
    assert "matches no test" not in trial("good", "flashattn-suite").stdout.str()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--flashattn-fuzz=many"], "--flashattn-fuzz: 'many' is no number of cases"),
        (["--flashattn-fuzz=-1"], "--flashattn-fuzz: '-1' is no number of cases"),
        (["flashattn-suite/lse", "--flashattn-fuzz=3"], "add flashattn-suite/fuzz to them"),
        (["--flashattn-suite=never", "--flashattn-fuzz=3"], "add flashattn-suite/fuzz to them"),
        (["flashattn-suite/fuzz"], "say how many with --flashattn-fuzz=N"),
        ([f"{TEST}[bf16-b1-zz]"], "'zz' is not understood"),
    ],
)
def test_usage_errors(trial: Run, args: list[str], sentence: str) -> None:
    assert sentence in error(trial("good", *args))


def test_without_hypothesis(trial: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WITHOUT_HYPOTHESIS", "1")
    sentence = "--flashattn-fuzz needs Hypothesis, which is not installed: pip install 'pytest-flashattn[fuzz]'"
    assert error(trial("good", *FUZZ)) == sentence
    assert trial("good", f"{TEST}[bf16-b1-h1-q5-k5-d64]").ret == 0
