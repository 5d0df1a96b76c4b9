"""The command that runs equivalents over many seeds: its shares, its file, and that it can raise an alarm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import seeds
from .equivalents import EQUIVALENTS, Equivalent
from .mutants import MUTANTS

FEW = 3
"""Cases that a share is cut to here."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = seeds.share
    monkeypatch.setattr(seeds, "share", lambda seed: whole(seed)[:FEW])


def test_the_shares_of_consecutive_seeds_make_up_the_whole() -> None:
    whole = {(check, case.id) for check, case in seeds.pool(0)}
    shares = [[(check, case.id) for check, case in seeds.share(seed)] for seed in range(7, 7 + seeds.SLICES)]
    assert sum(map(len, shares)) == len(whole)
    assert {pair for share in shares for pair in share} == whole
    assert {case.seed for _, case in seeds.share(9)} == {9}


@pytest.mark.usefixtures("short")
def test_a_second_run_adds_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "e.json"
    assert seeds.main(["--seeds", "0:2", "--only", "honest", "base2", "--out", str(out)]) == 0
    asked = []
    real = seeds.run_seed
    monkeypatch.setattr(seeds, "run_seed", lambda e, seed: asked.append((e.name, seed)) or real(e, seed))
    assert seeds.main(["--seeds", "0:3", "--only", "honest", "--out", str(out)]) == 0
    assert asked == [("honest", 2)]
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["equivalents"]["honest"]["seeds"] == [0, 1, 2]
    assert document["equivalents"]["honest"]["verified"] == 3 * FEW
    assert document["equivalents"]["base2"]["seeds"] == [0, 1]


@pytest.mark.usefixtures("short")
def test_a_false_alarm_is_kept_and_ends_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Equivalent("honest", MUTANTS["return_zeros"].make, "zeros, taken for right")
    monkeypatch.setitem(EQUIVALENTS, "honest", wrong)
    out = tmp_path / "e.json"
    assert seeds.main(["--seeds", "4", "--only", "honest", "--out", str(out)]) == 1
    alarms = json.loads(out.read_text(encoding="utf-8"))["equivalents"]["honest"]["failed"]
    assert alarms
    assert alarms[0]["seed"] == 4
    assert alarms[0]["case"] in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_a_file_of_another_matrix_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "e.json"
    seeds.main(["--seeds", "0", "--only", "honest", "--out", str(out)])
    monkeypatch.setattr(seeds, "digest", lambda: "other")
    with pytest.raises(SystemExit, match="another matrix"):
        seeds.main(["--seeds", "1", "--only", "honest", "--out", str(out)])
