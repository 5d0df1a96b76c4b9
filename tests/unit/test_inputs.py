"""Tensors of a case: reproducible, in the layout that its id says, with the spec that the oracle needs."""

from __future__ import annotations

import pytest
import torch

from pytest_flashattn.cases import DOUTS, FAMILIES, LAYOUTS, Case
from pytest_flashattn.inputs import make_inputs

BASE = {"batch": 2, "heads": 4, "kv_heads": 2, "q": 33, "k": 33, "d": 16}


@pytest.mark.parametrize("native", ["bhsd", "bshd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_memory_and_not_values(layout: str, native: str) -> None:
    inputs = make_inputs(Case(layout=layout, **BASE), native=native)
    for x, heads in ((inputs.q, 4), (inputs.k, 2), (inputs.v, 2)):
        assert x.shape == (2, heads, 33, 16)
        assert x.isfinite().all()
    q, k = inputs.q, inputs.k
    facts = {
        "plain": (q if native == "bhsd" else q.transpose(1, 2)).is_contiguous(),
        "swapped": (q.transpose(1, 2) if native == "bhsd" else q).is_contiguous(),
        "qkv": q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() and q.stride(2) == 8 * 16,
        "padded": bool(q.as_strided((q.stride(2) if native == "bhsd" else q.stride(1),), (1,)).isnan().any()),
        "unaligned": q.storage_offset() == 1 and q.data_ptr() % 16 != 0,
        "headless": k.stride(1) == 0 and q.stride(0) == 0 and torch.equal(k[:, 0], k[:, 1]),
        "mixed": (k.transpose(1, 2) if native == "bhsd" else k).is_contiguous()
        and (q if native == "bhsd" else q.transpose(1, 2)).is_contiguous(),
        "expanded": k.stride(0) == 0 and torch.equal(k[0], k[1]),
        "dmajor": q.stride(3) != 1,
        "cache": layout == "cache" and bool(k.new_empty(0).set_(k.untyped_storage()).isnan().any()),
        "far": k.storage_offset() + k.stride(0) >= 2**31
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr(),
    }
    assert facts[layout]


@pytest.mark.parametrize("dout", DOUTS)
def test_layouts_of_dout(dout: str) -> None:
    inputs = make_inputs(Case(dout=dout, **BASE))
    assert inputs.dout.shape == (2, 4, 33, 16)
    assert inputs.dout.isfinite().all()
    assert (inputs.dout.stride() == (0, 0, 0, 0)) == (dout == "expanded")
    assert bool((inputs.dout == 0).all()) == (dout == "zero")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_finite_in_every_dtype_and_differs_from_normal(family: str, dtype: str) -> None:
    inputs = make_inputs(Case(family=family, dtype=dtype, **{**BASE, "q": 400, "k": 400}))
    assert all(x.isfinite().all() for x in (inputs.q, inputs.k, inputs.v))
    if family != "normal":
        assert float(inputs.k.float().std()) != pytest.approx(1, rel=1e-3) or family in ("peaked", "vmean", "tiny")


def test_the_offset_family_shifts_all_logits_alike() -> None:
    inputs = make_inputs(Case(family="offset", dtype="fp16", **BASE))
    s = inputs.q.double() @ inputs.k.double().repeat_interleave(2, 1).mT * 16**-0.5
    assert s.mean() == pytest.approx(1e5, rel=0.5)
    assert s.std() < 10


def test_values_come_from_id_and_seed_alone() -> None:
    a, b = (make_inputs(Case(**BASE)) for _ in range(2))
    assert torch.equal(a.q, b.q)
    assert not torch.equal(a.q, make_inputs(Case(seed=1, **BASE)).q)


def test_options_are_the_keywords_that_differ_from_their_default() -> None:
    assert make_inputs(Case(**BASE)).options() == {}
    options = make_inputs(
        Case(causal=True, scale=0.0, mask="b11k", sinks=True, alibi=True, window=(3, None), **BASE)
    ).options()
    assert set(options) == {"causal", "scale", "bias", "sinks", "alibi_slopes", "window"}
    assert options["scale"] == 0.0
    assert options["bias"].dtype == torch.bool


def test_a_random_mask_has_a_row_that_sees_nothing() -> None:
    mask = make_inputs(Case(mask="bhqk", **BASE)).mask
    assert mask is not None
    assert not mask[:, :, 1].any()
    assert 0.5 < mask.double().mean() < 0.8
