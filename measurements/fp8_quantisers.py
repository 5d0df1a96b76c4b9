"""The FP8 quantisers that fp8.py checks and times: the table's, and candidates for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from cells import Answer
from hopper import tensors

QUANTISERS: dict[tuple[str, int], list[tuple[int, ...]]] = {
    ("rows", 64): [(64,), (32,)],
    ("rows", 128): [(64,), (128,)],
    ("rows", 256): [(64,), (128,)],
    ("columns", 64): [(64,), (128,), (32,)],
    ("columns", 128): [(64,), (128,), (32,)],
    ("columns", 256): [(64,), (128,)],
    ("rotated", 64): [(64, 64, 1, 3), (64, 64, 1, 2), (64,), (32, 64, 1, 2)],
    ("rotated", 128): [(128, 64, 1, 2), (64, 64, 1, 2), (128, 128, 1, 2), (64, 64, 2, 1), (128,)],
    ("rotated", 256): [(64, 128, 1, 1), (64, 64, 1, 1), (128, 128, 1, 1), (128, 64, 1, 1), (64,)],
}
"""By what is done and D: values of QuantiserConfig."""


def quantiser_candidates(d: int, per: str, how: str) -> dict[str, Any]:
    """The table's choice, and by block the others, by name."""
    from reference_kernels.fp8.configs import QuantiserConfig, quantiser_config

    table = quantiser_config(90, d, rotated=how == "rotated", transposed=how == "columns")
    others = [QuantiserConfig(*values) for values in QUANTISERS[how, d]] if per == "block" else []
    return {"table": table} | {_said(config): config for config in others if config != table}


def _said(config: Any) -> str:
    ahead = f", {config.ahead} ahead, {config.programs} programs" if config.ahead else ""
    return f"{config.elements} a thread, parts of {config.part}{ahead}"


def quantiser_calls(x: Any, per: str, how: str) -> dict[str, Callable[[], Any]]:
    """The quantiser of x, by candidate."""
    from reference_kernels.fp8 import quantise, random_signs

    d = x.shape[3]
    signs = random_signs(d, "cuda") if how == "rotated" else None
    options: dict[str, Any] = {"per": per, "signs": signs, "transposed": how == "columns"}
    configs = quantiser_candidates(d, per, how)
    return {name: partial(quantise, x, **options, config=config) for name, config in configs.items()}


def prepare(d: int, per: str, how: str) -> Answer:
    """What the candidates store, of a tensor with zeros, infinities and NaN; those that store something else, by name.

    Rows and columns: descales and bytes must be those of the definition in float32. Rotated: descales to 1e-5, and the
    error that of rounding. Columns are compared interleaved too.
    """
    import torch

    from oracles.quantise import quantise as by_definition
    from oracles.quantise import rotate, spread
    from reference_kernels.fp8 import dequantise, quantise, random_signs
    from reference_kernels.fp8.hopper.interleaving import interleave_keys

    x = tensors(d, 8192, "bf16", batch=1)[0]
    x[0, 0, :128] = 0
    if how != "rotated":
        x[0, 1, 5, 7], x[0, 1, 6, 0], x[0, 1, 9, 9] = math.inf, -math.inf, math.nan
    wrong = []
    found = {name: call() for name, call in quantiser_calls(x, per, how).items()}
    if how == "rotated":
        true = rotate(x.double(), random_signs(d, "cuda"))
        want = by_definition(true, per=per).descale
        for name, (stored, descale) in found.items():
            off = (dequantise(stored, descale) - true).norm() / true.norm()
            if not (descale / want - 1).abs().max() < 1e-5 or not off < 0.03:
                wrong.append(name)
    else:
        want = by_definition(x, per=per).descale
        exact = (x.float() * (1 / spread(want, x))).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        for name, (stored, descale) in found.items():
            same = (stored.view(torch.uint8) == exact) | (x.isnan() & stored.float().isnan())
            if not torch.equal(descale, want) or not same.all():
                wrong.append(name)
    if how == "columns":
        for name, config in quantiser_candidates(d, per, how).items():
            other = quantise(x, per=per, transposed=True, interleaved=True, config=config).stored
            if not torch.equal(other.view(torch.uint8), interleave_keys(found[name].stored).view(torch.uint8)):
                wrong.append(f"{name}, interleaved")
    return {"ok": not wrong, "wrong": wrong}


def quantisers(d: int, per: str, how: str) -> Answer:
    """GB/s of one quantiser, and of copying, on a tensor of 16k tokens, hidden 2048, and what `prepare` says.

    Bytes that must move: of a copy 4 an element, of scales by block 3, and 5 where the scale is that of more than a
    block, and x has to be read twice.
    """
    import torch
    from kernels import Clock

    answer = prepare(d, per, how)
    x = tensors(d, 8192, "bf16")[0]
    other = torch.empty_like(x)
    calls = quantiser_calls(x, per, how)
    times = Clock().medians(calls | {"copy": partial(other.copy_, x)})
    size = {"copy": 4} | dict.fromkeys(calls, 3 if per == "block" else 5)
    rates = {name: round(x.numel() * size[name] / ms / 1e6, 1) for name, ms in times.items()}
    shares = {name: round(rates[name] / rates["copy"], 3) for name in calls}
    return {**answer, "gbps": rates, "shares of copy": shares, "ms": times}
