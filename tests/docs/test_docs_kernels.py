"""docs/kernels.md says only what the files under measurements/ hold, and the tile tables are what was measured."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from documents import ROOT, read

PAGE = read("docs/kernels.md")


def report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"measurements/h200/{name}.json").read_text(encoding="utf-8"))
    return found


def test_conformance() -> None:
    found = report("conformance-flash_attention")
    assert found["complete"]
    assert found["settings"]["matrix"] == "default"
    assert set(found["totals"]) <= {"verified", "declared"}


def test_bits_offsets_and_graphs() -> None:
    found = report("kernels")
    assert found["repeats"] == {"calls": 1000, "differing": {"dense": 0, "causal": 0}}
    assert found["offsets"]["ok"]
    assert found["offsets"]["elements"] > 2**31
    assert all(found["graphs"].values())


def test_memcheck() -> None:
    rows = report("memcheck")["chapters"]
    assert len(rows) >= 11
    assert all(row["errors"] == 0 and row["verdict"].startswith("conformant") for row in rows)


def test_exp2() -> None:
    assert f"`exp` takes {report('kernels')['exp2']['ratio']:.2f} times as long" in PAGE


def test_ratios_of_the_readme() -> None:
    rows = re.findall(r"^\| (forward|backward), all \|.*\*\*([\d.]+)\*\* \| \*\*([\d.]+)\*\* \|$", PAGE, re.M)
    (_, forward_fa2, forward_cudnn), (_, backward_fa2, backward_cudnn) = rows
    readme = " ".join(read("README.md").split())
    assert f"forward {float(forward_fa2):.1f} times and backward {float(backward_fa2):.1f} times as fast" in readme
    assert f"forward {forward_cudnn} and backward {backward_cudnn} times as fast as cuDNN" in readme


@pytest.mark.parametrize("row", report("tune")["rows"], ids=lambda row: f"{row['kernel']}-d{row['d']}")
def test_tiles_are_the_measured_ones(row: dict[str, Any]) -> None:
    configs = pytest.importorskip("reference_kernels.configs")
    chosen = configs.lookup(row["kernel"], 90, torch.bfloat16, row["d"])
    scores = {tuple(found["config"]): found["score"] for found in row["candidates"]}
    assert scores[tuple(chosen)] <= 1.001 * min(scores.values())


def test_number_of_candidates() -> None:
    counted = sum(len(row["candidates"]) for row in report("tune")["rows"])
    assert f"{counted} timed candidates" in PAGE
