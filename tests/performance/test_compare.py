"""`python -m pytest_flashattn compare`: what decides, what is refused, what it prints, how it exits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_flashattn.__main__ import main

H200 = {"device": "NVIDIA H200", "kind": "cuda", "driver": "580.159.04"}
BASELINE = "reference_kernels:flash_attention"
FORWARD, BACKWARD = (
    f"flashattn-suite/performance::test_{name}[bf16-b1-h1-q64-k64-d64]" for name in ("forward", "backward")
)
Write = Callable[..., str]


def point(
    seconds: float, baseline: float | None = 1e-3, width: float = 0.01, reference: str = BASELINE
) -> dict[str, Any]:
    """The extra_info of one benchmark; width: of either interval, on either side."""
    info: dict[str, Any] = {"clock": "device", "tflops": 1 / seconds}
    info["seconds"] = [seconds, seconds * math.exp(-width), seconds * math.exp(width)]
    if baseline is not None:
        ratio = seconds / baseline
        info |= {"reference": reference, "reference_seconds": baseline}
        info["ratio"] = [ratio, ratio * math.exp(-width), ratio * math.exp(width)]
    return info


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, points: dict[str, dict[str, Any]], machine: dict[str, Any] = H200) -> str:
        benchmarks = [{"fullname": key, "extra_info": info, "stats": {}} for key, info in points.items()]
        benchmarks.append({"fullname": "test_of_the_user", "extra_info": {}, "stats": {}})
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"machine_info": {"flashattn": machine}, "benchmarks": benchmarks}))
        return str(path)

    return write


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    status = main(["compare", *args])
    return status, capsys.readouterr().out


def verdicts(text: str) -> list[str]:
    """The last column of the table."""
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [row.strip("| ").rpartition("|")[2].strip() for row in rows]


@pytest.mark.parametrize(
    ("now", "options", "verdict", "status"),
    [
        (point(1.00e-3), (), "same", 0),
        (point(1.10e-3), (), "slower", 1),
        (point(0.90e-3), (), "faster", 0),
        (point(1.05e-3), (), "undecided", 3),
        (point(1.10e-3), ("--fail-on=15%",), "same", 0),
        (point(1.05e-3), ("--fail-on=2.5%",), "slower", 1),
        (point(1.10e-3, width=0.06), (), "undecided", 3),
    ],
)
def test_the_interval_decides(
    write: Write,
    capsys: pytest.CaptureFixture[str],
    now: dict[str, Any],
    options: tuple[str, ...],
    verdict: str,
    status: int,
) -> None:
    old, new = write("old", {FORWARD: point(1e-3)}), write("new", {FORWARD: now})
    found, text = run(capsys, old, new, *options)
    assert (found, verdicts(text)) == (status, [verdict])


def test_a_slower_machine_is_no_regression(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """The ratio to the baseline of the run decides; the time itself is shown."""
    old, new = write("old", {FORWARD: point(1e-3)}), write("new", {FORWARD: point(1.3e-3, baseline=1.3e-3)})
    status, text = run(capsys, old, new)
    assert (status, verdicts(text)) == (0, ["same"])
    assert "| +30.0% | +30.0% | ratio | +0.0% |" in text
    assert "the baseline itself changed by more than the limit" in text


def test_a_regression_that_the_machine_hides_is_found(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write("old", {FORWARD: point(1e-3)}), write("new", {FORWARD: point(1e-3, baseline=0.8e-3)})
    status, text = run(capsys, old, new)
    assert (status, verdicts(text)) == (1, ["slower"])


@pytest.mark.parametrize("reference", [None, "peers:other"])
def test_without_the_same_baseline_the_time_decides(
    write: Write, capsys: pytest.CaptureFixture[str], reference: str | None
) -> None:
    now = point(1.1e-3, baseline=None) if reference is None else point(1.1e-3, baseline=1.1e-3, reference=reference)
    status, text = run(capsys, write("old", {FORWARD: point(1e-3)}), write("new", {FORWARD: now}))
    assert (status, verdicts(text)) == (1, ["slower"])
    assert "| time | +10.0% |" in text
    assert f"baselines differ ({BASELINE}, {reference or 'none'}): times compared" in text


def test_a_point_that_is_gone_fails_and_a_new_one_does_not(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    one, both = {FORWARD: point(1e-3)}, {FORWARD: point(1e-3), BACKWARD: point(2e-3)}
    status, text = run(capsys, write("old", both), write("new", one))
    assert (status, verdicts(text)) == (1, ["gone", "same"])
    status, text = run(capsys, write("old", one), write("new", both))
    assert (status, verdicts(text)) == (0, ["same", "new"])


def test_markdown_has_the_worst_first(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    old = write("old", {FORWARD: point(1e-3), BACKWARD: point(1e-3)})
    new = write("new", {FORWARD: point(1e-3), BACKWARD: point(1.2e-3)})
    status, text = run(capsys, old, new)
    lines = text.splitlines()
    assert status == 1
    assert lines[0] == "**Attention performance: 1 slower, 1 same** (limit 5 %, NVIDIA H200)"
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    assert lines[4].startswith("| backward[bf16-b1-h1-q64-k64-d64] | 1000 | 833.3 | +20.0% | +0.0% | ratio | +20.0% |")
    assert "test_of_the_user" not in text


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (H200 | {"device": "NVIDIA H100 80GB HBM3"}, "device 'NVIDIA H200' against 'NVIDIA H100 80GB HBM3'"),
        (H200 | {"driver": "550.1"}, "driver '580.159.04' against '550.1'"),
    ],
)
def test_another_machine_is_refused_unless_forced(
    write: Write, capsys: pytest.CaptureFixture[str], machine: dict[str, Any], says: str
) -> None:
    old, new = write("old", {FORWARD: point(1e-3)}), write("new", {FORWARD: point(1e-3)}, machine)
    with pytest.raises(SystemExit) as end:
        main(["compare", old, new])
    assert end.value.code == 2
    assert f"not the same machine: {says}; --force" in capsys.readouterr().err
    status, text = run(capsys, old, new, "--force")
    assert status == 0
    assert f"Forced: {says}." in text


def test_another_clock_is_refused(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write("old", {FORWARD: point(1e-3)}), write("new", {FORWARD: point(1e-3) | {"clock": "wall"}})
    with pytest.raises(SystemExit):
        main(["compare", old, new])
    assert "clock device against wall" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        ("{", "is no JSON"),
        ("{}", "is no measurement of chapter performance (no 'machine_info')"),
        ('{"machine_info": {"flashattn": {}}, "benchmarks": []}', "holds no measurement of chapter performance"),
    ],
)
def test_a_file_that_is_none_of_ours_is_one_sentence(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, says: str
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as end:
        main(["compare", write("old", {FORWARD: point(1e-3)}), str(path)])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5", "0%", "-5%", "5 %", "five%"])
def test_a_limit_is_a_percentage(write: Write, capsys: pytest.CaptureFixture[str], text: str) -> None:
    old = write("old", {FORWARD: point(1e-3)})
    with pytest.raises(SystemExit) as end:
        main(["compare", old, old, f"--fail-on={text}"])
    assert end.value.code == 2
    assert f"{text!r} is no percentage; write for instance 5%" in capsys.readouterr().err
