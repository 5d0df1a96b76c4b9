"""Prove that no case of the matrices would accept a result that was never computed; prints a table, writes a JSON file.

    python measurements/sensitivity.py --level full --out measurements/cpu/sensitivity-full.json

Every distinct case of a level is judged without any implementation: zeros, the mean of V and a copy of V as outputs,
zeros as gradients, held against the element bound of each arithmetic that can be declared for its dtype. `sensitivity`
says which of them are right by design. Where all heads and batch elements are judged alike, the first key head of the
first batch element stands for them: what lies beyond the bound there lies beyond it in the whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import oracles
from pytest_flashattn import matrices, sensitivity
from pytest_flashattn.cases import Case
from pytest_flashattn.chapters import CHAPTERS
from pytest_flashattn.collection import checks_of
from pytest_flashattn.features import FP8
from pytest_flashattn.inputs import TORCH_DTYPES, Inputs, make_inputs
from pytest_flashattn.tolerances import limits

# What is narrower than these is left out: P in fp32 for inputs of 16 bits.
SIXTEEN: dict[str, dict[str, Any]] = {"16 bits": {}, "sums in 16 bits": {"sums": True}}
THIRTY_TWO: dict[str, dict[str, Any]] = {"fp32": {}, "tf32": {"tf32": True}, "P in bf16": {"p_dtype": torch.bfloat16}}
EIGHT: dict[str, dict[str, Any]] = {"FP8": {}, "FP8 sums in 14 bits": {"fp8_sums": "14 bits"}}


FORWARD = {"forward", "causal", "lse", "fp8"}
"""Chapters that judge no gradient, but for the one through the log-sum-exp in "lse"."""


def cases(level: str, seed: int = 0) -> dict[Case, set[str]]:
    """The distinct cases of a level, each with the chapters that pose it. "far" is "plain" in memory of gigabytes."""
    found: dict[Case, set[str]] = {}
    for chapter in CHAPTERS:
        for check in checks_of(chapter):
            for case in matrices.cases_for(chapter, check, level, seed):
                if case.layout != "far":
                    found.setdefault(case, set()).add(chapter)
    return found


def narrowed(inputs: Inputs) -> Inputs:
    """The first key head, with its query heads, of the first batch element; all if gradients are summed over them."""
    if inputs.bias is not None or inputs.mask is not None or inputs.sinks is not None or inputs.q_descale is not None:
        return inputs
    group = inputs.q.shape[1] // inputs.k.shape[1]
    one, heads = slice(0, 1), slice(0, group)
    return inputs.with_(
        q=inputs.q[one, heads],
        k=inputs.k[one, one],
        v=inputs.v[one, one],
        dout=inputs.dout[one, heads],
        dlse=inputs.dlse[one, heads],
        alibi_slopes=None if inputs.alibi_slopes is None else inputs.alibi_slopes[heads],
    )


def asked(chapters: set[str]) -> Iterator[tuple[bool, bool]]:
    """What these chapters ask of a case: (gradients, a gradient through the log-sum-exp), once or twice."""
    yield bool(chapters - FORWARD), False
    if "lse" in chapters:
        yield True, True


def examine(
    case: Case, *, backward: bool, lse_gradient: bool
) -> Iterator[tuple[str, dict[str, str], dict[str, float]]]:
    """By arithmetic: the null results by quantity that pass though they are not right, and how far each is beyond.

    The latter by "null as quantity": the worst element as a multiple of its limit.
    """
    inputs = narrowed(make_inputs(case))
    spec = inputs.spec()
    known = {"fp32": THIRTY_TWO, **dict.fromkeys(FP8, EIGHT)}.get(case.dtype, SIXTEEN)
    for name, options in known.items():
        truths = oracles.evaluate(
            *inputs.exact(), spec,
            do=inputs.dout if backward else None, dlse=inputs.dlse if lse_gradient else None,
            arithmetic=oracles.Arithmetic.of(TORCH_DTYPES[case.dtype], **options),
        )  # fmt: skip
        beyond = {
            f"{null} as {quantity}": _worst(result, truth, limits(quantity, case).lam)
            for quantity, truth in truths.items()
            if truth.value.numel()
            for null, result in sensitivity.null_results(quantity, inputs, spec)
        }
        yield name, sensitivity.blind_spots(inputs, truths, spec.alignment, lse_gradient=lse_gradient), beyond


def _worst(result: Tensor, truth: oracles.Truth, lam: float) -> float:
    off = (result - truth.value).abs() / truth.limit(lam)
    return float(torch.where(result == truth.value, 0.0, off).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=matrices.LEVELS, default="smoke")
    parser.add_argument("--scores", type=float, default=float("inf"), help="leave out cases of more scores a head")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started, posed = time.perf_counter(), cases(arguments.level)
    judged, blind, weakest = 0, [], dict[str, tuple[float, str]]()
    right: Counter[str] = Counter()
    for case, chapters in posed.items():
        if case.q * case.k > arguments.scores:
            continue
        judged += 1
        for backward, through_lse in asked(chapters):
            for arithmetic, spots, beyond in examine(case, backward=backward, lse_gradient=through_lse):
                who = f"{case.id}, {arithmetic}" + (", dlse" if through_lse else "")
                for quantity, nulls in spots.items():
                    blind.append(f"{who}: {nulls} as {quantity}")
                    print("accepted:", blind[-1], flush=True)
                for null, ratio in beyond.items():
                    if ratio <= 1:
                        right[null] += not spots.get(null.rpartition(" as ")[2])
                    elif ratio < weakest.get(null, (float("inf"), ""))[0]:
                        weakest[null] = (ratio, who)
    seconds = time.perf_counter() - started
    print(
        f"{arguments.level}: {judged} of {len(posed)} cases, {seconds:.0f} s; accepted though not right: {len(blind)}"
    )
    for null, (ratio, who) in sorted(weakest.items()):
        print(f"  {null}: right by design {right[null]} times; else at least {ratio:.3g} x the limit ({who})")
    if arguments.out:
        document = {
            "command": f"python measurements/sensitivity.py --level {arguments.level} --scores {arguments.scores:g}",
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "cases": judged, "of": len(posed), "seconds": round(seconds), "accepted": blind,
            "weakest": {null: {"ratio": ratio, "case": who} for null, (ratio, who) in weakest.items()},
            "right_by_design": dict(right),
        }  # fmt: skip
        arguments.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
