"""FP8 in the contract: cases, inputs and their descales, who serves them, what is declared and what is unmet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracles
from oracles.quantise import PER, dequantise
from pytest_flashattn import capability, examination, matrices, strategies, trial
from pytest_flashattn import run as run_suite
from pytest_flashattn.cases import Case
from pytest_flashattn.descales import Blocks
from pytest_flashattn.features import DESCALES, DTYPES, FP8, FP8_SUMS
from pytest_flashattn.implementation import load
from pytest_flashattn.inputs import TORCH_DTYPES, make_inputs
from pytest_flashattn.support import Support
from tests.mutants.core import Core
from tests.mutants.core_fp8 import Fp8Core

CASE = "e4m3-b2-h4-kv2-q130-k200-d64-causal-descale.{}"


def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor:
    """Dequantises everything first, blocks of 128 rows, P in fp32: what a user may have to begin with."""
    if q_descale is None or k_descale is None or v_descale is None:
        raise NotImplementedError("FP8 only")
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    q = dequantise(q, q_descale)
    k, v = (dequantise(x, d)[:, heads] for x, d in ((k, k_descale), (v, v_descale)))
    return (torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v).bfloat16()


# -- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", DESCALES)
def test_an_id_says_what_shares_a_descale(word: str) -> None:
    case = Case.parse(CASE.format(word))
    assert case.descale == word
    assert Case.parse(case.id) == case
    assert f"descale_{word}" in case.features


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("e4m3-b1-h1-q8-k8-d64", "descales come with e4m3 and e5m2"),
        ("bf16-b1-h1-q8-k8-d64-descale.head", "descales come with e4m3 and e5m2"),
        ("e4m3-b1-h1-q8-k8-d64-descale.row", "descale='row' is unknown"),
    ],
)
def test_descales_and_their_dtypes_come_together(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Case.parse(text)


def test_the_default_matrix_has_every_granularity_in_both_formats_and_stays_small() -> None:
    cases = [c for name in ("fp8", "fp8.powers_of_two") for c in matrices.cases_named(name, "default", 0)]
    assert {(c.dtype, c.descale) for c in cases} == {(dtype, word) for dtype in FP8 for word in DESCALES}
    assert len(cases) <= 30
    assert sum(len(matrices.cases_named(n, "smoke", 0)) for n in ("fp8", "fp8.powers_of_two")) <= 6


# -- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "q", "kv"),
    [
        ("tensor", (), ()),
        ("group", (2, 2), (2, 2)),
        ("head", (2, 4), (2, 2)),
        ("block", (2, 4, 2), (2, 2, 4)),
    ],
)
def test_descales_have_the_shapes_of_the_contract_and_differ(
    word: str, q: tuple[int, ...], kv: tuple[int, ...]
) -> None:
    inputs = make_inputs(Case.parse(CASE.format(word)), blocks=Blocks(128, 64))
    given = inputs.options()
    assert set(given) == {"causal", "q_descale", "k_descale", "v_descale"}
    assert [tuple(given[f"{name}_descale"].shape) for name in "qkv"] == [q, kv, kv]
    assert all(given[f"{name}_descale"].dtype == torch.float32 for name in "qkv")
    for name in "qkv":
        scales = given[f"{name}_descale"].flatten()
        assert len(scales) == 1 or scales.max() > 1.2 * scales.min()
    assert float(given["v_descale"].max()) > 1.5 * float(given["k_descale"].max())
    assert inputs.q.dtype == torch.float8_e4m3fn
    assert inputs.dout.dtype == torch.bfloat16


def test_exact_inputs_are_stored_numbers_times_descales() -> None:
    inputs = make_inputs(Case.parse(CASE.format("block")), blocks=Blocks(128, 64))
    q, k, v = inputs.exact()
    of_q, of_k, of_v = (inputs.options()[f"{name}_descale"] for name in "qkv")
    assert torch.equal(q[1, 3, 128], inputs.q[1, 3, 128].double() * float(of_q[1, 3, 1]))
    assert torch.equal(k[0, 1, 63], inputs.k[0, 1, 63].double() * float(of_k[0, 1, 0]))
    assert torch.equal(v[1, 0, 199], inputs.v[1, 0, 199].double() * float(of_v[1, 0, 3]))
    plain = make_inputs(Case.parse("bf16-b1-h1-q8-k8-d64"))
    assert all(a is b for a, b in zip(plain.exact(), (plain.q, plain.k, plain.v), strict=True))


def test_blocks_of_zeros() -> None:
    inputs = make_inputs(Case.parse("e4m3-b1-h2-q300-k300-d64-descale.block-zeroblocks"))
    assert inputs.options()["q_descale"][0, :, 1].tolist() == [1, 1]
    assert inputs.options()["v_descale"][0, 1].tolist() == [1, 1, 1]
    assert not any(x.float().isnan().any() for x in (inputs.q, inputs.k, inputs.v))


@pytest.mark.parametrize("layout", ["swapped", "qkv", "padded", "unaligned", "expanded", "dmajor", "mixed", "headless"])
def test_every_layout_can_be_in_fp8(layout: str) -> None:
    case = Case.parse(f"e4m3-b2-h4-kv2-q65-k65-d64-descale.block-{layout}")
    verdict = trial.run_check("fp8.matches_oracle", load(Fp8Core(), device="cpu"), case)
    assert verdict.status == "verified", verdict.text()


# -- who serves it ----------------------------------------------------------------------------------------------------


def test_three_descales_in_the_signature_are_a_promise() -> None:
    support = load(attn).support
    assert set(FP8) <= support.dtypes
    assert {f for f in support.features if f.startswith("descale")} == {
        "descale_tensor", "descale_head", "descale_block",
    }  # fmt: skip

    def two(q: Tensor, k: Tensor, v: Tensor, *, q_descale: Tensor, k_descale: Tensor) -> Tensor:
        return q

    with pytest.raises(ValueError, match="needs q_descale, k_descale"):
        load(two)

    def needed(q, k, v, *, q_descale, k_descale, v_descale): ...

    assert load(needed).support.dtypes == set(FP8)
    assert "backward" not in load(needed).support.features


def test_flash_attention_3_has_descales_by_kv_head_and_2_has_none() -> None:
    def three(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
              window_size=(-1, -1), softcap=0.0): ...  # fmt: skip

    def two(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0): ...

    found = load(three)
    assert found.convention.name == "flash-attn"
    assert {f for f in found.support.features if f.startswith("descale")} == {"descale_group"}
    assert found.support.dtypes == {"fp16", "bf16", "e4m3"}
    assert "P times 256 in FP8; FP8 products summed in 14 bits" in found.describe()
    inputs = make_inputs(Case.parse(CASE.format("group")))
    _, keywords = found.convention.arguments(inputs.q, inputs.k, inputs.v, inputs.options())
    assert tuple(keywords["q_descale"].shape) == (2, 2)
    assert load(two).support.dtypes == {"fp16", "bf16"}


def test_whoever_says_nothing_of_fp8_serves_none_of_it() -> None:
    assert Support().dtypes == set(DTYPES)
    for word in DESCALES:
        gap = trial.gate(load(Core(), device="cpu"), Case.parse(CASE.format(word)))
        assert gap is not None
        assert gap.status == "declared"


def test_gradients_are_declared_missing() -> None:
    support = replace(Fp8Core.__flashattn__, features=Fp8Core.__flashattn__.features | {"backward"})
    case = Case.parse(CASE.format("head"))
    assert support.gap(case) is None
    assert "gradients of FP8" in str(support.gap(case, ("backward",)))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("p_scale", 0, "p_scale must be positive"),
        ("q_block", -1, "q_block must be positive"),
        ("fp8_sums", "fp22", "one of fp32, 14 bits, 14 bits a tile, not 'fp22'"),
        ("dtypes", {"e3m4"}, "unknown e3m4"),
    ],
)
def test_a_wrong_declaration_gets_one_sentence(field: str, value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Support(**{field: value})


def test_an_old_gpu_lacks_the_hardware_and_a_cpu_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(CASE.format("head"))
    subject = load(Fp8Core(), device="cpu")
    assert trial.gate(subject, case) is None
    subject.device = torch.device("cuda:0")
    monkeypatch.setattr(trial, "present", lambda kind: True)
    monkeypatch.setattr(trial, "shortage", lambda case, device: None)
    for have, unmet in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        device = capability.Device("cuda", "GPU", have)
        monkeypatch.setattr(capability, "probe", lambda setting, device=device: device)
        gap = trial.gate(subject, case)
        assert (gap is not None) is unmet
        if gap is not None:
            assert (gap.status, gap.reason) == ("unmet", "fp8 needs compute capability 8.9; GPU has 8.0")
        assert trial.gate(subject, replace(case, dtype="bf16", descale=None)) != gap or gap is None


# -- on trial ---------------------------------------------------------------------------------------------------------


def test_an_implementation_of_a_few_lines_is_verified() -> None:
    support = replace(load(attn).support, features=frozenset(f"descale_{w}" for w in DESCALES) | {"gqa", "cross"})
    report = run_suite(attn, chapters=["fp8"], matrix="smoke", support=replace(support, p_dtype="fp32"), device="cpu")
    assert {r.verdict.status for r in report.results} == {"verified", "declared"}  # causal is declared


def test_the_bound_knows_what_is_declared() -> None:
    """P in bf16 is judged more strictly than P in e4m3, and sums in 14 bits less."""
    case = Case.parse("e4m3-b1-h2-q130-k200-d64-descale.block")
    widths = []
    for change in ({"p_dtype": "bf16"}, {}, {"fp8_sums": "14 bits a tile"}, {"fp8_sums": "14 bits"}):
        subject = load(Fp8Core(), device="cpu", support=replace(Fp8Core.__flashattn__, **change))
        truth = examination.truth(subject, examination.inputs_for(subject, case))["o"]
        widths.append(float(truth.limit(3).mean()))
    assert widths[0] < 0.5 * widths[1]
    assert widths[1] < widths[2] < widths[3] < 2 * widths[1]


def test_the_output_is_bf16() -> None:
    def wrong(q, k, v, *, q_descale, k_descale, v_descale):  # type: ignore[no-untyped-def]
        return attn(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale).float()

    case = Case.parse("e4m3-b1-h2-q8-k8-d64-descale.head")
    verdict = trial.run_check("fp8.matches_oracle", load(wrong, device="cpu"), case)
    assert verdict.reason == "returned out in float32, expected bfloat16"


def test_an_input_changed_in_place_is_noticed() -> None:
    def wrong(q, k, v, *, q_descale, k_descale, v_descale):  # type: ignore[no-untyped-def]
        out = attn(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        v_descale.mul_(2)
        return out

    case = Case.parse("e4m3-b1-h2-q8-k8-d64-descale.head")
    verdict = trial.run_check("fp8.matches_oracle", load(wrong, device="cpu"), case)
    assert "changed its input v_descale in place" in verdict.reason


def test_fuzzing_draws_fp8_where_it_is_served_and_only_there() -> None:
    served = {c.dtype for c in strategies.draw(Fp8Core.__flashattn__, 20, 0)}
    assert served == set(FP8)
    assert all(c.descale for c in strategies.draw(Fp8Core.__flashattn__, 20, 1))
    without = Support(features=frozenset(), dtypes=frozenset({"bf16", "e4m3"}))
    assert {c.dtype for c in strategies.draw(without, 20, 0)} == {"bf16"}


def test_the_vocabulary_is_that_of_torch_and_of_the_oracles() -> None:
    assert FP8_SUMS == oracles.arithmetic.FP8_SUMS
    assert DESCALES == PER
    assert {TORCH_DTYPES[word] for word in FP8} == {torch.float8_e4m3fn, torch.float8_e5m2}


def test_a_stored_number_changed_in_place_is_noticed() -> None:
    def wrong(q, k, v, *, q_descale, k_descale, v_descale):  # type: ignore[no-untyped-def]
        out = attn(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        k.view(torch.uint8)[0, 0, 0, 0] ^= 1
        return out

    case = Case.parse("e4m3-b1-h2-q8-k8-d64-descale.head")
    verdict = trial.run_check("fp8.matches_oracle", load(wrong, device="cpu"), case)
    assert "changed its input k in place" in verdict.reason
