"""Loading by name, the sentences of what goes wrong, and the contract of what is returned."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from pytest_flashattn.implementation import ImplementationError, UnknownImplementation, Unsupported, load
from pytest_flashattn.support import Support

Q, K, V = (torch.randn(2, 4, 5, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 24))
OUT = torch.zeros(2, 4, 5, 24)
LSE = torch.zeros(2, 4, 5)

KERNELS = """
import torch
from pytest_flashattn.support import Support

class Attention(torch.nn.Module):
    def forward(self, q, k, v, *, causal=False):
        return q

def attn(q, k, v, *, causal=False, return_lse=False):
    return q

def helper():
    raise ValueError("tile of 65 rows\\nsecond line")

def broken(q, k, v):
    helper()

module = Attention()
number = 3
SUPPORT = Support(features={"causal"}, dtypes={"bf16"}, devices={"cuda"})
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A module `mykernels` in the current directory, which is not on sys.path."""
    (tmp_path / "mykernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("mykernels", None)


def refusal(spec, **options):
    """The sentence with which `load` refuses; one sentence, without a line break."""
    with pytest.raises(UnknownImplementation) as caught:
        load(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_function_of_the_current_directory(kernels):
    implementation = load("mykernels:attn", device="cpu")
    assert (implementation.spec, implementation.name, implementation.device.type) == ("mykernels:attn", "attn", "cpu")
    assert implementation.describe() == (
        "mykernels:attn, canonical call; fp16 bf16 fp32; causal cross gqa dv lse backward lse_grad"
    )
    assert os.getcwd() in sys.path


def test_a_dotted_attribute(kernels):
    assert load("mykernels:module.forward", device="cpu").name == "module.forward"


def test_a_callable_is_named_after_itself(kernels):
    for name, spec in (("attn", "mykernels:attn"), ("module", "mykernels:Attention")):
        function = load(f"mykernels:{name}", device="cpu").function
        assert load(function, device="cpu").spec == spec


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("mykernels", "'mykernels' does not name an implementation: write module:attribute"),
        ("mykernels.attn", "'mykernels.attn' does not name an implementation: write module:attribute, "
         "perhaps mykernels:attn"),
        ("mykernels:", "'mykernels:' does not name an implementation: write module:attribute"),
        ("sub/mykernels.py:attn", "'sub/mykernels.py:attn' names a file: write the module, sub.mykernels:attn"),
        ("mykernels:atn", "mykernels has no attribute 'atn'; did you mean attn?"),
        ("mykernels:module.forwrd", "mykernels:module has no attribute 'forwrd'; did you mean forward?"),
        ("mykernels:number", "mykernels:number is an int, which cannot be called: name a function"),
        ("mykernels:Attention", "mykernels:Attention is a class: name an instance of it, or a function that calls one"),
    ],
)  # fmt: skip
def test_a_name_that_leads_nowhere(kernels, spec, sentence):
    assert refusal(spec) == sentence


def test_a_module_that_is_missing(kernels):
    sentence = refusal("nokernels.sub:attn")
    assert sentence.startswith(f"there is no module 'nokernels' in {kernels} or on sys.path")


def test_a_module_whose_dependency_is_missing(kernels):
    (kernels / "needy.py").write_text("import not_installed_here")
    assert refusal("needy:attn") == (
        "module 'needy' is there but needs 'not_installed_here', which is not: "
        "ModuleNotFoundError: No module named 'not_installed_here'"
    )


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("\nraise RuntimeError('no driver\\nmore')", "RuntimeError: no driver (at badly.py:2)"),
        ("raise SystemExit(3)", "SystemExit: 3 (at badly.py:1)"),
        ("def attn(:", "SyntaxError: invalid syntax (badly.py, line 1)"),
    ],
)
def test_a_module_that_does_not_import(kernels, source, sentence):
    (kernels / "badly.py").write_text(source)
    assert refusal("badly:attn") == f"module 'badly' does not import: {sentence}"


def test_a_function_that_the_contract_cannot_call(kernels):
    (kernels / "varlen.py").write_text("def attn(q, k, v, cu_seqlens): ...")
    assert refusal("varlen:attn").startswith(
        "varlen:attn needs cu_seqlens, which the canonical convention does not give"
    )
    sys.modules.pop("varlen")


def test_an_unknown_convention(kernels):
    sentence = refusal("mykernels:attn", convention="flash_attn")
    assert sentence.startswith("convention 'flash_attn' is unknown; did you mean flash-attn?; known: triton-tutorial, ")


def test_the_support_is_named_attached_or_inferred(kernels):
    named = load("mykernels:attn", support="mykernels:SUPPORT", device="cpu")
    assert named.support.features == {"causal"}
    assert load("mykernels:attn", support=Support(), device="cpu").support == Support()
    assert refusal("mykernels:attn", support="mykernels:number") == (
        "mykernels:number is an int; a support is a pytest_flashattn Support(...)"
    )


def test_an_attached_support_of_another_type(kernels):
    load("mykernels:attn", device="cpu").function.__flashattn__ = {"causal"}
    assert refusal("mykernels:attn") == "mykernels:attn has a __flashattn__ that is no Support(...) but a set"


def test_a_dict_of_its_fields_is_a_support(kernels):
    function = load("mykernels:attn", device="cpu").function
    function.__flashattn__ = {"features": ["causal"], "max_head_dim": 128}
    assert load("mykernels:attn", device="cpu").support == Support(features={"causal"}, max_head_dim=128)
    function.__flashattn__ = {"feature": ["causal"]}
    assert refusal("mykernels:attn").startswith(
        "mykernels:attn has a __flashattn__ with unknown feature; known: features,"
    )
    function.__flashattn__ = {"features": ["casual"]}
    assert refusal("mykernels:attn").startswith("mykernels:attn has a __flashattn__ that is wrong: Support.features:")


@pytest.mark.parametrize(
    ("present", "wanted", "device"),
    [(True, (), "cuda"), (False, (), "cpu"), (True, ("cpu",), "cpu"), (True, ("cpu", "cuda"), "cuda"),
     (False, ("cpu", "cuda"), "cpu"), (False, ("cuda",), "cuda"), (True, ("gone", "cpu"), "cpu")],
)  # fmt: skip
def test_auto_is_a_device_that_exists_among_those_it_runs_on(monkeypatch, present, wanted, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert load(lambda q, k, v: q, support=Support(devices=wanted)).device.type == device


# -- calling ----------------------------------------------------------------------------------------------------------


def returning(value, convention=None):
    """An implementation that returns `value`, whatever it is asked."""
    return load(lambda q, k, v, *, return_lse=False: value, convention=convention, device="cpu")


def complaint(value, *, return_lse=False, convention=None):
    with pytest.raises(ImplementationError) as caught:
        returning(value, convention).call(Q, K, V, {}, return_lse=return_lse)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_the_contract_asks_for_is_returned_as_it_is():
    out, lse = returning(OUT).call(Q, K, V, {})
    assert (out.data_ptr(), lse) == (OUT.data_ptr(), None)
    out, lse = returning((OUT, LSE)).call(Q, K, V, {}, return_lse=True)
    assert (out.data_ptr(), lse.data_ptr()) == (OUT.data_ptr(), LSE.data_ptr())


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "returned None; an implementation returns its output, even if it fills a buffer"),
        ("text", "returned a str as out; expected a tensor"),
        ((OUT,), "returned a tuple of 1; expected one tensor, since return_lse was not given"),
        ((OUT, LSE), "returned a tuple of 2; expected one tensor, since return_lse was not given"),
        (OUT[..., :16], "returned out of shape (2, 4, 5, 16), expected (2, 4, 5, 24)"),
        (OUT.transpose(1, 2), "returned out of shape (2, 5, 4, 24), expected (2, 4, 5, 24), which is (B, L, H, D): "
         "if it works in that layout, say --flashattn-convention=bshd"),
        (OUT.double(), "returned out in float64, expected float32"),
        (OUT.to("meta"), "returned out on meta, expected cpu"),
    ],
)  # fmt: skip
def test_an_out_that_is_not_the_contract_s(value, sentence):
    assert complaint(value) == sentence


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (OUT, "returned one tensor of shape (2, 4, 5, 24); expected (out, lse), as return_lse asks"),
        ((OUT, LSE, LSE), "returned a tuple of 3; expected (out, lse), as return_lse asks"),
        ((OUT, None), "returned a NoneType as lse; expected a tensor"),
        ((OUT, LSE[..., None]), "returned lse of shape (2, 4, 5, 1), expected (2, 4, 5)"),
        ((OUT, LSE.mT), "returned lse of shape (2, 5, 4), expected (2, 4, 5), which is (B, L, H)"),
        ((OUT, LSE.bfloat16()), "returned lse in bfloat16, expected float32"),
    ],
)
def test_an_lse_that_is_not_the_contract_s(value, sentence):
    assert complaint(value, return_lse=True) == sentence


def test_a_bshd_implementation_is_told_of_its_own_layout():
    assert complaint(OUT, convention="bshd") == (
        "returned out of shape (2, 4, 5, 24), expected (2, 5, 4, 24), which is (B, H, L, D): "
        "if it works in that layout, say --flashattn-convention=canonical"
    )


def test_views_are_passed_as_they_are():
    seen = []
    q = Q.transpose(1, 2).contiguous().transpose(1, 2)

    def spy(q, k, v):
        seen.append(q)
        return OUT

    load(spy, device="cpu").call(q, K, V, {})
    bshd = load(lambda q, k, v: spy(q, k, v).transpose(1, 2), convention="bshd", device="cpu")
    bshd.call(q, K, V, {})
    assert [(x.data_ptr(), x.is_contiguous()) for x in seen] == [(q.data_ptr(), False), (q.data_ptr(), True)]


def raising(error):
    def function(q, k, v, *, return_lse=False):
        raise error

    return load(function, device="cpu")


def test_what_it_raises_is_told_with_its_place(kernels):
    with pytest.raises(ImplementationError) as caught:
        load("mykernels:broken", device="cpu").call(Q, K, V, {})
    assert str(caught.value) == "raised ValueError: tile of 65 rows (at mykernels.py:13)"
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_place_is_in_its_own_code_not_in_torch_s(kernels):
    (kernels / "intorch.py").write_text(
        "import torch\ndef attn(q, k, v):\n    return torch.nn.functional.layer_norm(q, 3)"
    )
    with pytest.raises(ImplementationError, match=r"\(at intorch.py:3\)$"):
        load("intorch:attn", device="cpu").call(Q, K, V, {})
    sys.modules.pop("intorch")


def test_not_implemented_is_unsupported():
    with pytest.raises(Unsupported, match=r"^raised NotImplementedError: no cross attention"):
        raising(NotImplementedError("no cross attention")).call(Q, K, V, {})


def test_an_option_it_does_not_know_goes_under_its_canonical_name():
    with pytest.raises(ImplementationError, match="unexpected keyword argument 'softcap'"):
        returning(OUT).call(Q, K, V, {"softcap": 1.0})


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, pytest.skip.Exception])
def test_what_is_no_verdict_on_it_passes_through(error):
    with pytest.raises(error):
        raising(error("out")).call(Q, K, V, {})
