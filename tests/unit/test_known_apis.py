"""The conventions of known APIs, each against the plain reference."""

from __future__ import annotations

import math

import pytest
import torch
from convention_problems import (
    BIAS,
    EMPTY_ROW,
    HQ,
    LQ,
    MASK,
    SLOPES,
    D,
    canonical,
    case_name,
    check,
    qkv,
    reference,
    words,
)
from torch.nn.functional import scaled_dot_product_attention

from pytest_flashattn.implementation import ImplementationError, Unsupported, load
from pytest_flashattn.known_apis import infer

# -- flash-attn -------------------------------------------------------------------------------------------------------


def flash_attn_2(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    assert all(isinstance(side, int) for side in window_size)
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = canonical(
        q,
        k,
        v,
        causal=causal,
        scale=softmax_scale,
        window=tuple(None if side == -1 else side for side in window_size),
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_4(
    q, k, v, qv=None, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0, return_lse=False
):
    assert -1 not in window_size
    assert qv is None
    to_2 = tuple(-1 if side is None else side for side in window_size)
    out, lse, _ = flash_attn_2(q, k, v, 0.0, softmax_scale, causal, to_2, softcap, None, False, True)
    return out, lse if return_lse else None  # always a pair


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "scale": 0.2},
        {"window": (2, None)},
        {"window": (None, 1)},
        {"softcap": 0.7, "alibi_slopes": SLOPES.double()},
    ],
    ids=case_name,
)
def test_flash_attn_2(options):
    implementation = load(flash_attn_2, device="cpu")
    assert implementation.convention.name == "flash-attn"
    check(implementation, options, lse=True)
    check(implementation, options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, None)}, {"softcap": 0.7}], ids=case_name)
def test_flash_attn_4(options):
    implementation = load(flash_attn_4, device="cpu")
    assert implementation.convention.name == "flash-attn"
    check(implementation, options, lse=True)
    check(implementation, options)


def test_flash_attn_declares_what_the_build_has():
    two, four = infer(flash_attn_2)[1], infer(flash_attn_4)[1]
    assert two.features == words("causal cross gqa scale window softcap alibi lse backward")
    assert two.features - four.features == {"alibi"}
    assert (two.dtypes, two.devices, two.alignment) == ({"fp16", "bf16"}, {"cuda"}, "bottom-right")


# -- the Triton tutorial ----------------------------------------------------------------------------------------------


def tutorial(q, k, v, causal, sm_scale, warp_specialize=True):
    assert warp_specialize is True
    return canonical(q, k, v, causal=causal, scale=sm_scale)


class Tutorial(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, warp_specialize=True):
        return tutorial(q, k, v, causal, sm_scale, warp_specialize)


class TutorialWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, causal, sm_scale):
        return tutorial(q, k, v, causal, sm_scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@pytest.mark.parametrize("function", [tutorial, Tutorial.apply, TutorialWithSetup.apply])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.3}], ids=case_name)
def test_the_tutorial_is_called_by_position(function, options):
    implementation = load(function, device="cpu")
    assert implementation.convention.name == "triton-tutorial"
    assert implementation.support.features == {"causal", "scale", "backward"}
    assert implementation.support.length_multiple == 128
    check(implementation, options, inputs=qkv(8, 8, hkv=HQ))


def test_defaults_tell_a_plain_function_from_the_tutorial():
    assert infer(lambda q, k, v, causal=False, sm_scale=None: q)[0].name == "canonical"


def test_a_tutorial_whose_signature_is_hidden_is_named():
    def hidden(*args):
        return tutorial(*args)

    check(load(hidden, convention="triton-tutorial", device="cpu"), {"causal": True}, inputs=qkv(8, 8, hkv=HQ))


def test_the_tutorial_refuses_what_it_has_no_argument_for():
    with pytest.raises(ImplementationError, match="keyword argument"):
        load(Tutorial.apply, device="cpu").call(*qkv(8, 8, hkv=HQ), {"softcap": 2.0})


# -- flashinfer -------------------------------------------------------------------------------------------------------


def single_prefill(
    q,
    k,
    v,
    scale_q=None,
    custom_mask=None,
    causal=False,
    kv_layout="HND",
    sm_scale=None,
    window_left=-1,
    logits_soft_cap=None,
    return_lse=False,
):
    assert q.shape == (LQ, HQ, D)
    assert kv_layout == "NHD"
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = canonical(q, k, v, causal=causal, scale=sm_scale, softcap=logits_soft_cap, return_lse=True)
    out = out[0].transpose(0, 1)
    return (out, lse[0].transpose(0, 1) / math.log(2.0)) if return_lse else out


@pytest.mark.parametrize("options", [{}, {"causal": True, "scale": 0.3}, {"softcap": 0.7}], ids=case_name)
def test_flashinfer_runs_each_sequence_and_its_lse_is_of_base_2(options):
    implementation = load(single_prefill, device="cpu")
    assert implementation.convention.name == "flashinfer"
    check(implementation, options, lse=True)
    check(implementation, options)


# -- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"scale": 0.3},
        {"bias": BIAS},
        {"bias": MASK},
        {"bias": BIAS, "causal": True},
        {"bias": MASK, "causal": True},
    ],
    ids=case_name,
)
def test_sdpa_is_top_left_and_takes_masks_next_to_causal(options):
    implementation = load("torch.nn.functional:scaled_dot_product_attention", device="cpu")
    assert implementation.convention.name == "torch-sdpa"
    assert implementation.convention.alignment == implementation.support.alignment == "top-left"
    check(implementation, options, alignment="top-left")


def test_sdpa_never_gets_causal_and_a_mask_together():
    # Its documentation calls the pair an error; the CPU kernel takes it, others do not.
    def strict(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        assert attn_mask is None or not is_causal
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)

    implementation = load(strict, device="cpu")
    assert implementation.convention.name == "torch-sdpa"
    check(implementation, {"bias": BIAS, "causal": True}, alignment="top-left")


def test_sdpa_gradients_reach_a_bias_through_the_folded_diagonal():
    bias = BIAS.clone().requires_grad_()
    out, _ = load(scaled_dot_product_attention, device="cpu").call(*qkv(), {"bias": bias, "causal": True})
    (grad,) = torch.autograd.grad(out.square().sum(), bias)
    other = BIAS.double().requires_grad_()
    want = reference(*qkv(), bias=other, causal=True, alignment="top-left")[0]
    torch.testing.assert_close(grad.double(), torch.autograd.grad(want.square().sum(), other)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("option", ["window", "softcap", "sinks"])
def test_sdpa_refuses_what_it_lacks(option):
    with pytest.raises(ImplementationError, match=r"^raised TypeError"):
        load(scaled_dot_product_attention, device="cpu").call(*qkv(), {option: (1, 1)})


FLEX = "torch.nn.attention.flex_attention:flex_attention"


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "scale": 0.3},
        {"window": (2, 1), "softcap": 0.7, "alibi_slopes": SLOPES, "bias": BIAS},
        {"bias": EMPTY_ROW, "window": (3, None)},
    ],
    ids=case_name,
)
def test_flex_attention(options):
    implementation = load(FLEX, device="cpu")
    assert implementation.convention.name == "flex-attention"
    check(implementation, options, lse=True)


@pytest.mark.parametrize(("lq", "lk"), [(5, 3), (300, 129)])
def test_flex_attention_of_odd_lengths_and_rows_without_keys(lq, lk):
    # Lq > Lk and causal: the first rows see nothing; their out is 0 and their lse -inf.
    check(load(FLEX, device="cpu"), {"causal": True}, lse=True, inputs=qkv(lq, lk, b=1))


def test_flex_attention_has_gradients_on_cuda_only():
    assert load(FLEX, device="cuda").support.features >= {"backward", "lse_grad", "lse"}
    assert not load(FLEX, device="cpu").support.features & {"backward", "lse_grad", "bias_grad", "sinks"}
    q, k, v = qkv()
    with pytest.raises(Unsupported, match="backward on CPU"):
        load(FLEX, device="cpu").call(q.requires_grad_(), k, v, {})


def test_flex_attention_is_recognised_behind_compile_and_by_signature():
    from torch.nn.attention.flex_attention import flex_attention

    def older(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False):
        raise AssertionError("only its signature is read")

    compiled, _ = infer(torch.compile(flex_attention, backend="eager"))
    assert (compiled.name, compiled.names["return_lse"]) == ("flex-attention", ("return_aux",))
    assert infer(older)[0].names["return_lse"] == ("return_lse",)
