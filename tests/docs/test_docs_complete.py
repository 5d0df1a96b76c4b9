"""The documents name what the code has, all of it and nothing else; `python tests/docs/refresh.py` rewrites tables."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import refresh
from documents import ALL_PAGES, PAGES, ROOT, blocks, read

from pytest_flashattn import Support, collection
from pytest_flashattn.capability import MARKERS
from pytest_flashattn.chapters import CHAPTERS, DRAWN, TIMED
from pytest_flashattn.fixtures import PUBLIC
from pytest_flashattn.options import OPTIONS
from pytest_flashattn.verdict import STATUSES

GUIDE = read("docs/guide.md")
STALE = "out of date: run `python tests/docs/refresh.py`"


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_code(page: str) -> None:
    text = read(page)
    assert refresh.with_tables(text) == text, f"{page} is {STALE}"


@pytest.mark.parametrize("name", ["chapters", "conventions", "features", "options"])
def test_guide_has_every_table(name: str) -> None:
    assert f"<!-- {name} -->\n| " in GUIDE


@pytest.mark.parametrize(
    "words",
    [sorted(PUBLIC), sorted(MARKERS), STATUSES, [f.name for f in fields(Support)], list(CHAPTERS)],
    ids=["fixtures", "markers", "statuses", "support", "chapters"],
)
def test_guide_names_every(words: list[str]) -> None:
    assert not [word for word in words if not re.search(rf"\b{word}\b", GUIDE)]


def test_guide_names_the_peers() -> None:
    # Read, not imported: peers compiles flex_attention at import, which takes seconds.
    source = (ROOT / "pytest_flashattn/peers.py").read_text(encoding="utf-8")
    public = re.findall(r"^def ([a-z]\w+)", source, re.M)
    assert len(public) > 2
    assert not [name for name in public if f"`{name}`" not in GUIDE]


@pytest.mark.parametrize("page", ALL_PAGES)
def test_no_option_key_or_fixture_that_does_not_exist(page: str) -> None:
    text = read(page)
    flags = {option.flag for option in OPTIONS}
    assert set(re.findall(r"--flashattn-[a-z]+\b", text)) <= flags
    known = {option.key for option in OPTIONS if option.ini} | PUBLIC | set(MARKERS) | {"flashattn_worst"}
    assert set(re.findall(r"(?<![\w.])flashattn_[a-z]+\b", text)) <= known


@pytest.mark.parametrize("page", ALL_PAGES)
def test_node_ids_exist(page: str) -> None:
    for chapter, check in re.findall(rf"{collection.ROOT}/([a-z_]+)(?:::test_([a-z_]+))?", read(page)):
        assert chapter in CHAPTERS or chapter in TIMED or chapter in DRAWN
        assert not check or check in collection.checks_of(chapter)


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_resolve(page: str) -> None:
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", read(page), flags=re.S)):
        path, _, anchor = target.partition("#")
        file = here / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), target


def _anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_quoted_file_is_the_file() -> None:
    quoted = [block for page in PAGES for block in blocks(page) if block.mark[:1] == ("file:",)]
    assert quoted
    for block in quoted:
        assert block.text == (ROOT / block.mark[1]).read_text(encoding="utf-8"), f"{block.id} is {STALE}"


def test_sample_of_the_readme_has_as_many_cases_as_the_matrix() -> None:
    """The README quotes a run: a matrix that has changed since makes the quotation wrong."""
    sample = next(block.text for block in blocks("README.md") if block.language == "console")
    rows = re.findall(r"^(\w+) +(\d+) +(\d+) +(\d+) +(\d+)\b", sample, re.M)
    quoted = {chapter: sum(map(int, counts)) for chapter, *counts in rows}
    real = Counter(nodeid.partition("/")[2].partition("::")[0] for nodeid in collection.catalogue("default", 0))
    assert quoted == dict(real), f"README.md is {STALE}"
    named, replayed = re.findall(r"test_\w+\[(\S+)\]", sample)
    assert named == replayed


def test_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 160


def test_the_gpu_lane_had_the_results_that_the_page_says() -> None:
    outcomes = json.loads((ROOT / "measurements/h200/gpu-lane.json").read_text())["tests"]
    kinds = Counter(name.partition("[")[0] for name, test in outcomes.items() if test["outcome"] == "passed")
    assert sum(kinds.values()) == len(outcomes)
    assert set(kinds) == {"test_suite_fails_real_fault", "test_right_kernel_passes"}
    assert f"fails all {kinds['test_suite_fails_real_fault']}, and passes the right" in " ".join(
        read("docs/power.md").split()
    )
    assert kinds["test_right_kernel_passes"] == kinds["test_suite_fails_real_fault"]
