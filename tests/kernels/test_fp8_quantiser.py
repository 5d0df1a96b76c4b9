"""The fused FP8 quantiser in Triton's interpreter: rounding, scales, rotation, layout, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from interpreted import check

pytest.importorskip("triton")

from reference_kernels.fp8 import quantise, random_signs


def test_numbers_are_rounded_as_on_a_gpu() -> None:
    """Against PyTorch's conversion, which rounds to nearest even: every number, both its neighbours, and all ties."""
    check(
        """
import torch, triton, triton.language as tl
from reference_kernels.fp8.formats import LARGEST, rounded8

@triton.jit
def narrow(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, rounded8(tl.load(x + i), y.dtype.element_ty))

for dtype, largest in LARGEST.items():
    whole = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    whole = whole[whole.isfinite()].sort().values
    ties = (whole[1:] + whole[:-1]) / 2
    x = torch.cat([whole, ties, torch.randn(600), torch.randn(600) * 1e-3, torch.randn(600) * 1e-5])
    x = torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, torch.tensor(-torch.inf))])
    x = torch.cat([x, torch.zeros(-len(x) % 1024)])
    x[-4:] = torch.tensor([2 * largest, -torch.inf, torch.inf, torch.nan])
    y = torch.empty(len(x), dtype=dtype)
    narrow[(len(x) // 1024,)](x, y, N=1024)
    want = x.clamp(-largest, largest).to(dtype).float()
    assert ((y.float() == want) | (y.isnan() & want.isnan())).all(), dtype
    assert (y.float().signbit() == x.signbit())[:-1].all(), "zeros have signs too"
"""
    )


def test_scales_are_those_of_the_oracles_whatever_shares_them() -> None:
    check(
        """
import itertools, torch
from oracles.quantise import quantise as by_definition, spread
from reference_kernels.fp8 import dequantise, quantise

torch.manual_seed(0)
for dtype, per, d in itertools.product((torch.float8_e4m3fn, torch.float8_e5m2), ("tensor", "head", "block"), (64, 80)):
    x = torch.randn(2, 3, 150, d).to(torch.bfloat16 if d == 64 else torch.float16)
    x[0, 1] *= 10
    x[1, 2, :128] = 0
    stored, descale = quantise(x, dtype=dtype, per=per)
    want = by_definition(x, dtype, per=per)
    assert torch.equal(descale, want.descale), (dtype, per, d)
    assert torch.equal(stored.float(), (x.float() * (1 / spread(descale, x))).to(dtype).float()), (dtype, per, d)
    # The same numbers up to the rounding of x / descale: in a tie, at most.
    assert (stored.float() != want.values.float()).float().mean() < 1e-2
    assert torch.equal(dequantise(stored, descale), (stored.double() * spread(descale.double(), x)).float())
    turned = quantise(x, dtype=dtype, per=per, transposed=True)
    assert turned.stored.stride(2) == 1 and turned.stored.stride(3) == 160
    assert torch.equal(turned.stored.float(), stored.float()) and torch.equal(turned.descale, descale)
    assert dequantise(*turned, torch.bfloat16).is_contiguous(), "as the 16-bit kernels want it"
    room = turned.stored.as_strided((2, 3, d, 160), (3 * d * 160, d * 160, 160, 1)).float()
    assert not room[..., 150:].any(), "the padding, which is written too"
    strided = quantise(x.transpose(1, 2).contiguous().transpose(1, 2), dtype=dtype, per=per, block=32)
    if per == "block":
        assert torch.equal(strided.descale, by_definition(x, dtype, per=per, block=32).descale)
    else:
        assert torch.equal(strided.stored.float(), stored.float())
"""
    )


def test_zeros_tiny_numbers_infinities_and_nan() -> None:
    check(
        """
import torch
from reference_kernels.fp8 import dequantise, quantise

x = torch.randn(1, 4, 130, 64).bfloat16()
x[0, 0, :128] = 0
x[0, 1, 5, 7], x[0, 1, 6, 0], x[0, 1, 9, 9] = torch.inf, -torch.inf, torch.nan
x[0, 2] *= 1e-38
for per in ("block", "head", "tensor"):
    stored, descale = quantise(x, per=per)
    assert (descale > 0).all() and descale.isfinite().all()
    value = dequantise(stored, descale)
    assert not stored[0, 0, :128].float().any()
    assert per != "block" or (descale[0, 0, 0] == 1 and descale[0, 0, 1] != 1)
    assert stored[0, 1, 5, 7] == 448 and stored[0, 1, 6, 0] == -448 and stored[0, 1, 9, 9].isnan()
    assert stored.isnan().sum() == 1
    good = x.isfinite()
    assert ((value - x.float())[good].abs() <= 0.04 * x[good].float().abs().max()).all()
    if per != "tensor":
        assert (value[0, 2] - x[0, 2].float()).abs().max() <= 2.0**-126 / 2, "rounded to multiples of 2^-135"
empty = quantise(torch.empty(1, 2, 0, 64).bfloat16(), per="head")
assert empty.stored.shape == (1, 2, 0, 64) and (empty.descale == 1).all()
"""
    )


def test_a_rotation_is_that_of_the_oracles_and_spreads_a_channel() -> None:
    check(
        """
import torch
from oracles.quantise import random_signs as oracle_signs, rotate
from reference_kernels.fp8 import dequantise, quantise, random_signs
from reference_kernels.fp8.configs import QuantiserConfig

torch.manual_seed(0)
for d in (64, 128, 256):
    signs = random_signs(d)
    assert torch.equal(signs, oracle_signs(d)) and not torch.equal(signs, random_signs(d, seed=1))
    x = torch.randn(1, 2, 40, d).to(torch.float16 if d == 128 else torch.bfloat16)
    x[..., 3] *= 30
    plain = quantise(x)
    for per in ("block", "head"):
        stored, descale = quantise(x, per=per, signs=signs)
        true = rotate(x.double(), signs)
        most = true.abs().amax((2, 3)) / 448
        assert (descale.reshape(1, 2) / most - 1).abs().max() < 1e-6, d
        assert (dequantise(stored, descale) - true).norm() < 0.03 * true.norm(), d
        assert descale.max() < 0.6 * plain.descale.max(), "the large channel decides no longer"
    turned = quantise(x, signs=signs, transposed=True)
    other = quantise(x, signs=signs, config=QuantiserConfig(64, part=min(d, 128)))
    stored = quantise(x, signs=signs).stored.float()
    assert torch.equal(turned.stored.float(), stored)
    alone = quantise(x, signs=signs, block=16, config=QuantiserConfig(64))
    for ahead, programs in ((1, 1), (1, 4), (2, 5), (1, 9)):
        walked = quantise(x, signs=signs, block=16, config=QuantiserConfig(64, 64, ahead, programs))
        assert torch.equal(walked.stored.float(), alone.stored.float()), "it does not matter whose a block is"
        assert torch.equal(walked.descale, alone.descale)
    # In parts of other widths the sums round elsewhere: a number next to the middle of two may go to the other.
    assert (other.stored.float() != stored).float().mean() < 1e-2
    assert ((other.stored.float() - stored).abs() <= stored.abs() / 8 + 2.0**-9).all()
"""
    )


def test_an_interleaved_column_holds_the_keys_in_the_order_of_a_matrix_product() -> None:
    """Bit by bit, against indexing; what has no key is zero, wherever in the last 16 it lies."""
    check(
        """
import itertools, torch
from reference_kernels.fp8 import quantise, random_signs

order = torch.empty(16, dtype=torch.long)
for j, h, b in itertools.product(range(4), range(2), range(2)):
    order[4 * j + 2 * h + b] = 8 * h + 2 * j + b
assert sorted(order.tolist()) == list(range(16))

def memory(x):
    # (B, H, D, L), L rounded up to a multiple of 16
    b, h, length, d = x.shape
    width = -(-length // 16) * 16
    assert x.stride() == (h * d * width, d * width, 1, width)
    return x.as_strided((b, h, d, width), (h * d * width, d * width, width, 1)).view(torch.uint8)

torch.manual_seed(0)
cases = itertools.product((1, 16, 150, 256), (64, 80), ("block", "head"), (torch.float8_e4m3fn, torch.float8_e5m2))
for length, d, per, dtype in cases:
    x = torch.randn(2, 2, length, d).to(torch.bfloat16 if d == 64 else torch.float16)
    for signs in (None, random_signs(d)) if d == 64 else (None,):
        plain = quantise(x, per=per, dtype=dtype, signs=signs, transposed=True)
        mixed = quantise(x, per=per, dtype=dtype, signs=signs, transposed=True, interleaved=True)
        assert mixed.stored.shape == x.shape and torch.equal(mixed.descale, plain.descale)
        keys = memory(plain.stored)
        at = torch.arange(keys.shape[3]).view(-1, 1, 16)[..., order].flatten()
        assert torch.equal(memory(mixed.stored), keys[..., at]), (length, d, per, dtype)
        assert not keys[..., length:].any(), "the padding"
"""
    )


def test_stores_are_16_bytes_wide() -> None:
    """Rows and columns alike: a byte a thread is what a store of columns becomes if its mask may end anywhere."""
    check(
        """
import re, triton
from triton.backends.compiler import GPUTarget
from reference_kernels.compiling.worker import NoDevice
from reference_kernels.fp8.cases import quantiser_case

target = GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(NoDevice(target))
columns = {"transposed": True}
kinds_of_case = ({}, columns, {"interleaved": True, **columns}, {"rotate": True}, {"per": "given", **columns})
for d in (64, 128, 256):
    for options in kinds_of_case:
        case = quantiser_case("bf16", "e4m3", d, **options)
        kinds = {n: case.signature[n].partition(":") for n in case.kernel.arg_names}
        hints = {
            (i,): [["tt.divisibility", 16]]
            for i, (kind, _, hint) in enumerate(kinds.values())
            if hint or kind.startswith("*")
        }
        source = triton.compiler.ASTSource(
            case.kernel, {n: kind for n, (kind, _, _) in kinds.items()}, dict(case.constexprs), hints
        )
        built = triton.compile(source, target=target, options={"num_warps": case.num_warps})
        stores = set(re.findall(r"st\\.global\\.(\\S+)", built.asm["ptx"]))
        loads = set(re.findall(r"ld\\.global\\.(\\S+)", built.asm["ptx"]))
        loads |= {f"{int(n, 0)} ahead" for n in re.findall(r"cp\\.async\\.\\S+ [^;]*, (0x\\w+), ", built.asm["ptx"])}
        assert stores == {"v4.b32", "b32"}, (case.name, stores)
        assert loads & {"v4.b32", "16 ahead"} and loads <= {"v4.b32", "16 ahead", "b32"}, (case.name, loads)
""",
        interpret=False,
    )


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"x": torch.zeros(2, 3, 4)}, ValueError, "x must have 4 dimensions"),
        ({"x": torch.zeros(1, 1, 4, 8)}, NotImplementedError, "x torch.float32"),
        ({"x": torch.zeros(1, 1, 4, 300, dtype=torch.float16)}, NotImplementedError, "head dim 300"),
        ({"dtype": torch.float16}, ValueError, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2"),
        ({"per": "row"}, ValueError, "per must be"),
        ({"block": 100}, ValueError, "power of two from 16 to 256"),
        ({"interleaved": True}, ValueError, "needs transposed=True"),
        ({"signs": torch.ones(32)}, ValueError, r"signs must be \(64,\) float32"),
        ({"x": torch.zeros(1, 1, 4, 80, dtype=torch.float16), "signs": torch.ones(80)}, NotImplementedError, "rotated"),
    ],
)
def test_what_it_cannot_quantise_is_said(options, error, said) -> None:
    call = {"x": torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)} | options
    with pytest.raises(error, match=said):
        quantise(call.pop("x"), **call)


def test_signs_are_signs() -> None:
    signs = random_signs(128)
    assert set(signs.tolist()) == {1.0, -1.0}
