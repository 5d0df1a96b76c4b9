"""docs/findings.md says only what the reports under measurements/ hold."""

from __future__ import annotations

import json
import re

import pytest
from documents import ROOT, read

REPORTS = {
    "PyTorch's SDPA on the CPU": "cpu/conformance-sdpa",
    "PyTorch's SDPA on an H200": "h200/conformance-sdpa",
    "FlashAttention-2": "h200/conformance-sdpa_flash",
    "Memory-efficient": "h200/conformance-sdpa_efficient",
    "cuDNN": "h200/conformance-sdpa_cudnn",
    "flex_attention": "h200/conformance-flex_compiled",
}


@pytest.mark.parametrize("title", REPORTS)
def test_every_finding_is_a_failure_of_its_report(title: str) -> None:
    section = re.search(rf"^## {re.escape(title)}.*?(?=^## |\Z)", read("docs/findings.md"), re.M | re.S)
    assert section, f"no section {title}"
    report = json.loads((ROOT / f"measurements/{REPORTS[title]}.json").read_text(encoding="utf-8"))
    status = {result["id"]: result["status"] for result in report["results"]}
    named = re.findall(r"`(\w+::test_\w+\[[^\]]+\])`", section[0])
    assert named
    for case in named:
        assert status[f"flashattn-suite/{case}"] == "failed", case
    assert report["date"]
    assert report["versions"]["torch"]
