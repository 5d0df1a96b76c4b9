"""The catalogue and the registries agree: nothing is missing, unknown, or counted where it is not."""

from __future__ import annotations

import re
from pathlib import Path

from .catalogue import CATALOGUE, TEACHING
from .gpu.lane import LANE
from .isolated import ISOLATED
from .mutants import MUTANTS

HERE = {m.number for m in MUTANTS.values()} | {m.number for m in ISOLATED.values()}


def numbers(status: str) -> set[int]:
    return {number for number, (_, said) in CATALOGUE.items() if said == status}


def test_every_number_has_one_entry_and_a_known_status() -> None:
    assert list(CATALOGUE) == list(range(1, 141))
    assert len({name for name, _ in CATALOGUE.values()}) == 140
    known = r"here|gpu|performance lane|later: \w[\w ]+"
    odd = {n: said for n, (_, said) in CATALOGUE.items() if not re.fullmatch(known, said)}
    assert not odd


def test_what_is_here_is_in_a_registry_and_nothing_else_is() -> None:
    assert HERE - {0} == numbers("here")


def test_what_only_a_gpu_shows_is_in_its_lane() -> None:
    assert numbers("gpu") <= {mutant.number for mutant in LANE}
    assert {mutant.number for mutant in LANE} <= set(CATALOGUE)
    made = set(
        re.findall(r"^(\w+) = ", (Path(__file__).parent / "gpu" / "faulty.py").read_text(encoding="utf-8"), re.M)
    )
    assert {name for mutant in LANE for name in (mutant.name, mutant.control)} <= made


def test_what_is_about_time_is_named_where_time_is_tested() -> None:
    folder = Path(__file__).parents[1] / "performance"
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("test_*.py"))
    assert numbers("performance lane")
    for number in numbers("performance lane"):
        assert re.search(rf"\b{CATALOGUE[number][0]}\b", text), CATALOGUE[number][0]


def test_a_name_of_the_catalogue_means_its_own_number() -> None:
    known = {name: number for number, (name, _) in CATALOGUE.items()}
    both = {**{m.name: m.number for m in MUTANTS.values()}, **{m.name: m.number for m in ISOLATED.values()}}
    assert {n: (number, known[n]) for n, number in both.items() if n in known and known[n] != number} == {}


def test_the_mistakes_of_the_course_are_made() -> None:
    assert {name for names in TEACHING.values() for name in names} <= set(MUTANTS)
