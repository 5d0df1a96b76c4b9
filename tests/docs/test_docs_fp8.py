"""docs/fp8.md: its tables are those of the measurement, and its sentences about them hold there."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

import pytest
from documents import ROOT, read

from pytest_flashattn.features import DESCALES, FEATURES

sys.path.insert(0, str(ROOT / "measurements"))
import fp8_error

PAGE = read("docs/fp8.md")
DOCUMENT: dict[str, Any] = json.loads((ROOT / "measurements/cpu/fp8-error.json").read_text(encoding="utf-8"))


def kernel(family: str, scheme: str, kind: str = "kernel") -> float:
    return float(DOCUMENT["families"][family]["errors"][scheme][kind])


@pytest.mark.parametrize("marker", ["fp8-error", "fp8-inputs", "fp8-claims"])
def test_tables_are_those_of_the_measurement(marker: str) -> None:
    lines = fp8_error.tables(DOCUMENT)[marker]
    text = "\n".join([f"<!-- {marker} -->", *lines, ""])
    assert text in PAGE, f"docs/fp8.md is out of date: paste `python measurements/fp8_error.py --table …`\n{text}"


def test_the_command_is_the_one_that_made_the_file() -> None:
    assert DOCUMENT["command"] in PAGE
    assert DOCUMENT["seeds"] >= 3
    assert DOCUMENT["shape"] == list(fp8_error.SHAPE)


def test_granularities_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(descale_\w+)` \|", PAGE, re.M)
    assert rows == [f"descale_{word}" for word in DESCALES]
    assert set(rows) <= set(FEATURES)


def test_block_scales_alone_do_little_and_a_rotation_helps_against_outliers() -> None:
    tensor, block, both = "e4m3, one a tensor", "e4m3, one a block", "e4m3, one a block, rotated"
    for family in ("normal", "rows"):
        assert 0.95 < kernel(family, block) / kernel(family, tensor) < 1.05
    outliers = "FlashAttention-3"
    assert kernel(outliers, tensor) / kernel(outliers, block) < 1.25
    assert kernel(outliers, block) / kernel(outliers, both) > 1.5


def test_no_scale_makes_up_for_three_bits() -> None:
    """What quantised q, k and v cost adds up as squares, and any scheme costs far more than bf16."""
    both = "e4m3, one a block, rotated"
    for family, found in DOCUMENT["families"].items():
        parts = [kernel(family, f"{both}, {part} alone", "inputs") for part in ("q and k", "v")]
        assert math.hypot(*parts) == pytest.approx(kernel(family, both, "inputs"), rel=0.05)
        whole = [e["inputs"] for name, e in found["errors"].items() if "one a" in name and "alone" not in name]
        assert min(whole) > 5 * kernel(family, "bf16", "inputs")


def test_the_sums_of_a_gpu_are_those_of_the_model() -> None:
    sums: dict[str, Any] = json.loads((ROOT / "measurements/h200/fp8-sums.json").read_text(encoding="utf-8"))
    model, gpu = sums["emulator"], sums["gpu"]
    assert {of[f"lost {side} 1"] for of in (model, gpu) for side in ("above", "below")} == {14}
    for name, error in gpu["errors"].items():
        if not name.startswith("16384"):
            assert error["rms"] == pytest.approx(model["errors"][name]["rms"], rel=0.01), name
