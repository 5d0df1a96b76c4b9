"""AttentionSpec refuses what makes no sense, with the name of the argument; visibility by hand; merge."""

from __future__ import annotations

import pytest
import torch
from oracle_problems import assert_agree, problem

from oracles import AttentionSpec, Segments, dense, merge


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment": "centre"}, "alignment must be"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"window": (-1, 0)}, "None means unbounded"),
        ({"window": (1,)}, r"window must be \(left, right\)"),
        ({"mask": torch.zeros(2, 2)}, "additive values as bias"),
        ({"bias": torch.zeros(2, 2, dtype=torch.bool)}, "boolean one as mask"),
        ({"bias": torch.zeros(3, 23)}, "bias .* does not broadcast"),
        ({"mask": torch.zeros(17, 22, dtype=torch.bool)}, "mask .* does not broadcast"),
        ({"alibi_slopes": torch.zeros(2)}, "alibi_slopes must be"),
        ({"sinks": torch.zeros(2, 4)}, "sinks must be"),
        ({"segments": Segments((0, 18), (0, 3))}, r"segments end at \(18, 3\)"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    def attend() -> None:
        p = problem(**options)
        dense.forward(p.q, p.k, p.v, p.spec)

    with pytest.raises(ValueError, match=message):
        attend()


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ((1, 2), (0, 2), "cu_q must begin with 0"),
        ((0, 2), (0, 3, 2), "cu_k must not decrease"),
        ((0, 2), (0,), "describe"),
    ],
)
def test_bad_segments_are_named(cu_q: tuple, cu_k: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segments(cu_q, cu_k)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((2, 4, 5), (2, 4, 5, 8), (2, 4, 5, 8), "q must be"),
        ((2, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8), "k must share"),
        ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 6, 8), "v must share"),
        ((2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8), "multiple"),
        ((2, 4, 5, 0), (2, 4, 5, 0), (2, 4, 5, 8), "positive"),
    ],
)
def test_bad_shapes_are_named(q: tuple, k: tuple, v: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dense.forward(torch.zeros(q), torch.zeros(k), torch.zeros(v), AttentionSpec())


def test_bad_upstream_gradients_are_named() -> None:
    p = problem()
    with pytest.raises(ValueError, match="do must have the shape of o"):
        dense.backward(p.q, p.k, p.v, p.spec, p.do[:, :, 1:])
    with pytest.raises(ValueError, match="dlse must have the shape of lse"):
        dense.backward(p.q, p.k, p.v, p.spec, p.do, p.dlse[..., None])


@pytest.mark.parametrize(
    ("options", "picture"),
    [
        ({"causal": True}, "111.. 1111. 11111"),
        ({"causal": True, "alignment": "top-left"}, "1.... 11... 111.."),
        ({"window": (1, 0)}, ".11.. ..11. ...11"),
        ({"window": (0, 1), "alignment": "top-left"}, "11... .11.. ..11."),
        ({"window": (1, 3), "causal": True}, ".11.. ..11. ...11"),
        ({"segments": Segments((0, 1, 3), (0, 2, 5))}, "11... ..111 ..111"),
        ({"segments": Segments((0, 1, 3), (0, 2, 5)), "causal": True}, "11... ..11. ..111"),
        ({"segments": Segments((0, 1, 3), (0, 2, 5)), "causal": True, "alignment": "top-left"}, "1.... ..1.. ..11."),
        ({"segments": Segments((0, 2), (0, 4))}, "1111. 1111. ....."),
    ],
)
def test_visibility_by_picture(options: dict, picture: str) -> None:
    seen = AttentionSpec(**options).visible(torch.arange(3), torch.arange(5), 3, 5)
    assert seen is not None
    assert " ".join("".join("1" if x else "." for x in row) for row in seen.tolist()) == picture


@pytest.mark.parametrize("o_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_merge_is_attention_over_both_parts(o_dtype: torch.dtype) -> None:
    p = problem(mask=torch.rand(2, 4, 17, 23) > 0.4)
    assert p.spec.mask is not None
    p.spec.mask[..., :3, :10] = False  # rows empty in the first part, in the second, in both
    p.spec.mask[..., 2:5, 10:] = False
    whole = dense.forward(p.q, p.k, p.v, p.spec)
    parts = []
    for keys in (slice(0, 10), slice(10, 23)):
        o, lse = dense.forward(p.q, p.k[:, :, keys], p.v[:, :, keys], AttentionSpec(mask=p.spec.mask[..., keys]))
        parts += [o.to(o_dtype), lse.to(torch.float64 if o_dtype == torch.float64 else torch.float32)]
    o, lse = merge(*parts)
    assert o.dtype == o_dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[o_dtype]
    assert_agree(o.double(), whole.o, "o", tolerance)
    assert_agree(lse.double(), whole.lse, "lse", min(tolerance, 1e-6))


def test_merge_ignores_whatever_an_empty_part_holds() -> None:
    o, nothing = torch.randn(2, 3, 4), torch.full((2, 3), -torch.inf)
    lse = torch.randn(2, 3)
    for a, b in (((o, lse), (o * torch.nan, nothing)), ((o * torch.nan, nothing), (o, lse))):
        merged, merged_lse = merge(*a, *b)
        torch.testing.assert_close(merged, o)
        torch.testing.assert_close(merged_lse, lse)
    merged, merged_lse = merge(o * torch.nan, nothing, o, nothing)
    assert (merged == 0).all()
    assert (merged_lse == -torch.inf).all()


def test_merge_names_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="must be"):
        merge(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3), torch.zeros(2, 1))
