"""Compare what an implementation returned with the truth: every declared quantity, bound first, noise floor second."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from torch import Tensor

import oracles

from . import attempt, sensitivity
from .cases import Case
from .diagnosis import notebook
from .implementation import Implementation, Unsupported
from .inputs import TORCH_DTYPES, Inputs, make_inputs
from .judge import against_bound, against_noise
from .tolerances import limits
from .verdict import Measure, Verdict

NOISE_QUANTITIES = frozenset({"o", "dq", "dk", "dv"})
"""Quantities in the input dtype over all rows: what the emulator's RMS error is a floor for."""


def inputs_for(implementation: Implementation, case: Case) -> Inputs:
    """The tensors of `case` on the implementation's device, in its order of axes."""
    return make_inputs(case, implementation.device, implementation.convention.layout)


def truth(
    implementation: Implementation, inputs: Inputs, *, backward: bool = False, lse_gradient: bool = False
) -> dict[str, oracles.Truth]:
    """The float64 values and the sizes of a correct kernel's errors, for this implementation's arithmetic."""
    support, case = implementation.support, inputs.case
    arithmetic = oracles.Arithmetic.of(
        TORCH_DTYPES[case.dtype],
        p_dtype=TORCH_DTYPES[support.p_dtype] if support.p_dtype else None,
        tf32=support.tf32 and case.dtype == "fp32",
        sums=support.gradient_sums == "input" and case.dtype != "fp32",
    )
    return oracles.evaluate(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.spec(support.alignment),
        do=inputs.dout if backward else None,
        dlse=inputs.dlse if lse_gradient else None,
        arithmetic=arithmetic,
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
    single = case.dtype == "fp32"
    floor = NOISE_QUANTITIES
    if support.gradient_sums == "input" and not single:
        floor = floor - {"dq", "dk", "dv"}
    if noise and rows == slice(None) and not (support.tf32 and single):
        emulated = oracles.emulate(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.spec(support.alignment),
            do=inputs.dout if backward else None,
            dlse=inputs.dlse if lse_gradient else None,
            p_dtype=TORCH_DTYPES[support.p_dtype] if support.p_dtype else None,
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
