"""What FP8 costs attention, by scheme of quantisation: the tables of docs/fp8.md.

    python measurements/fp8_error.py --out measurements/cpu/fp8-error.json      minutes on one CPU core
    python measurements/fp8_error.py --table measurements/cpu/fp8-error.json

Attention of the original float32 inputs in float64 is the truth. Against it: the same of the quantised inputs, also in
float64 ("inputs"); an FP8 kernel on them, P in e4m3 times 2^8, fp32 sums, output in bf16 ("kernel"); and a kernel of
16 bits on the inputs rounded to 16 bits. Each as RMS error over the RMS of the truth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import oracles
from oracles.quantise import dequantise, quantise, random_signs, relative_rms, rotate

SHAPE = (1, 4, 1024, 128)
SEEDS = 3
BLOCK = 128
SPEC = oracles.AttentionSpec()
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Scheme(NamedTuple):
    """per: what shares a descale. rotated: q and k by a random Hadamard matrix. only: what is quantised."""

    per: str
    rotated: bool = False
    format: str = "e4m3"
    only: str = "qkv"

    def __str__(self) -> str:
        alone = {"qkv": "", "qk": ", q and k alone", "v": ", v alone"}[self.only]
        return f"{self.format}, one a {self.per}{', rotated' if self.rotated else ''}{alone}"


SCHEMES = (
    *(Scheme(per, rotated) for rotated in (False, True) for per in ("tensor", "head", "block")),
    Scheme("block", True, only="qk"),
    Scheme("block", True, only="v"),
    Scheme("block", True, "e5m2"),
)


def inputs(family: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of SHAPE, float32."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    match family:
        case "FlashAttention-3":  # N(0, 1) + N(0, 100) Bernoulli(0.001), arXiv:2407.08608
            q, k, v = (
                x + 10 * torch.randn(SHAPE, generator=generator) * (torch.rand(SHAPE, generator=generator) < 1e-3)
                for x in (q, k, v)
            )
        case "channels":
            k[..., [5, 37]] += 20
            direction = torch.ones(SHAPE[-1]) / SHAPE[-1] ** 0.25
            q, k[..., 0, :] = q + 2 * direction, 3 * direction
            v[..., 0, :] *= 0.1
        case "rows":
            size = torch.randn((*SHAPE[:2], SHAPE[2] // BLOCK, 1), generator=generator).mul(1.5).exp2()
            v = (v.unflatten(2, (-1, BLOCK)) * size[..., None]).flatten(2, 3)
    return q, k, v


FAMILIES = {
    "normal": "N(0, 1)",
    "FlashAttention-3": "N(0, 1) + N(0, 100) · Bernoulli(0.001): the outliers of the FlashAttention-3 paper",
    "channels": "two channels of k near 20 in all keys, and a first key that most rows attend to, as in trained models",
    "rows": "blocks of 128 rows of v that differ in size, by a factor of 2.8 (one standard deviation)",
}


def quantised(x: tuple[Tensor, Tensor, Tensor], scheme: Scheme) -> list[Tensor]:
    """What q, k and v are after quantisation, float64; q and k stay rotated, which their products do not show."""
    q, k, v = x
    if scheme.rotated:
        signs = random_signs(SHAPE[-1])
        q, k = rotate(q, signs), rotate(k, signs)
    return [
        dequantise(*quantise(t, FORMATS[scheme.format], per=scheme.per, block=BLOCK), block=BLOCK)
        if name in scheme.only
        else t.double()
        for name, t in (("q", q), ("k", k), ("v", v))
    ]


def errors(family: str, seed: int) -> dict[str, dict[str, float]]:
    """By scheme (and 16-bit dtype): the relative RMS errors of "inputs" and "kernel"."""
    given = inputs(family, seed)
    truth = oracles.dense.forward(*given, SPEC).o
    found = {}
    for scheme in SCHEMES:
        exact = quantised(given, scheme)
        kernel = oracles.emulate(
            *(x.float() for x in exact), SPEC, p_dtype=FORMATS[scheme.format], p_scale=256, out_dtype=torch.bfloat16
        )["o"]
        same = oracles.dense.forward(*exact, SPEC).o
        found[str(scheme)] = {"inputs": relative_rms(same, truth), "kernel": relative_rms(kernel, truth)}
    for name, dtype in HALVES.items():
        rounded = [x.to(dtype) for x in given]
        same, kernel = oracles.dense.forward(*rounded, SPEC).o, oracles.emulate(*rounded, SPEC)["o"]
        found[name] = {"inputs": relative_rms(same, truth), "kernel": relative_rms(kernel, truth)}
    return found


def measure() -> dict[str, Any]:
    """The document: the median over SEEDS of each error."""
    families = {}
    for family, about in FAMILIES.items():
        runs = [errors(family, seed) for seed in range(SEEDS)]
        medians = {
            scheme: {kind: statistics.median(run[scheme][kind] for run in runs) for kind in runs[0][scheme]}
            for scheme in runs[0]
        }
        families[family] = {"about": about, "errors": medians}
        print(f"{family}: done", file=sys.stderr)
    return {
        "command": "python measurements/fp8_error.py --out measurements/cpu/fp8-error.json",
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "shape": SHAPE, "block": BLOCK, "seeds": SEEDS, "families": families,
    }  # fmt: skip


def tables(document: dict[str, Any]) -> dict[str, list[str]]:
    """By marker of docs/fp8.md: the lines of its tables."""
    families = document["families"]
    names = list(next(iter(families.values()))["errors"])
    lines = ["| | " + " | ".join(families) + " |", "|---|" + "---|" * len(families)]
    for name in names:
        cells = (_percent(family["errors"][name]) for family in families.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    about = ["| inputs | what they are |", "|---|---|", *(f"| {n} | {f['about']} |" for n, f in families.items())]
    said = ["| claim | measured |", "|---|---|", *(f"| {claim} | {found} |" for claim, found in _claims(families))]
    return {"fp8-error": lines, "fp8-inputs": about, "fp8-claims": said}


def _percent(error: dict[str, float]) -> str:
    return f"{100 * error['inputs']:.3g} / {100 * error['kernel']:.3g}"


def _claims(families: dict[str, Any]) -> Iterator[tuple[str, str]]:
    def kernel(family: str, scheme: str) -> float:
        return float(families[family]["errors"][scheme]["kernel"])

    tensor, block, both = (str(Scheme("tensor")), str(Scheme("block")), str(Scheme("block", True)))
    fa3 = [kernel("FlashAttention-3", scheme) for scheme in (tensor, block, both)]
    yield (
        "block scales and a rotation make the error of one scale a tensor 2.6 times smaller, on outliers",
        f"{fa3[0] / fa3[2]:.2f} times; block scales alone {fa3[0] / fa3[1]:.2f} times",
    )
    yield "with both, outliers cost less than 0.5 %", f"{100 * fa3[2]:.2g} %"
    rows = [kernel("rows", scheme) for scheme in (tensor, block)]
    yield (
        "block scales help where blocks differ in size",
        f"{rows[0] / rows[1]:.2f} times smaller than with one a tensor",
    )
    for family in ("normal", "channels"):
        times = kernel(family, block) / kernel(family, "fp16")
        yield f"the error of fp16 on the same inputs, {family}", f"block scales have {times:.0f} times that"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="measure, and write this file")
    parser.add_argument("--table", type=Path, help="print the tables of this file")
    arguments = parser.parse_args()
    if arguments.out:
        torch.set_num_threads(1)
        arguments.out.write_text(json.dumps(measure(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path = arguments.table or arguments.out
    if path is None:
        parser.error("say --out, to measure, or --table, to print what was measured")
    for name, lines in tables(json.loads(path.read_text(encoding="utf-8"))).items():
        print("\n".join([f"<!-- {name} -->", *lines, ""]))


if __name__ == "__main__":
    main()
