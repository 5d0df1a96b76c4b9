"""Calling conventions: functions under other names, and what is seen through to find them."""

from __future__ import annotations

import functools

import pytest
import torch
from convention_problems import BIAS, MASK, OPTIONS, bshd, canonical, case_name, check, qkv, renamed, words
from torch.nn.functional import scaled_dot_product_attention

from pytest_flashattn.conventions import relayout
from pytest_flashattn.implementation import ImplementationError, load
from pytest_flashattn.known_apis import CONVENTIONS, infer
from pytest_flashattn.support import Support


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
