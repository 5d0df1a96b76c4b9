"""The public function and its operators: refusals, autograd, fake kernels, what is available where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import check, python

from reference_kernels.configs import TABLES, Config, lookup
from reference_kernels.launch import sides

SETUP = """
import torch
from reference_kernels import available, flash_attention
from reference_kernels.ops import attention, attention_backward

def x(*shape, dtype=torch.float32, grad=False):
    return torch.randn(shape).to(dtype).requires_grad_(grad)

q, k, v = x(1, 4, 33, 16), x(1, 2, 40, 16), x(1, 2, 40, 16)
"""


def test_importing_the_package_imports_neither_torch_nor_triton() -> None:
    check("import sys, reference_kernels; assert not {'torch', 'triton'} & set(sys.modules)", interpret=False)


def test_without_triton_one_sentence_has_the_remedy() -> None:
    check(
        """
import sys
sys.modules["triton"] = None  # as if it were not installed
import reference_kernels, reference_kernels.fp8, reference_kernels.hopper
for package, name in (
    (reference_kernels, "flash_attention"), (reference_kernels.fp8, "quantise"), (reference_kernels.hopper, "forward"),
):
    try:
        getattr(package, name)
    except ModuleNotFoundError as error:
        assert str(error) == (
            f"{package.__name__}.{name} needs Triton, which is not installed: pip install 'pytest-flashattn[kernels]'"
        )
    else:
        raise AssertionError(name)
    assert not hasattr(package, "no_such_name")
sys.modules["torch"] = None
try:
    reference_kernels.fp8.random_signs
except ModuleNotFoundError as error:
    assert error.name == "torch", "what else is missing keeps its own name"
""",
        interpret=False,
    )


def test_without_gpu_and_interpreter_one_sentence_says_so() -> None:
    check(
        SETUP
        + """
for entry in available():
    assert entry.available == (entry.kernel == "naive"), entry
    words = "compute capability 9.0" if entry.kernel.startswith("hopper.") else "TRITON_INTERPRET=1"
    assert entry.available or words in entry.reason
try:
    flash_attention(q, k, v)
except NotImplementedError as error:
    assert "TRITON_INTERPRET=1" in str(error)
else:
    raise AssertionError
""",
        interpret=False,
    )


def test_refusals_name_what_is_served() -> None:
    check(
        SETUP
        + """
def refused(kind, words, *arguments, **options):
    try:
        flash_attention(*arguments, **options)
    except kind as error:
        assert words in str(error), error
        assert "\\n" not in str(error)
    else:
        raise AssertionError(words)

refused(NotImplementedError, "at most 256", x(1, 1, 4, 300), x(1, 1, 4, 300), x(1, 1, 4, 300))
refused(NotImplementedError, "at most 256", x(1, 1, 4, 64), x(1, 1, 4, 64), x(1, 1, 4, 512))
refused(NotImplementedError, "float16, bfloat16 and float32", q.double(), k.double(), v.double())
refused(NotImplementedError, "detach", q, k, v, alibi_slopes=x(4, grad=True))
refused(ValueError, "one dtype", q, k.half(), v)
refused(ValueError, "4 dimensions", q[0], k, v)
refused(ValueError, "multiple", x(1, 3, 33, 16), k, v)
refused(ValueError, "batch and head dim", q, x(1, 2, 40, 32), v)
refused(ValueError, "batch, heads and length", q, k, x(1, 2, 41, 16))
refused(ValueError, "window", q, k, v, window=(-1, None))
refused(ValueError, "softcap", q, k, v, softcap=0.0)
refused(ValueError, "scale", q, k, v, scale=float("nan"))
refused(ValueError, "does not broadcast", q, k, v, bias=x(33, 41))
refused(ValueError, "bool", q, k, v, bias=torch.ones(33, 40, dtype=torch.int32))
refused(ValueError, "sinks", q, k, v, sinks=x(2))
refused(ValueError, "alibi_slopes", q, k, v, alibi_slopes=x(2))
refused(ValueError, "hopper, triton", q, k, v, kernel="Triton")
refused(NotImplementedError, "kernel='hopper': the Hopper kernels need a GPU", q, k, v, kernel="hopper")
refused(NotImplementedError, "kernel='hopper': the Hopper kernels have no sinks", q, k, v, sinks=x(4), kernel="hopper")
"""
    )


def test_in_the_interpreter_all_but_the_hopper_kernels_are_available() -> None:
    check(
        SETUP
        + """
for entry in available():
    assert entry.available == (not entry.kernel.startswith("hopper.")), entry
    assert entry.available or "interpreter" in entry.reason
assert torch.equal(flash_attention(q, k, v), flash_attention(q, k, v, kernel="triton"))
"""
    )


def test_the_operators_pass_opcheck() -> None:
    check(
        SETUP
        + """
grad = [t.requires_grad_() for t in (q, k, v)]
bias, sinks, mask = x(1, 4, 1, 40, grad=True), x(4, grad=True), torch.rand(33, 40) < 0.7
for options in (
    (None, None, None, None, 0.25, None, None, None, "ieee", None, False),
    (torch.rand(4), bias, None, sinks, 0.25, 3.0, 9, 0, "ieee", None, True),
    (None, None, mask, None, -0.25, None, None, 0, "ieee", None, False),
):
    torch.library.opcheck(attention, (q, k, v, *options))
q, k, v = (t.detach() for t in grad)
numbers = (0.25, None, None, 0, "ieee", None, False)
o, lse = attention(q, k, v, None, None, None, None, *numbers)
for wants in ([True, True, False, False], [False, True, False, False]):
    torch.library.opcheck(
        attention_backward, (torch.randn_like(o), None, q, k, v, o, lse, None, None, None, None, *numbers, wants)
    )
"""
    )


def test_compiled_by_torch_it_gives_the_same_bits() -> None:
    check(
        SETUP
        + """
def loss(q, k, v):
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    return (out**2).sum() + (0.5 * lse).sum()

leaves = [t.requires_grad_() for t in (q, k, v)]
eager = torch.autograd.grad(loss(*leaves), leaves)
compiled = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves)
assert all(torch.equal(a, b) for a, b in zip(eager, compiled))
"""
    )


def test_only_what_needs_a_gradient_gets_one() -> None:
    check(
        SETUP
        + """
bias = x(1, 4, 33, 40, grad=True)
flash_attention(q, k, v, bias=bias).sum().backward()
assert bias.grad.shape == bias.shape and q.grad is None
v.requires_grad_()
flash_attention(q, k, v).sum().backward()
assert torch.allclose(v.grad.sum(), torch.tensor(4.0 * 33 * 16), rtol=1e-5)
with torch.no_grad():
    assert not flash_attention(q, k, v).requires_grad
"""
    )


@pytest.mark.parametrize("module", ["naive", "forward", "causal", "backward"])
def test_each_kernel_runs_by_itself(module: str) -> None:
    result = python("-m", f"reference_kernels.{module}", interpret=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "error/limit" in result.stdout
    assert module == "naive" or "no GPU" in result.stdout


@pytest.mark.parametrize("kernel", TABLES)
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [1, 64, 65, 128, 192, 256])
def test_every_architecture_dtype_and_head_dim_has_a_configuration(
    kernel: str, capability: int, dtype: torch.dtype, d: int
) -> None:
    for terms in (False, True):
        config = lookup(kernel, capability, dtype, d, terms=terms)
        assert isinstance(config, Config)
        # What tl.dot takes: powers of two, at least 16.
        assert all(block >= 16 and block & (block - 1) == 0 for block in config[:2])


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ((None, 0, 1, 9), (None, None)),  # decoding: the one row sees every key
        ((None, 0, 2, 9), (None, 0)),
        ((8, 3, 4, 9), (None, None)),
        ((7, 2, 4, 9), (7, 2)),
        ((2**40, 2**40, 4, 9), (None, None)),
    ],
)
def test_sides_that_hide_nothing_are_dropped(given: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    assert sides(*given) == want
