"""The table of limits: every bundled row is one, the widest that applies counts, a broken file is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_flashattn.cases import Case
from pytest_flashattn.matrices import TableError
from pytest_flashattn.performance import thresholds

CASE = Case.parse("fp16-b2-h32-q8192-k8192-d64-causal")
H100, H200 = ("cuda", "NVIDIA H100 80GB HBM3"), ("cuda", "NVIDIA H200")


def test_the_bundled_table_has_a_ratio_for_every_case() -> None:
    limits = thresholds.load("ratio")
    for device in (H100, H200, ("cpu", "CPU")):
        for direction in ("forward", "backward", "forward_backward"):
            assert limits.ratio_limit(CASE, direction, device)
    assert {row["quantity"] for row in limits.growth} == set(thresholds.QUANTITIES)
    assert not limits.floor, "floors count only when their set is asked for"


def test_the_floors_of_the_chapter_are_those_of_its_gpu() -> None:
    limits = thresholds.load("chapter")
    assert limits.floor_limit(CASE, "forward", H100) == 422
    assert limits.floor_limit(CASE, "backward", H100) == 290
    assert limits.floor_limit(CASE, "forward", H200) is None
    assert limits.floor_limit(CASE, "forward_backward", H100) is None
    assert all("chapter" in row["why"] for row in limits.floor)


def test_of_the_rows_that_apply_the_widest_counts(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[ratio]]\nat_most = 1.1\nwhy = "all"\n'
        '[[ratio]]\ndirection = "backward"\nat_most = 1.5\nwhy = "slower"\n'
        '[[floor]]\nat_least = 500\nn = 8192\nwhy = "one"\n[[floor]]\nat_least = 400\nd = 64\nwhy = "two"\n'
    )
    limits = thresholds.load(str(path))
    assert limits.ratio_limit(CASE, "forward", H200) == 1.1
    assert limits.ratio_limit(CASE, "backward", H200) == 1.5
    assert limits.floor_limit(CASE, "forward", H200) == 400
    assert limits.growth_limit("memory", CASE, "forward", H200) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[ratio]", "not valid TOML"),
        ("[[rato]]", r"unknown table \[\[rato\]\]; known: ratio, growth, floor"),
        ("[ratio]\nat_most = 1", r"write \[\[ratio\]\]"),
        ("[[ratio]]\nat_most = 2", "row 1: needs a `why`"),
        ('[[ratio]]\nat_most = 0\nwhy = "x"', "at_most must be a positive number, not 0"),
        ('[[floor]]\nat_most = 2\nwhy = "x"', "unknown key 'at_most'"),
        ('[[ratio]]\nat_most = 2\nwhy = "x"\nd = "64"', "d must be of type int, not '64'"),
        ('[[ratio]]\nat_most = 2\nwhy = "x"\ndirection = "up"', "direction 'up' is unknown"),
        ('[[growth]]\nat_most = 2\nwhy = "x"', "quantity None is unknown"),
    ],
)
def test_a_broken_file_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(TableError, match=says) as error:
        thresholds.parse(text, "mine.toml")
    assert str(error.value).startswith("mine.toml")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(TableError, match=r"cannot read nope.toml: .*; write ratio, chapter, or the path"):
        thresholds.load("nope.toml")
