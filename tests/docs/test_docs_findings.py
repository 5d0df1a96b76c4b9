"""docs/findings.md says only what the reports under measurements/ hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, read

SEEDS = ("h200/calibration-flex_compiled", "h200/calibration-flex_compiled-fp32")
REPORTS = {
    "PyTorch's SDPA on the CPU": "cpu/conformance-sdpa",
    "PyTorch's SDPA on an H200": "h200/conformance-sdpa",
    "FlashAttention-2": "h200/conformance-sdpa_flash",
    "Memory-efficient": "h200/conformance-sdpa_efficient",
    "cuDNN": "h200/conformance-sdpa_cudnn",
    "FlashAttention-3": "h200/conformance-fa3",
    "flex_attention": "h200/conformance-flex_compiled",
}


@pytest.mark.parametrize("title", REPORTS)
def test_every_finding_is_a_failure_of_its_report(title: str) -> None:
    section = re.search(rf"^## {re.escape(title)}.*?(?=^## |\Z)", read("docs/findings.md"), re.M | re.S)
    assert section, f"no section {title}"
    report = json.loads((ROOT / f"measurements/{REPORTS[title]}.json").read_text(encoding="utf-8"))
    status = {result["id"]: result["status"] for result in report["results"]}
    if title == "flex_attention":
        status |= {_id(failure): "failed" for name in SEEDS for failure in _seeds(name)["failures"]}
    named = re.findall(r"`(\w+::test_\w+\[[^\]]+\])`", section[0])
    assert named
    for case in named:
        assert status[f"flashattn-suite/{case}"] == "failed", case
    assert report["date"]
    assert report["versions"]["torch"]


def test_flex_attention_over_seeds() -> None:
    """What the page says of 20 seeds: how many cases, and that no failure depends on the seed."""
    whole, rest = map(_seeds, SEEDS)
    left = set(rest["unfinished"])
    assert whole["seeds"] == rest["seeds"] == 20
    assert f"{whole['cases'] - len(left)} of the {whole['cases']} cases with 20 seeds" in _words()
    assert f"the {len(left)} others" in _words()
    assert all(len(failure["seeds"]) == 20 for failure in rest["failures"].values())
    memory = "out of memory"  # of the first run, whose processes shared one GPU; the second has those cases
    some = [case for case, failure in whole["failures"].items() if len(failure["seeds"]) < 20]
    short = [case for case, failure in whole["failures"].items() if memory in failure["text"]]
    assert set(some) <= set(rest["failures"])
    assert not set(short) & (left | set(rest["failures"]))


CALIBRATIONS = sorted(path for path in (ROOT / "measurements").glob("*/calibration-*.json"))


@pytest.mark.parametrize("path", CALIBRATIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_failure_depends_on_the_seed(path: Path) -> None:
    """But for a case that breaks the context, after which it ends, and memory that ran out."""
    found = json.loads(path.read_text(encoding="utf-8"))
    some = {case for case, failure in found["failures"].items() if len(failure["seeds"]) != found["seeds"]}
    short = set(found["unmet"]) if "unmet" in found else set(_seeds(SEEDS[1])["failures"])
    assert some <= set(found["broke the context"]) | short
    assert not found["died"]


def _seeds(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"measurements/{name}.json").read_text(encoding="utf-8"))
    return found


def _id(failure: str) -> str:
    chapter, _, check = failure.partition(".")
    return f"flashattn-suite/{chapter}::test_{check}"


def _words() -> str:
    return " ".join(read("docs/findings.md").split())
