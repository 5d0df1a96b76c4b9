"""flashattn-expect.toml: excuses with reasons, strict in every direction."""

from __future__ import annotations

import pytest

from conftest import Run, error, last_line, load_json
from pytest_flashattn import matrices

CAUSAL = '[[expect]]\nid = "*-causal*"\nreason = "mask off by one"\nissue = "#12"\n'
LSE = "flashattn-suite/lse"


@pytest.fixture
def expect(pytester: pytest.Pytester):
    return lambda text: (pytester.path / "flashattn-expect.toml").write_text(text)


@pytest.mark.parametrize("workers", [[], ["-n2"]])
def test_excused(pytester: pytest.Pytester, trial: Run, expect, workers: list[str]) -> None:
    expect(CAUSAL)
    result = trial("bad", LSE, "--flashattn-json=out.json", *workers, process=bool(workers))
    assert result.ret == 0
    assert "excused" in last_line(result)
    out = load_json(pytester.path / "out.json")
    excused = [r for r in out["results"] if r["status"] == "excused"]
    assert len(excused) == out["totals"]["excused"] == result.parseoutcomes()["excused"]
    assert excused[0]["reason"] == "mask off by one (#12)"
    assert excused[0]["measures"]


def test_everything_excused_verifies_nothing(trial: Run, expect) -> None:
    expect(CAUSAL)
    result = trial("bad", "flashattn-suite/causal")
    assert result.ret == 1
    assert last_line(result).startswith("not judged: nothing was verified: mask off by one (#12) (7 excused)")


def test_unexpected_success_fails(trial: Run, expect) -> None:
    expect(CAUSAL)
    result = trial("good", LSE)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["expected to fail (mask off by one (#12)) but verified: remove the entry '[*]-causal[*]'*"]
    )


def test_expired(trial: Run, expect) -> None:
    expect(CAUSAL + "until = 2020-01-01\n")
    result = trial("bad", LSE)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["its excuse expired on 2020-01-01: mask off by one*"])


@pytest.mark.parametrize(("line", "excuses"), [
    ('device = "cpu"', True), ('device = "cuda"', False), ('device = "NVIDIA H*"', False),
    ('implementation = "kern:*"', True), ('implementation = "bad"', True), ('implementation = "good"', False),
    ("until = 2999-01-01", True),
])  # fmt: skip
def test_conditions(trial: Run, expect, line: str, excuses: bool) -> None:
    expect(CAUSAL + line)
    assert (trial("bad", LSE).ret == 0) is excuses


@pytest.mark.parametrize("workers", [[], ["-n2"]])
def test_entry_that_matches_nothing(trial: Run, expect, workers: list[str]) -> None:
    expect('[[expect]]\nid = "no-such-case"\nreason = "gone"')
    result = trial("good", *workers, process=bool(workers))
    assert result.ret == 1
    assert "expectation 'no-such-case' matches no test" in last_line(result)
    assert trial("good", LSE).ret == 0  # not judged when only a part was collected
    assert trial("good", "-k", "lse").ret == 0


@pytest.mark.parametrize("level", ["default", "full"])
def test_entry_of_another_matrix_is_not_stale(trial: Run, expect, level: str) -> None:
    cases = {name: [c.id for c in matrices.cases_for("forward", "matches_oracle", name, 0)] for name in matrices.LEVELS}
    others = {case for name, ids in cases.items() if name != level for case in ids}
    case = next(case for case in cases[level] if case not in others)
    expect(f'[[expect]]\nid = "flashattn-suite/forward::test_matches_oracle[{case}]"\nreason = "slow"')
    assert trial("good").ret == 0


@pytest.mark.parametrize(("text", "sentence"), [
    ("[[expect]\n", "flashattn-expect.toml: not readable as TOML: "),
    ("[expect]\nid='a'", "flashattn-expect.toml: write [[expect]], with two brackets, above each entry"),
    ("[[expected]]\nid='a'", "flashattn-expect.toml: unknown key 'expected'; entries are written [[expect]]"),
    ("[[expect]]\nid='a'", "entry 1 (a): `reason` is missing"),
    ("[[expect]]\nid='a'\nreason=' '", "entry 1 (a): `reason` is missing"),
    ("[[expect]]\nreason='a'", "entry 1: `id` is missing"),
    ("[[expect]]\nid='a'\nreason='b'\nuntill=2030-01-01", "unknown key 'untill'; known: id, reason, issue"),
    ("[[expect]]\nid='a'\nreason='b'\nuntil='soon'", "`until` must be a date such as 2026-12-31, not 'soon'"),
    ("[[expect]]\nid='a'\nreason='b'\ndevice=3", "entry 1 (a): `device` must be a string, not 3"),
])  # fmt: skip
def test_typos(trial: Run, expect, text: str, sentence: str) -> None:
    expect(text)
    assert sentence in error(trial("good"))


def test_named_file(pytester: pytest.Pytester, trial: Run) -> None:
    (pytester.path / "known.toml").write_text(CAUSAL)
    assert trial("bad", LSE, "--flashattn-expect=known.toml").ret == 0
