"""The script that measures the FP8 kernels, as far as no GPU is needed: its cells, and that kernels can serve them."""

from __future__ import annotations

import inspect
import itertools
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "measurements"))
import fp8
import fp8_forms
import fp8_peers
import fp8_quantisers
import kernel_tables

from pytest_flashattn.cases import Case
from pytest_flashattn.inputs import make_inputs
from reference_kernels.fp8.configs import QUANTISERS
from reference_kernels.fp8.hopper import launch
from reference_kernels.fp8.hopper.configs import TABLE, lookup
from reference_kernels.fp8.hopper.interleaving import interleave_keys
from reference_kernels.fp8.hopper.launch import supports
from reference_kernels.fp8.quantiser import BLOCK, by_columns


@pytest.mark.parametrize("part", fp8.SCRIPT.parts)
def test_cells_are_distinct_and_have_a_function(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("check", "repeat", "warm", "speed", "compiled", "tiles", "quantisers", "prepare"):
        signature = inspect.signature(getattr(fp8, name))
        monkeypatch.setattr(fp8, name, lambda *words, s=signature: asked.append(s.bind(*words)) or {"ok": True})
    planned = [*fp8.SCRIPT.parts[part](), *fp8.SCRIPT.ahead.get(part, list)()]
    assert len(set(planned)) == len(planned)
    for cell in planned:
        assert fp8.run_cell(cell)["ok"]
        for case in (word for word in cell.split() if word.startswith("e4m3-")):
            assert Case.parse(case).id == case
    assert len(asked) == len(planned)


def test_the_hopper_kernel_can_serve_the_cells_that_name_it() -> None:
    cells = [cell.split() for cell in fp8.check_cells()]
    layouts: dict[str, str] = {}
    for _, form, case_id in cells:
        if form == "interleaved":
            layouts.setdefault(Case.parse(case_id).layout, case_id)
    assert len(layouts) > 3
    for case_id in layouts.values():
        case = Case.parse(case_id)
        x = make_inputs(case, "cpu", "bhsd")
        for v, interleaved in ((by_columns(x.v), False), (interleave_keys(x.v), True)):
            said = supports(x.q, x.k, v, scale=1.0, causal=case.causal, v_interleaved=interleaved)
            assert said == "q is not on a GPU of compute capability 9.0", (case_id, said)


def test_columns_are_as_the_quantiser_stores_them() -> None:
    x = make_inputs(Case.parse("e4m3-b1-h2-q33-k33-d64-descale.head"), "cpu", "bhsd").v
    v = by_columns(x)
    assert (v.float() == x.float()).all()
    assert v.stride() == (2 * 64 * 48, 64 * 48, 1, 48)


def test_every_candidate_is_compiled_ahead() -> None:
    found = {tuple(map(int, cell.split()[1:])) for cell in fp8.compile_cells()}
    assert found == {(d, c, i) for d in TABLE for c in (0, 1) for i in range(len(fp8.candidates(d, bool(c))))}


def test_quantisers_are_timed_in_candidates_that_differ() -> None:
    for how, d in fp8_quantisers.QUANTISERS:
        found = fp8_quantisers.quantiser_candidates(d, "block", how)
        assert found["table"] == QUANTISERS[90][how][d]
        assert len(set(found.values())) == len(found) > 1, (how, d)


def test_the_summary_keeps_widths_apart() -> None:
    cells = [f"quantise {d} block rows" for d in (64, 128)]
    answers = [{"cell": cell, "ok": True, "shares of copy": {"table": 0.5 + 0.1 * n}} for n, cell in enumerate(cells)]
    found = fp8.summary(answers)
    assert found["quantise block rows table / copy d64"]["least"] == 0.5
    assert found["quantise block rows table / copy d128"]["least"] == 0.6


def test_a_peer_that_cannot_be_had_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("cudnn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    x = torch.zeros(1, 1, 16, 64).to(torch.float8_e4m3fn)
    arguments = {"q": x, "k": x, "v": x} | {f"{name}_descale": torch.ones(()) for name in "qkv"}
    assert fp8_peers.available(arguments, scale=1.0, causal=False) == {}
    said = capsys.readouterr().err
    assert all(f"no {name}: " in said for name in ("cudnn fp8", "cudnn fp8, no amax", "fa3 fp8"))


def test_candidates_are_other_tiles() -> None:
    for d, causal in itertools.product(TABLE, (False, True)):
        found = fp8.candidates(d, causal)
        assert found["table"] == lookup(d, causal=causal)
        assert len(set(found.values())) == len(found) > 1
        for config in found.values():
            assert BLOCK % config.block_n == 0
            assert not config.ahead or (config.pin and not config.ping_pong)


def test_forms_and_candidates_are_told_apart() -> None:
    assert not set(fp8_forms.FORMS) & set(fp8_forms.CANDIDATES)
    assert {name: fp8_forms.sums_of(name) for name in (*fp8_forms.FORMS, "table")} == {
        "interleaved": "14 bits", "ordered": "14 bits", "plain": "14 bits a tile", "table": "14 bits",
    }  # fmt: skip
    names = [*fp8_forms.FORMS, *fp8_forms.CANDIDATES]
    assert [name for name in names if not fp8_forms.is_interleaved(name)] == ["ordered", "plain"]


@pytest.mark.parametrize("causal", [False, True])
def test_a_candidate_is_launched_in_its_tile_and_a_form_in_the_one_that_runs(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(launch, "forward", lambda *x, **options: asked.append(options))
    q = torch.zeros(1, 1, 16, 128)
    found = fp8_forms.candidates(128, causal)
    for name in ("interleaved", "ordered", *found):
        fp8_forms.kernel_named(name)(q, q, q, causal=causal, scale=1.0)
    assert [options["config"] for options in asked] == [None, None, *found.values()]
    assert [options["v_interleaved"] for options in asked] == [True, False, *(True for _ in found)]
    assert all(options["causal"] is causal and options["scale"] == 1.0 for options in asked)


def test_the_table_of_speeds_reads_what_a_cell_of_it_says() -> None:
    """The names of a cell are those that the script gives."""
    report: dict[str, list[dict[str, object]]] = {"cells": []}
    for cell in fp8.speed_cells():
        _, d, causal, n, _ = cell.split()
        peers = dict(zip(("cudnn fp8", "fa3 fp8", "best peer"), (1.5, 1.25, 1.0), strict=True))
        ratios = {f"interleaved/{peer}": ratio for peer, ratio in peers.items()}
        ratios["interleaved/bf16"] = 1.75 if int(n) >= 4096 else 9.0
        speeds = dict(zip(fp8_forms.FORMS, (int(d) + int(causal) + int(n), 7, 1), strict=True))
        speeds["rotated, with quantisers"] = 5
        report["cells"].append({"cell": cell, "tflops": speeds, "ratios": ratios})
    lines = kernel_tables.fp8_speed(report)
    assert lines[3] == "| 64, causal | 1089 | 2113 | 4161 | 8257 | 16449 | 1.75 | 1.50 | 1.25 | 1.00 | 7 | 5 |"
    assert lines[-1] == "| all |  |  |  |  |  | **1.75** | **1.50** | **1.25** | **1.00** |  |  |"
    assert len(lines) == 9
