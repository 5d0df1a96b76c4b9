"""The script that measures the FP8 kernels, as far as no GPU is needed: its cells, and that kernels can serve them."""

from __future__ import annotations

import inspect
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

from pytest_flashattn.cases import Case
from pytest_flashattn.inputs import make_inputs
from reference_kernels.fp8.configs import QUANTISERS
from reference_kernels.fp8.hopper.configs import TABLE
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
        if form == "direct-interleaved":
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
    assert {int(cell.split()[3]) for cell in fp8.compile_cells()} >= set(
        range(max(len(fp8.candidates(d)) for d in TABLE))
    )


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
    for d in TABLE:
        found = fp8.candidates(d)
        assert found["table"] == TABLE[d]
        assert len(set(found.values())) == len(found)
        assert all(BLOCK % config.block_n == 0 for config in found.values())
        assert d < 256 or not any(config.promote for config in found.values())


def test_forms_and_candidates_are_told_apart() -> None:
    assert not set(fp8_forms.FORMS) & set(fp8_forms.CANDIDATES)
    for d, config in TABLE.items():
        assert fp8_forms.sums_of("table", d) == ("14 bits a tile" if config.promote else "14 bits")
    assert fp8_forms.sums_of("direct-interleaved", 64) == "14 bits"
    assert fp8_forms.sums_of("plain", 64) == fp8_forms.sums_of("promoted", 64) == "14 bits a tile"
    assert [name for name in fp8_forms.FORMS if fp8_forms.is_interleaved(name)] == fp8_forms.forms_of(64)[:2]
