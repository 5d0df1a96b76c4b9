"""Each convention against a plain float64 reference, with functions that decode the native call on their own."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pytest_flashattn.conventions import relayout
from pytest_flashattn.implementation import ImplementationError, Unsupported, load
from pytest_flashattn.known_apis import CONVENTIONS, infer
from pytest_flashattn.support import Support

B, HQ, HKV, LQ, LK, D = 2, 4, 2, 5, 8, 16


def reference(
    q,
    k,
    v,
    *,
    causal=False,
    scale=None,
    window=None,
    softcap=None,
    alibi_slopes=None,
    bias=None,
    return_lse=False,
    alignment="bottom-right",
):
    """The contract in float64, (B, H, L, D) in and out; returns (out, lse) whatever return_lse says."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    lq, lk = q.shape[2], k.shape[2]
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    shift = lk - lq if alignment == "bottom-right" else 0
    distance = torch.arange(lk)[None, :] - torch.arange(lq)[:, None] - shift  # > 0: beyond the diagonal
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[:, None, None] * distance.abs()
    if bias is not None:
        s = s.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else s + bias.double()
    left, right = window or (None, None)
    if causal:
        s = s.masked_fill(distance > 0, -math.inf)
    if left is not None:
        s = s.masked_fill(distance < -left, -math.inf)
    if right is not None:
        s = s.masked_fill(distance > right, -math.inf)
    lse = s.logsumexp(-1)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v, lse


def qkv(lq=LQ, lk=LK, *, hkv=HKV, dtype=torch.float32, d=D, b=B):
    generator = torch.Generator().manual_seed(0)
    shapes = (b, HQ, lq, d), (b, hkv, lk, d), (b, hkv, lk, d)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def words(text):
    return set(text.split())


def check(implementation, options, *, lse=False, inputs=None, **reference_options):
    """The implementation called canonically gives what the reference gives."""
    q, k, v = qkv() if inputs is None else inputs
    out, got_lse = implementation.call(q, k, v, options, return_lse=lse)
    want, want_lse = reference(q, k, v, **options, **reference_options)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    assert out.dtype == q.dtype
    if lse:
        assert got_lse.dtype == torch.float32
        torch.testing.assert_close(got_lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    else:
        assert got_lse is None


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
BIAS = torch.randn(1, HQ, LQ, LK, generator=torch.Generator().manual_seed(1))
MASK = torch.rand(B, 1, LQ, LK, generator=torch.Generator().manual_seed(2)) > 0.4
EMPTY_ROW = MASK.clone()
EMPTY_ROW[:, :, 2] = False

# -- plain functions: the canonical call under other names ------------------------------------------------------------


def canonical(
    q, k, v, *, causal=False, scale=None, window=None, softcap=None, alibi_slopes=None, bias=None, return_lse=False
):
    out, lse = reference(
        q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias
    )
    return (out.to(q.dtype), lse.float()) if return_lse else out.to(q.dtype)


def renamed(
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    sm_scale=None,
    window_size=(-1, -1),
    logits_soft_cap=0.0,
    slopes=None,
    return_softmax_lse=False,
):
    window = tuple(None if side == -1 else side for side in window_size)
    return canonical(
        query,
        key,
        value,
        causal=is_causal,
        scale=sm_scale,
        window=window,
        softcap=logits_soft_cap or None,
        alibi_slopes=slopes,
        bias=attn_mask,
        return_lse=return_softmax_lse,
    )


def bshd(q, k, v, *, causal=False, return_lse=False):
    assert q.shape[1:3] == (LQ, HQ)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = canonical(q, k, v, causal=causal, return_lse=True)
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


OPTIONS = [
    {},
    {"causal": True},
    {"scale": 0.3},
    {"window": (2, 1)},
    {"window": (None, 1)},
    {"window": (3, None), "causal": True},
    {"softcap": 0.7, "alibi_slopes": SLOPES, "bias": BIAS, "causal": True},
    {"bias": MASK},
]


def case_name(value):
    return "+".join(value) or "plain" if isinstance(value, dict) else None


@pytest.mark.parametrize("options", OPTIONS, ids=case_name)
@pytest.mark.parametrize("function", [canonical, renamed])
def test_a_plain_function_is_called_by_its_own_names(function, options):
    implementation = load(function, device="cpu")
    assert implementation.convention.name == "canonical"
    check(implementation, options, lse=True)
    check(implementation, options)


def test_a_named_bshd_function_gets_and_gives_bshd():
    check(load(bshd, convention="bshd", device="cpu"), {"causal": True}, lse=True)


def test_features_are_those_of_the_named_parameters():
    def some(q, k, v, *, causal=False, **more):
        return q

    always = {"gqa", "cross", "dv", "backward"}
    assert infer(some)[1].features == always | {"causal"}
    assert infer(canonical)[1].features == always | words(
        "causal scale window softcap alibi bias mask bias_grad lse lse_grad"
    )
    assert infer(renamed)[1].features == infer(canonical)[1].features
    assert infer(lambda q, k, v, sinks=None: q)[1].features == always | {"sinks", "sinks_grad"}


def test_a_keyword_of_its_own_for_masks_gets_boolean_biases_only():
    def two(q, k, v, *, bias=None, attn_mask=None):
        assert bias is None or bias.is_floating_point()
        assert attn_mask is None or attn_mask.dtype == torch.bool
        return canonical(q, k, v, bias=attn_mask if bias is None else bias)

    check(load(two, device="cpu"), {"bias": MASK})
    check(load(two, device="cpu"), {"bias": BIAS})

    def masks(q, k, v, *, mask=None):
        return canonical(q, k, v, bias=mask)

    implementation = load(masks, device="cpu")
    assert implementation.support.features >= {"mask"}
    assert not implementation.support.features & {"bias", "bias_grad"}
    check(implementation, {"bias": MASK})
    with pytest.raises(ImplementationError, match="unexpected keyword argument 'bias'"):
        implementation.call(*qkv(), {"bias": BIAS})


def test_defaults_that_are_not_the_contract_s_are_overruled():
    def odd(q, k, v, causal=True, scale=1.0, window=(2, 0), return_lse=True):
        return canonical(q, k, v, causal=causal, scale=scale, window=window, return_lse=return_lse)

    check(load(odd, device="cpu"), {})
    check(load(odd, device="cpu"), {"window": (1, 1)}, lse=True)


def test_a_required_mask_is_given_every_time():
    def required(q, k, v, attn_mask):
        return canonical(q, k, v, bias=attn_mask)

    for options in ({}, {"bias": MASK}, {"bias": BIAS}):
        check(load(required, device="cpu"), options)


def test_a_window_of_one_number_is_not_taken_for_a_pair():
    assert "window" not in infer(lambda q, k, v, window_size=-1: q)[1].features
    assert "window" in infer(lambda q, k, v, window_size=None: q)[1].features


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


# -- what infer sees through ------------------------------------------------------------------------------------------


class Module(torch.nn.Module):
    def forward(self, q, k, v, *, causal=False):
        return canonical(q, k, v, causal=causal)


class Object:
    def __call__(self, q, k, v, *, causal=False):
        return canonical(q, k, v, causal=causal)

    def method(self, q, k, v, *, causal=False):
        return canonical(q, k, v, causal=causal)


@functools.wraps(bshd)
def wrapped(*args, **kwargs):
    return bshd(*args, **kwargs)


LOOKS = {
    "module": Module(),
    "object": Object(),
    "method": Object().method,
    "partial": functools.partial(canonical, bias=None),
    "partial of a module": functools.partial(Module()),
    "wrapped": wrapped,
    "compiled": torch.compile(canonical, backend="eager"),
    "compiled module": torch.compile(Module(), backend="eager"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_the_signature_is_read_through(look):
    convention, support = infer(LOOKS[look])
    assert convention.name == "canonical"
    assert "causal" in support.features
    assert "sinks" not in support.features


@pytest.mark.parametrize("look", ["module", "object", "method", "partial of a module"])
def test_what_the_signature_is_read_through_is_called(look):
    check(load(LOOKS[look], device="cpu"), {"causal": True})


def test_an_attached_support_wins_wherever_it_is():
    mine = Support(features={"causal"}, head_dims={64})

    def function(q, k, v, *, causal=False, softcap=None):
        return q

    class Declared(Module):
        __flashattn__ = mine

    around = (
        function,
        functools.partial(function, softcap=None),
        functools.wraps(function)(lambda *a, **k: function(*a, **k)),
        torch.compile(function, backend="eager"),
        Declared(),
        torch.compile(Declared(), backend="eager"),
        Declared().forward,
    )
    function.__flashattn__ = mine  # only now: functools.wraps copies what is there already
    for declared in around:
        assert infer(declared)[1] is mine


def test_an_object_that_keeps_sdpa_is_not_sdpa():
    class Keeps(Object):
        func = staticmethod(scaled_dot_product_attention)

    assert infer(Keeps())[0].name == "canonical"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda q, k, v, cu_seqlens, out: q, "needs cu_seqlens, out"),
        (lambda q, k: q, "takes 2 positional arguments, not q, k, v"),
        (torch.autograd.Function.apply, "takes no keywords"),
    ],
)
def test_what_cannot_be_called_is_said_in_a_sentence(function, sentence):
    with pytest.raises(ValueError, match=sentence):
        infer(function)


def test_relayout_is_a_view_both_ways():
    x = torch.randn(1, 3, 5, 7)
    for layout in ("bhsd", "bshd", "shd"):
        there = relayout(x, "bhsd", layout)
        back = relayout(there, layout, "bhsd")
        assert there.data_ptr() == x.data_ptr()
        assert torch.equal(back, x)
    assert relayout(x, "bhsd", "shd").shape == (5, 3, 7)


def test_conventions_are_known_by_their_names():
    assert all(name == convention.name and convention.summary for name, convention in CONVENTIONS.items())
