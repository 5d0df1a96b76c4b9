"""The plain FP8 forward and the gradients in Triton's interpreter, against the oracles; what the function refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from interpreted import check, python

pytest.importorskip("triton")

from reference_kernels.fp8 import flash_attention_fp8, flash_attention_fp8_backward

PREPARED = """
import itertools, torch, oracles
from reference_kernels.fp8 import *
from reference_kernels.fp8.quantiser import by_row

torch.manual_seed(0)
FP8 = oracles.Arithmetic.of(torch.float8_e4m3fn, p_scale=256.0)

def tensors(b, hq, hkv, lq, lk, d, dv=None, per="block", dtype=torch.float8_e4m3fn):
    q, k = torch.randn(b, hq, lq, d), torch.randn(b, hkv, lk, d)
    v = torch.randn(b, hkv, lk, dv or d)
    # Heads and blocks of rows of different sizes: descales that cannot be mixed up unnoticed.
    for x in (q, k, v):
        x *= 0.5 + torch.arange(x.shape[1])[:, None, None]
        x *= 1 + torch.arange(x.shape[2])[:, None] // 128
    pers = per if isinstance(per, tuple) else (per,) * 3
    return [quantise(x.bfloat16(), per=p, dtype=dtype) for x, p in zip((q, k / hkv, v), pers)]

def run(q, k, v, **options):
    return flash_attention_fp8(
        q.stored, k.stored, v.stored, q_descale=q.descale, k_descale=k.descale, v_descale=v.descale, return_lse=True,
        **options,
    )

def judged(o, lse, q, k, v, **options):
    spec = oracles.AttentionSpec(**options)
    exact = [x.stored.double() * by_row(x.descale, x.stored)[..., None].double() for x in (q, k, v)]
    truth = oracles.evaluate(*exact, spec, arithmetic=FP8)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    for name, got in (("o", o), ("lse", lse)):
        error = (got - truth[name].value).abs().nan_to_num(nan=0.0 if name == "lse" else torch.inf)
        assert (error <= truth[name].limit(3.0)).all(), (name, float((error / truth[name].limit(3.0)).max()))
"""


def test_it_is_right_for_every_kind_of_descale_mask_and_length() -> None:
    check(
        PREPARED
        + """
for (lq, lk, hq, hkv, d, dv), per in itertools.product(
    ((150, 300, 4, 2, 64, 64), (200, 70, 2, 2, 40, 24), (1, 130, 3, 1, 16, 16)),
    ("tensor", "block", ("tensor", "head", "block"), ("head", "block", "tensor"), ("block", "tensor", "head")),
):
    for causal in (False, True):
        x = tensors(2, hq, hkv, lq, lk, d, dv, per)
        o, lse = run(*x, causal=causal, scale=-0.11 if d == 40 else None)
        judged(o, lse, *x, causal=causal, scale=-0.11 if d == 40 else None)
        hidden = max(0, lq - lk) if causal else 0
        assert not o[:, :, :hidden].any() and (lse[:, :, :hidden] == -torch.inf).all()
        assert lse[:, :, hidden:].isfinite().all()
"""
    )


def test_any_tile_and_any_layout_of_v_gives_the_same_attention() -> None:
    check(
        PREPARED
        + """
from reference_kernels.configs import Config
from reference_kernels.fp8.forward import forward

x = q, k, v = tensors(1, 2, 1, 140, 270, 32)
options = dict(q_descale=q.descale, k_descale=k.descale, v_descale=v.descale, scale=0.2, causal=True)
for m, n in ((16, 128), (128, 32), (64, 64)):
    o, lse = forward(q.stored, k.stored, v.stored, config=Config(m, n, 1, 1), **options)
    judged(o, lse, *x, causal=True, scale=0.2)
    turned = v.stored.mT.contiguous().mT
    again, _ = forward(q.stored, k.stored, turned, config=Config(m, n, 1, 1), **options)
    assert turned.stride(2) == 1 and torch.equal(o, again)
"""
    )


def test_p_keeps_its_small_values_and_does_not_overflow() -> None:
    """One key far above 300 others: without its factor of 2^8 P would lose them, at 2^9 it would saturate."""
    check(
        PREPARED
        + """
q = Q = torch.zeros(1, 1, 16, 32)
q[..., 0] = 1
k = torch.zeros(1, 1, 301, 32)
k[0, 0, 0, 0] = 7.0
v = torch.ones(1, 1, 301, 32)
v[0, 0, 0] = 0
x = [quantise(y.bfloat16(), per="tensor") for y in (q, k, v)]
o, lse = run(*x, scale=1.0)
judged(o, lse, *x, scale=1.0)
rest = 300 * torch.exp(torch.tensor(-7.0))
assert (o / (rest / (1 + rest)) - 1).abs().max() < 0.08, "300 weights of 2^-10 count"
"""
    )


def test_extreme_scales() -> None:
    check(
        PREPARED
        + """
for size in (1e-30, 1e-12, 3e2):
    raw = [torch.randn(1, 2, 140, 32) * s for s in (size, size if size < 1 else 1, 1)]
    x = [quantise(y.bfloat16()) for y in raw]
    o, lse = run(*x)
    judged(o, lse, *x)
zeros = [quantise(torch.zeros(1, 2, 140, 32).bfloat16()) for _ in "qkv"]
o, lse = run(*zeros)
assert not o.any() and (lse - torch.tensor(140.0).log()).abs().max() < 1e-5
"""
    )


def test_e5m2_and_a_mixed_product() -> None:
    check(
        PREPARED
        + """
FP8 = oracles.Arithmetic.of(torch.float8_e5m2, p_dtype=torch.float8_e4m3fn, p_scale=256.0)
x = tensors(1, 2, 2, 100, 150, 32, dtype=torch.float8_e5m2)
judged(*run(*x, causal=True), *x, causal=True)
fine = tensors(1, 2, 2, 100, 150, 32)
mixed = [fine[0], fine[1], x[2]]
judged(*run(*mixed), *mixed)
"""
    )


def test_gradients_are_those_of_the_dequantised_inputs() -> None:
    check(
        PREPARED
        + """
q, k, v = tensors(1, 4, 2, 70, 90, 32)
do, dlse = torch.randn(1, 4, 70, 32).bfloat16(), torch.randn(1, 4, 70)
got = flash_attention_fp8_backward(
    do, q.stored, k.stored, v.stored, q_descale=q.descale, k_descale=k.descale, v_descale=v.descale, causal=True,
    dlse=dlse,
)
wide = [dequantise(*x, torch.bfloat16) for x in (q, k, v)]
arithmetic = oracles.Arithmetic.of(torch.bfloat16)
truth = oracles.evaluate(*wide, oracles.AttentionSpec(causal=True), do=do, dlse=dlse, arithmetic=arithmetic)
for name, grad in zip(("dq", "dk", "dv"), got):
    assert grad.dtype == torch.bfloat16
    assert ((grad - truth[name].value).abs() <= truth[name].limit(3.0)).all(), name
"""
    )


def _arguments(**changes):
    x = torch.zeros(2, 4, 200, 64).to(torch.float8_e4m3fn)
    kv = torch.zeros(2, 2, 300, 64).to(torch.float8_e4m3fn)
    one = torch.ones(())
    return {"q": x, "k": kv, "v": kv, "q_descale": one, "k_descale": one, "v_descale": one} | changes


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"q": torch.zeros(2, 4, 200, 64)}, NotImplementedError, "q torch.float32"),
        ({"q": torch.zeros(2, 4, 200, 64).to(torch.float8_e5m2)}, ValueError, "q and k must share one dtype"),
        ({"q": torch.zeros(2, 3, 200, 64).to(torch.float8_e4m3fn)}, ValueError, "multiple of k's"),
        ({"q_descale": torch.ones(2, 2)}, ValueError, r"q_descale must be \(\) for the tensor, \(2, 4\) for its heads"),
        ({"k_descale": torch.ones(2, 2, 2)}, ValueError, r"\(2, 2, 3\) for its blocks of 128 rows"),
        ({"v_descale": torch.ones((), dtype=torch.float64)}, ValueError, "v_descale must be float32"),
        ({"scale": float("inf")}, ValueError, "scale must be finite"),
        ({}, NotImplementedError, "TRITON_INTERPRET=1"),
    ],
)
def test_what_it_cannot_attend_to_is_said(changes, error, said) -> None:
    arguments = _arguments(**changes)
    with pytest.raises(error, match=said):
        flash_attention_fp8(**arguments)
    do = torch.zeros(arguments["q"].shape, dtype=torch.bfloat16)
    with pytest.raises(error, match=said):
        flash_attention_fp8_backward(do, **arguments)


def test_a_wrong_name_of_a_kernel_is_said_on_any_device() -> None:
    with pytest.raises(ValueError, match="kernel must be one of hopper, triton"):
        flash_attention_fp8(**_arguments(), kernel="fast")


def test_gradients_and_kernels_that_there_are_not() -> None:
    check(
        """
import pytest, torch
from reference_kernels.fp8 import flash_attention_fp8, flash_attention_fp8_backward

x = torch.zeros(1, 1, 20, 64).to(torch.float8_e4m3fn)
ones = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(()))
with pytest.raises(NotImplementedError, match="flash_attention_fp8_backward"):
    flash_attention_fp8(x.clone().requires_grad_(), x, x, **ones)
with pytest.raises(ValueError, match="kernel must be one of hopper, triton"):
    flash_attention_fp8(x, x, x, **ones, kernel="fast")
with pytest.raises(NotImplementedError, match="kernel='hopper': .*interpreter"):
    flash_attention_fp8(x, x, x, **ones, kernel="hopper")
assert flash_attention_fp8(x, x, x, **ones).shape == (1, 1, 20, 64)
with pytest.raises(ValueError, match="do must be"):
    flash_attention_fp8_backward(torch.zeros(1, 1, 20, 64), x, x, x, **ones)
with pytest.raises(ValueError, match="dlse must be"):
    flash_attention_fp8_backward(torch.zeros(1, 1, 20, 64).bfloat16(), x, x, x, **ones, dlse=torch.zeros(1, 1, 19))
"""
    )


def test_the_suite_finds_plain_triton_conformant(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = python(
        "-m", "pytest", "flashattn-suite/fp8", "-q", "-p", "no:cacheprovider", "--flashattn-matrix=smoke",
        "--flashattn-impl=reference_kernels.fp8.variants:triton", f"--flashattn-json={report}",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    totals = json.loads(report.read_text())["totals"]
    assert totals["failed"] == totals["unmet"] == totals["declared"] == 0
    assert totals["verified"] >= 5


def test_variants_declare_what_their_sums_keep() -> None:
    from pytest_flashattn.known_apis import infer
    from reference_kernels.fp8 import variants

    for name, sums in (("triton", "14 bits a tile"), ("hopper", "14 bits"), ("hopper_interleaved", "14 bits")):
        support = infer(getattr(variants, name))[1]
        assert (support.p_dtype, support.p_scale, support.fp8_sums) == ("e4m3", 256.0, sums)
