"""Compare one tensor with its truth: the element bound, the noise floor, exact bits. Pure functions that measure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import oracles

from .localise import where
from .verdict import Measure

BLOCK_ROWS = 128
"""Rows of a noise-floor block: the largest query tile of the kernels known, so one bad tile fills one block."""

GRADES = ((1.05, "A"), (1.25, "B"), (1.5, "C"))
"""Noise floor: the whole tensor's RMS error as a multiple of the emulator's, up to which a grade is given; else D."""

NOISE_SHARE = 0.1
"""Share of the bound's random part below which an emulator's noise counts as luck (0.3 to 0.6 of it is usual)."""

_ULP_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_MIN_EXPONENT = {torch.float16: -14, torch.bfloat16: -126, torch.float32: -126, torch.float64: -1022}


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at `value` (the subnormal step below the normal range)."""
    exponent = math.frexp(value)[1] - 1 if value and math.isfinite(value) else _MIN_EXPONENT[dtype]
    return 2.0 ** (max(exponent, _MIN_EXPONENT[dtype]) - _ULP_BITS[dtype])


def against_bound(quantity: str, got: Tensor, truth: oracles.Truth, lam: float) -> Measure:
    """The element bound: every element of `got` within lam * random + fixed of the float64 value."""
    measure = against_value(quantity, got, truth.value, truth.limit(lam))
    excess = (got.double() - truth.value).abs().nan_to_num(nan=0.0) - truth.fixed
    needed = torch.where(excess > 0, excess / truth.random, 0.0)
    return replace(measure, needed=float(needed.max()) if got.numel() else 0.0)


def against_value(quantity: str, got: Tensor, want: Tensor, limit: Tensor) -> Measure:
    """Every element of `got` within `limit` of `want` (float64, same shape).

    Infinities of `want` must be met with the same sign; NaN never matches. Raises ValueError if `want` holds NaN: that
    is a fault of ours, and no verdict may rest on it.
    """
    if want.isnan().any():
        raise ValueError(
            f"the oracle's {quantity} holds NaN: please report this case, it is a fault of pytest-flashattn"
        )
    if not got.numel():
        return Measure(quantity, "bound", 0.0, 0.0)
    got64 = got.double()
    error = torch.where(got64 == want, 0.0, (got64 - want).abs())  # equal infinities differ by NaN
    ratio = torch.where(error == 0, 0.0, error / limit)
    ratio = torch.where(got64.isnan() | (want.isinf() & (error != 0)), math.inf, ratio)
    beyond = ~(ratio <= 1)
    count = int(beyond.sum())
    flat = int(ratio.argmax())
    worst = _worst(flat, got, want, error)
    return Measure(
        quantity,
        "bound",
        ratio=math.nan if math.isnan(worst["got"]) else float(ratio.flatten()[flat]),
        limit=float(limit.flatten()[flat]),
        beyond=count,
        total=got.numel(),
        worst=worst,
        note=where(beyond) if count else "",
    )


def _worst(flat: int, got: Tensor, want: Tensor, error: Tensor) -> dict[str, Any]:
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape)]
    received, wanted, off = (float(x.flatten()[flat]) for x in (got, want, error))
    return {"index": index, "got": received, "want": wanted, "error": off, "ulps": off / ulp(wanted, got.dtype)}


def against_noise(
    quantity: str,
    got: Tensor,
    truth: oracles.Truth,
    emulated: Tensor,
    *,
    tensor: float,
    block: float,
    draws: int | None = None,
) -> list[Measure]:
    """The noise floor: RMS error of `got` against that of the emulator, over the tensor and the worst 128 rows.

    The emulator's noise is one draw and may happen to be tiny (an exact case, one row), so a share of the size that the
    bound gives to a random error is added to it: the fewer rows a block has, the larger the share.
    draws: for dk and dv the query rows that read a key head, each with one P, dS and Delta to a key: where they are
    fewer than the rows of a block, it is their number that averages luck away.
    """
    if not got.numel():
        return []
    error = (got.double() - truth.value).square()
    noise = (emulated.double() - truth.value).square()
    size = truth.random.square()
    batch, heads, length, _ = got.shape
    draws = length if draws is None else draws
    whole = float(_ratio(error.mean(), noise.mean(), size.mean(), batch * heads * min(length, draws)))
    worst = 0.0
    for start in range(0, length, BLOCK_ROWS):
        e, n, s = (x[..., start : start + BLOCK_ROWS, :].mean((-1, -2)) for x in (error, noise, size))
        rows = min(BLOCK_ROWS, length - start, draws)
        worst = max(worst, float(_ratio(e, n, s, rows).max()))
    grade = next((letter for limit, letter in GRADES if whole <= limit), "D")
    return [
        Measure(quantity, "noise", whole / tensor, tensor, grade=grade),
        Measure(quantity, "noise-block", worst / block, block),
    ]


def _ratio(error: Tensor, noise: Tensor, size: Tensor, rows: int) -> Tensor:
    # The columns of a row share the error of one dS or one P: it is the rows that average luck away.
    share = NOISE_SHARE + (1 - NOISE_SHARE) / math.sqrt(max(rows, 1))
    ratio = (error / (noise + share**2 * size)).sqrt()
    ratio = torch.where(error == 0, 0.0, ratio)  # 0 / 0: right where everything is exact
    return torch.where(error.isnan(), math.inf, ratio)


def identical(quantity: str, got: Tensor, want: Tensor) -> Measure:
    """Equal to the last bit (NaN equals NaN: two runs may be wrong alike; the bound judges that)."""
    same = (got == want) | (got.isnan() & want.isnan())
    count = int((~same).sum())
    if not count:
        return Measure(quantity, "exact", 0.0, 0.0, 0, got.numel())
    error = torch.where(same, 0.0, (got.double() - want.double()).abs()).nan_to_num(nan=math.inf)
    worst = _worst(int(error.argmax()), got, want, error)
    return Measure(quantity, "exact", math.inf, 0.0, count, got.numel(), worst, note=where(~same))
