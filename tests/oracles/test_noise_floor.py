"""The emulator: as noisy as the arithmetic requires and no more, whatever the process has switched on."""

from __future__ import annotations

import pytest
import torch
from oracle_problems import problem
from test_error_bounds import family, faulty, sdpa
from torch import Tensor
from torch.nn.attention import SDPBackend

from oracles import AttentionSpec, dense, emulate


def _rms(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_as_noisy_as_a_real_kernel(causal: bool, dtype: torch.dtype) -> None:
    p = family("normal", dtype, lq=256, lk=256, causal=causal)
    real = sdpa(p, SDPBackend.FLASH_ATTENTION)
    emulated = emulate(p.q, p.k, p.v, p.spec, do=p.do)
    truth = dense.forward(p.q, p.k, p.v, p.spec)._asdict() | dense.backward(p.q, p.k, p.v, p.spec, p.do)._asdict()
    for quantity in ("o", "dq"):
        ratio = _rms(real[quantity], truth[quantity]) / _rms(emulated[quantity], truth[quantity])
        # fp32 has no rounding in common: only the orders of summation differ, by a factor that depends on the machine.
        assert (0.9 < ratio < 1.1) if dtype != torch.float32 else (0.3 < ratio < 3), f"{quantity}: {ratio:.3f}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_scale_one_percent_off_is_above_the_floor(dtype: torch.dtype) -> None:
    p = family("normal", dtype, lq=256, lk=256)
    truth, floor = dense.forward(p.q, p.k, p.v, p.spec).o, emulate(p.q, p.k, p.v, p.spec)["o"]
    assert _rms(faulty(p, "none"), truth) < 1.05 * _rms(floor, truth)
    assert _rms(faulty(p, "scale 1 % off"), truth) > 2 * _rms(floor, truth)


def test_p_dtype_is_where_the_noise_comes_from() -> None:
    p = family("normal", torch.bfloat16)
    truth = dense.forward(p.q, p.k, p.v, p.spec).o
    by_dtype = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
    noise = [_rms(emulate(p.q, p.k, p.v, p.spec, p_dtype=x)["o"], truth) for x in by_dtype]
    assert noise[0] < noise[1] < noise[2] / 5


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_blocks_change_rounding_only(block: int) -> None:
    p = problem(dtype=torch.float32, causal=True, sinks=lambda normal: normal(4), bias=lambda normal: normal(4, 1, 23))
    found = emulate(p.q, p.k, p.v, p.spec, do=p.do, dlse=p.dlse, block=block)
    truth = dense.forward(p.q, p.k, p.v, p.spec)._asdict()
    truth |= dense.backward(p.q, p.k, p.v, p.spec, p.do, p.dlse)._asdict()
    for quantity, x in found.items():
        torch.testing.assert_close(x.double(), truth[quantity], rtol=1e-4, atol=1e-5)


def test_dtypes_of_the_outputs() -> None:
    p = problem(dtype=torch.float16, bias=lambda normal: normal(17, 23), sinks=lambda normal: normal(4))
    found = emulate(p.q, p.k, p.v, p.spec, do=p.do)
    assert found.pop("lse").dtype == torch.float32
    assert {x.dtype for x in found.values()} == {torch.float16}


def test_autocast_and_fast_matmul_are_kept_out_and_restored() -> None:
    p = family("normal", torch.float32)
    expected = emulate(p.q, p.k, p.v, AttentionSpec())["o"]
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(emulate(p.q, p.k, p.v, AttentionSpec())["o"], expected)
            assert (p.q @ p.k.mT).dtype == torch.bfloat16
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
