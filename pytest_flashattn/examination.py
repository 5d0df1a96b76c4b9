"""Compare what an implementation returned with the truth: every declared quantity, bound first, noise floor second."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor

import oracles

from . import attempt, sensitivity
from .cases import Case
from .descales import Blocks
from .diagnosis import notebook
from .features import FP8
from .implementation import Implementation, Unsupported
from .inputs import TORCH_DTYPES, Inputs, make_inputs, output_dtype
from .judge import against_bound, against_noise
from .support import Support
from .tolerances import limits
from .verdict import Measure, Verdict

NOISE_QUANTITIES = frozenset({"o", "dq", "dk", "dv"})
"""Quantities in the input dtype over all rows: what the emulator's RMS error is a floor for."""


def inputs_for(implementation: Implementation, case: Case) -> Inputs:
    """The tensors of `case` on the implementation's device, in its order of axes."""
    support = implementation.support
    blocks = Blocks(support.q_block, support.kv_block)
    return make_inputs(case, implementation.device, implementation.convention.layout, blocks)


def arithmetic(support: Support, case: Case) -> oracles.Arithmetic:
    """What the implementation declares of its arithmetic, on the dtype of `case`."""
    return oracles.Arithmetic.of(
        TORCH_DTYPES[case.dtype],
        p_dtype=TORCH_DTYPES[support.p_dtype] if support.p_dtype else None,
        tf32=support.tf32 and case.dtype == "fp32",
        sums=support.gradient_sums == "input" and case.dtype != "fp32",
        p_scale=support.p_scale,
        fp8_sums=support.fp8_sums if case.dtype in FP8 else "fp32",
    )


def truth(
    implementation: Implementation, inputs: Inputs, *, backward: bool = False, lse_gradient: bool = False
) -> dict[str, oracles.Truth]:
    """The float64 values and the sizes of a correct kernel's errors, for this implementation's arithmetic."""
    support = implementation.support
    return oracles.evaluate(
        *inputs.exact(),
        inputs.spec(support.alignment),
        do=inputs.dout if backward else None,
        dlse=inputs.dlse if lse_gradient else None,
        arithmetic=arithmetic(support, inputs.case),
    )


def judge(
    implementation: Implementation,
    inputs: Inputs,
    outputs: dict[str, Tensor],
    *,
    lse_gradient: bool = False,
    noise: bool = True,
    rows: slice = slice(None),
) -> list[Measure]:
    """Every output against its truth: the element bound, then the noise floor. Gradients exactly like outputs.

    rows: judge the output (and nothing else) on these query rows only, by the bound alone.
    A measure that would have accepted a result that was never computed says so (`Measure.blind`).
    """
    support, case = implementation.support, inputs.case
    backward = any(name.startswith("d") for name in outputs)
    expected = truth(implementation, inputs, backward=backward, lse_gradient=lse_gradient)
    emulated: dict[str, Tensor] = {}
    # The emulator knows neither tf32 operands nor 16-bit sums: those keep the bound alone, derived for them.
    single, fp8 = case.dtype == "fp32", case.dtype in FP8
    floor = NOISE_QUANTITIES
    if support.gradient_sums == "input" and not single:
        floor = floor - {"dq", "dk", "dv"}
    if noise and rows == slice(None) and not (support.tf32 and single):
        p_dtype = TORCH_DTYPES[support.p_dtype or case.dtype]
        scaled = p_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        q, k, v = inputs.exact()
        emulated = oracles.emulate(
            *((q.float(), k.float(), v.float()) if fp8 else (q, k, v)),
            inputs.spec(support.alignment),
            do=inputs.dout if backward else None,
            dlse=inputs.dlse if lse_gradient else None,
            p_dtype=p_dtype,
            p_scale=support.p_scale if scaled else 1.0,
            out_dtype=output_dtype(case),
            fp8_sums=support.fp8_sums if fp8 else "fp32",
        )
    measures: list[Measure] = []
    for name, got in outputs.items():
        allowed = limits(name, case)
        believed = expected[name]
        if rows != slice(None):
            got = got[:, :, rows]
            believed = oracles.Truth(*(x[:, :, rows] for x in (believed.value, believed.random, believed.fixed)))
        measures.append(against_bound(name, got, believed, allowed.lam))
        if name in emulated and name in floor:
            measures += against_noise(
                name,
                got,
                believed,
                emulated[name],
                tensor=allowed.tensor,
                block=allowed.block,
                draws=case.q * case.heads // case.kv_heads if name in ("dk", "dv") else None,
            )
    if rows == slice(None):
        judged = {name: expected[name] for name in outputs}
        blind = sensitivity.blind_spots(inputs, judged, support.alignment, lse_gradient=lse_gradient)
        measures = [replace(m, blind=blind.get(m.quantity, "")) for m in measures]
    if (notes := notebook.current()) is not None and not all(m.ok for m in measures):
        notes.failure(inputs, outputs, expected, measures, rows)
    return measures


def examine(implementation: Implementation, inputs: Inputs, *, backward: bool = True, lse: bool = True) -> Verdict:
    """The verdict on everything the implementation declares for this case: output, log-sum-exp, gradients."""
    outputs = declared_outputs(implementation, inputs, backward=backward, lse=lse)
    return Verdict.of(judge(implementation, inputs, outputs))


def declared_outputs(
    implementation: Implementation, inputs: Inputs, *, backward: bool = True, lse: bool = True
) -> dict[str, Tensor]:
    """What the implementation returns of everything it declares for this case: output, log-sum-exp, gradients."""
    lse = lse and "lse" in implementation.support.features
    if backward and implementation.support.gap(inputs.case, ("backward",)) is None:
        # Unsupported: forward only; judge what there is.
        with contextlib.suppress(Unsupported):
            wrt = attempt.differentiable(implementation, inputs)
            return attempt.backward(implementation, inputs, wrt=wrt, lse=lse)
    return attempt.forward(implementation, inputs, lse=lse)
