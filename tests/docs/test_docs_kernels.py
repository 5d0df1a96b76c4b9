"""docs/kernels.md says only what the files under measurements/ hold, and the tile tables are what was measured."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from typing import Any

import pytest
import torch
from documents import ROOT, read

sys.path.insert(0, str(ROOT / "measurements"))
import hopper
import hopper_backward
import hopper_proof
import kernel_tables
import sanitizers

PAGE = read("docs/kernels.md")
WORDS = " ".join(PAGE.split())


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
    plain = dict(re.findall(r"^\| (forward|backward), all \|.*\*\*([\d.]+)\*\* \| \*\*[\d.]+\*\* \|$", PAGE, re.M))
    rows = re.findall(r"^\| (bf16, as above|one pass, D 64 and 128) \|(.*)\|$", PAGE, re.M)
    fastest = {name: re.findall(r"\*\*([\d.]+)\*\*", cells)[1] for name, cells in rows}  # the second is cuDNN
    forward, backward = fastest["bf16, as above"], fastest["one pass, D 64 and 128"]
    readme = " ".join(read("README.md").split())
    assert f"forward {forward} and backward {backward} times as fast as cuDNN" in readme
    assert (
        f"forward {float(plain['forward']):.1f} and backward {float(plain['backward']):.1f} times as fast as Flash"
        in readme
    )


def test_seeds_of_the_readme() -> None:
    """The bundled kernels, as they are chosen, over the seeds."""
    found = report("calibration-flash_attention")
    assert "with {seeds} seeds".format(**found) in " ".join(read("README.md").split())
    assert not any(found[what] for what in ("failures", "unmet", "unfinished", "died", "broke the context"))


@pytest.mark.parametrize("row", report("tune")["rows"], ids=lambda row: f"{row['kernel']}-d{row['d']}")
def test_tiles_are_the_measured_ones(row: dict[str, Any]) -> None:
    configs = pytest.importorskip("reference_kernels.configs")
    chosen = configs.lookup(row["kernel"], 90, torch.bfloat16, row["d"])
    scores = {tuple(found["config"]): found["score"] for found in row["candidates"]}
    assert scores[tuple(chosen)] <= 1.001 * min(scores.values())


def test_number_of_candidates() -> None:
    counted = sum(len(row["candidates"]) for row in report("tune")["rows"])
    assert f"{counted} timed candidates" in PAGE


@pytest.mark.parametrize("marker", kernel_tables.tables(ROOT / "measurements/h200"))
def test_tables_are_what_the_files_hold(marker: str) -> None:
    lines = kernel_tables.tables(ROOT / "measurements/h200")[marker]
    assert f"<!-- {marker} -->\n" + "\n".join(lines) + "\n\n" in PAGE, "run python tests/docs/refresh.py"


KNOWN = {"hopper-forward-check": ["check online fp16-b1-h2-q400-k900-d256-ascending drawn"]}
"""Cells that were not right, which the page says."""


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("hopper-forward", hopper.speed_cells),
        ("hopper-forward-check", hopper.check_cells),
        ("hopper-backward", hopper_backward.speed_cells),
        ("hopper-backward-check", hopper_backward.check_cells),
    ],
)
def test_every_cell_of_the_hopper_kernels_was_run_and_is_right(name: str, planned: Any) -> None:
    cells = report(name)["cells"]
    assert sorted(cell["cell"] for cell in cells) == sorted(planned())
    wrong = [cell for cell in cells if not cell["ok"]]
    assert all(cell["worst"] <= 1 for cell in cells if "worst" in cell)
    assert [cell["cell"] for cell in wrong] == KNOWN.get(name, [])
    if name.endswith("check"):
        assert f"{len(cells) - len(wrong)} of {len(cells)}" in WORDS
    for cell in wrong:
        beyond = {quantity: ratio - 1 for quantity, ratio in cell["ratios"].items() if ratio > 1}
        assert set(beyond) == {"lse bound"}
        assert f"exceeds the bound by {100 * beyond['lse bound']:.2f} %" in WORDS


def test_hopper_repeats() -> None:
    counts = []
    for name in ("hopper-forward-check", "hopper-backward-check"):
        repeats = [cell for cell in report(name)["cells"] if cell["cell"].startswith("repeat")]
        assert all(cell["calls"] == 200 and cell["differing"] == 0 for cell in repeats)
        counts.append(len(repeats))
    assert f"In {counts[0]} of the forward's and {counts[1]} of the two passes' the same call, 200 times" in WORDS
    assert {cell["cell"].split()[1] for cell in repeats} == {"twopass"}


def test_the_hopper_kernels_through_the_public_function() -> None:
    for name in ("hopper", "hopper_deterministic"):
        found = report(f"conformance-{name}")
        assert found["complete"]
        assert set(found["totals"]) == {"verified", "declared"}
        assert f"{found['totals']['verified']} verified each" in WORDS


def test_a_thousand_repeats_and_graphs() -> None:
    ours = [cell for cell in report("hopper-repeats")["cells"] if "specialised" not in cell["cell"]]
    assert all(cell["calls"] == 1000 and cell["differing"] == 0 for cell in ours)
    assert f"two passes, in {len(ours)} settings" in WORDS
    assert sorted(cell["cell"] for cell in report("hopper-graphs")["cells"]) == sorted(hopper_proof.graphs_cells())
    assert all(cell["ok"] for cell in report("hopper-graphs")["cells"])


def test_sanitizers() -> None:
    found = {cell["cell"]: cell for cell in (*report("hopper-sanitizer")["cells"], *report("hopper-consan")["cells"])}
    for tool in ("memcheck", "consan"):
        own = [cell for name, cell in found.items() if name.startswith(tool)]
        assert own
        assert all(cell["ok"] for cell in own)
        assert all(found[f"control {of} {name}"]["ok"] for of, name in sanitizers.WRONG if of == tool)
        assert all(found[f"spared {of} {name}"]["ok"] for of, name in sanitizers.RIGHT if of == tool)
    assert not found["spared racecheck handed"]["ok"]
    run = {name.split()[1] for name in found if name.startswith("consan")}
    assert run == set(hopper_proof.INSTRUMENTED), "all of them"


def tile_area(n: int, d: int, causal: bool) -> int:
    """Scores that the consumers of a forward on 16k tokens multiply."""
    schedule = pytest.importorskip("reference_kernels.hopper.schedule")
    launch = pytest.importorskip("reference_kernels.hopper.launch")
    work = pytest.importorskip("reference_kernels.hopper.work")
    config = pytest.importorskip("reference_kernels.hopper.configs").lookup(d, causal=causal, lq=n, lk=n)
    heads = 2048 // d
    problem = launch.problem_of(16384 // (n - n % 2), heads, heads, n, n, d, config, causal=causal)
    area = 0
    for tile in (code & 0xFFFFF for tiles in schedule.assign(problem, 132) for code in tiles):
        blocks = schedule.key_blocks(problem, tile)
        columns = blocks * config.block_n
        if few := work.few_columns(problem.short, config.block_n):
            columns = max(blocks - 1, 1) * config.block_n + few
        area += 64 * schedule.consumers_with_rows(problem, tile) * columns
    return area


def test_weak_points_of_the_hopper_kernels() -> None:
    forward, backward = report("hopper-forward"), report("hopper-backward")
    lost, more = {}, {}
    for n in (2048, 8192):
        cells = [
            cell for cell in forward["cells"] if cell["cell"].startswith("loss") and cell["cell"].split()[3] == str(n)
        ]
        lost[n] = 100 * (1 - min(cell["ratios"]["plus/even"] for cell in cells))
        problems = [(d, causal) for d in (64, 128, 256) for causal in (False, True)]
        more[n] = sorted(100 * (tile_area(n + 1, *p) / tile_area(n, *p) - 1) for p in problems)
    assert f"lose up to {lost[2048]:.0f} % at N = 2048 and {lost[8192]:.0f} % at N = 8192" in WORDS
    assert f"multiply {more[2048][0]:.0f} to {more[2048][-1]:.0f} % and up to {more[8192][-1]:.0f} % more" in WORDS
    narrow = [cell for cell in backward["cells"] if cell["cell"].split()[1] in ("64", "128")]
    ratios = [cell["ratios"]["twopass/cudnn"] for cell in narrow]
    mean = statistics.geometric_mean(ratios)
    assert f"D = 64 and 128 reach {mean:.2f} of cuDNN in the geometric mean and {min(ratios):.2f} at the least" in WORDS
    assert f"keeps the host busy for {forward['cells'][-1]['microseconds']:.0f} µs" in WORDS
    assert {r["versions"]["triton"] for r in (forward, backward)} == {"3.6.0"}
    assert all(
        "fa3" in cell["tflops"]
        for cell in forward["cells"]
        if cell["cell"].startswith("speed") and "bf16" in cell["cell"]
    )


def test_what_bounds_fp8_and_what_was_tried() -> None:
    profile, orders = report("fp8-profile"), report("fp8-orders")
    narrow, ahead, turns = profile["kernels"]
    assert f"busy for {narrow['exponential units busy, %']:.0f} % of the time" in WORDS
    most = max(kernel["SM busy, %"] for kernel in (ahead, turns))
    assert f"busy for more than {math.ceil(most)} %" in WORDS
    waiting = max(kernel["why their warps wait, % of that time"]["wait"] for kernel in (ahead, turns))
    assert f"spend {waiting:.0f} % of their time waiting" in WORDS
    left_out = profile["TFLOP/s with a part of the softmax left out, dense, N 8192, by D and order"]
    alone = left_out["64, three consumers, ping-pong"]
    assert f"would run at {alone['exponentials']} TFLOP/s instead of {alone['nothing']}" in WORDS
    found = orders["orders, by D and causal"]
    two, promoted = "two consumers, ping-pong", "two consumers, ping-pong, promoted"
    gains = [
        100 * (found["64 0"]["three consumers, ping-pong"] / found["64 0"][two] - 1),
        100 * (found["128 0"]["ahead"] / found["128 0"][two] - 1),
    ]
    assert f"instead of two: {gains[0]:.0f} % at D = 64" in WORDS
    assert f"of its softmax: {gains[1]:.0f} % at D = 128" in WORDS
    assert all(found[setting]["ahead"] < max(found[setting].values()) for setting in ("64 0", "64 1", "128 1"))
    costs = [100 * (1 - by[promoted] / max(by.values())) for by in found.values() if promoted in by]
    assert f"cost it {min(costs):.0f} to {max(costs):.0f} % of its speed" in WORDS
    for by in orders["the softmax, by D and causal"].values():
        assert by["row maximum and sums as trees"] < by["as it is"]
    for by in orders["also tried, dense, by D and order"].values():
        assert all(speed <= by["as it is"] for speed in by.values())


def test_fp8_on_a_gpu() -> None:
    cells = report("fp8-check")["cells"]
    assert all(cell["ok"] for cell in cells)
    assert f"{len(cells)} of {len(cells)} cells of the latter" in WORDS
    for kernel, said in (("triton", "({} verified)"), ("hopper", "({} each,"), ("hopper_interleaved", "({} each,")):
        found = report(f"conformance-fp8-{kernel}")["totals"]
        assert set(found) == {"verified", "declared"}
        assert said.format(found["verified"]) in WORDS


def test_one_pass_is_the_faster_backward_where_it_runs() -> None:
    for cell in report("hopper-backward")["cells"]:
        if int(cell["cell"].split()[1]) < 256:
            assert cell["ms"]["onepass"] <= cell["ms"]["twopass"], cell["cell"]


def test_spills_of_the_hopper_kernels() -> None:
    expectations = pytest.importorskip("reference_kernels.compiling.expectations")
    found, plain = (
        json.loads((ROOT / f"measurements/{name}.json").read_text(encoding="utf-8"))["results"]
        for name in ("compiled-hopper", "compiled")
    )
    most: dict[tuple[str, int], int] = {}
    for row in found + plain:
        key = row["name"], row.get("capability", 90)
        most[key] = max(most.get(key, 0), row["spills"])
    budgets = {key: size for key, (size, _) in expectations.SPILL_BUDGETS.items()}
    assert budgets == {key: size for key, size in most.items() if size}
    spills = {(row["name"], row["triton"]): row["spills"] for row in found}
    causal = "hopper-onepass-bf16-d128-causal"
    old, new = spills[causal, "3.6.0"], spills[causal, "3.9.0"]
    assert f"spills {new:,} bytes a thread where 3.6.0 spills {old:,}" in WORDS
    rolled = {r["triton"]: r for r in found if r["name"] == "hopper-dq-bf16-d256-causal-ragged-grouped"}
    old, new = (rolled[version]["spills"] for version in ("3.6.0", "3.9.0"))
    assert f"{old:,} bytes a thread under 3.6.0 and {new:,} under 3.9.0" in WORDS
    old, new = (rolled[version]["local_in_loops"] for version in ("3.6.0", "3.9.0"))
    assert f"with {old} and {new} accesses inside its loops" in WORDS


def test_the_races_of_the_specialised_kernel() -> None:
    found = report("specialised-races")
    assert {row["calls"] for row in found["rows"]} == {2000}
    assert f"up to {max(row['differing'] for row in found['rows'])} differ from the first" in WORDS
