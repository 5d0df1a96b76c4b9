"""Call an implementation on inputs and collect what it returns: outputs, log-sum-exp, gradients.

Before each call the memory that the outputs will probably get is filled with NaN, so what a kernel forgets to write
does not happen to hold a right value from the call before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .diagnosis import notebook
from .implementation import Implementation, ImplementationError, Unsupported
from .inputs import Inputs, output_dtype
from .memory import exhausted

Outputs = dict[str, Tensor]


def forward(implementation: Implementation, inputs: Inputs, *, lse: bool = False, fill: float = math.nan) -> Outputs:
    """One call without gradients: {"o": (B, Hq, Lq, Dv)} and, if asked for, {"lse": (B, Hq, Lq)}."""
    before = _snapshot(inputs)
    _poison(inputs, fill, gradients=False)
    with torch.no_grad():
        o, log_sum = implementation.call(inputs.q, inputs.k, inputs.v, inputs.options(), return_lse=lse)
    _settle(implementation, o, log_sum)
    _unchanged(inputs, before)
    outputs = _named(o, log_sum)
    notebook.record(inputs, outputs, backward=False, lse=lse)
    return outputs


def backward(
    implementation: Implementation,
    inputs: Inputs,
    *,
    wrt: Iterable[str] = ("q", "k", "v"),
    lse: bool = False,
    lse_gradient: bool = False,
    times: int = 1,
) -> Outputs:
    """One call and its gradients: "o", "lse" if asked for, and "d" + name for each of `wrt` (q, k, v, bias, sinks).

    lse_gradient: let `inputs.dlse` flow in through the log-sum-exp as well. times: run the backward of the one graph so
    often and return the last gradients.
    Raises Unsupported when the output carries no autograd graph, ImplementationError when a gradient is missing.
    """
    before = _snapshot(inputs)
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in wrt}
    _poison(inputs, math.nan, gradients=True)
    graph = inputs.with_(**leaves)
    o, log_sum = implementation.call(graph.q, graph.k, graph.v, graph.options(), return_lse=lse or lse_gradient)
    if not o.requires_grad:
        raise Unsupported("the output carries no autograd graph: forward only")
    roots, upstream = [o], [inputs.dout]
    if lse_gradient:
        assert log_sum is not None
        if not log_sum.requires_grad:
            raise ImplementationError(
                "the returned log-sum-exp carries no autograd graph, though lse_grad is declared; "
                "make it differentiable or declare Support without 'lse_grad'"
            )
        roots.append(log_sum)
        upstream.append(inputs.dlse)
    try:
        for repeat in range(times):
            gradients = torch.autograd.grad(
                roots, list(leaves.values()), upstream, allow_unused=True, retain_graph=repeat < times - 1
            )
    except NotImplementedError as error:
        raise Unsupported(f"in backward: {implementation.raised(error)}") from error
    except Exception as error:
        if exhausted(error):
            raise
        raise ImplementationError(f"in backward: {implementation.raised(error)}") from error
    _settle(implementation, *gradients)
    _unchanged(inputs, before)
    outputs = _named(o.detach(), None if log_sum is None else log_sum.detach())
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            raise ImplementationError(f"the gradient of {name} is None: {name} is not connected to the output")
        if gradient.dtype != leaves[name].dtype:  # autograd converts, unless a leaf's grad_dtype forbids it
            wrong, want = (str(d).removeprefix("torch.") for d in (gradient.dtype, leaves[name].dtype))
            raise ImplementationError(f"the gradient of {name} is {wrong}, expected {want}, the dtype of {name}")
        outputs[f"d{name}"] = gradient
    notebook.record(inputs, outputs, backward=True, wrt=tuple(leaves), lse=lse, lse_gradient=lse_gradient, times=times)
    return outputs


def differentiable(implementation: Implementation, inputs: Inputs) -> tuple[str, ...]:
    """Which inputs of this case have a gradient that the implementation declares."""
    features = implementation.support.features
    names = ["q", "k", "v"]
    if inputs.bias is not None and "bias_grad" in features:
        names.append("bias")
    if inputs.sinks is not None and "sinks_grad" in features:
        names.append("sinks")
    return tuple(names)


def _named(o: Tensor, lse: Tensor | None) -> Outputs:
    return {"o": o} if lse is None else {"o": o, "lse": lse}


def _settle(implementation: Implementation, *results: Tensor | None) -> None:
    """Wait for the device, so that an error of this call is not blamed on the next thing that touches it.

    Raises ImplementationError for an error that waited there, and for a result that the caller's stream would have read
    before it was written: work on a stream of its own that the caller's does not wait for.
    """
    if implementation.device.type != "cuda":
        return
    given = [x for x in results if x is not None]
    try:
        read = [x.detach().clone() for x in given]
        torch.cuda.synchronize(implementation.device)
    except RuntimeError as error:
        if exhausted(error):
            raise
        raise ImplementationError(f"after the call the device reports {implementation.raised(error)}") from error
    if not all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(read, given, strict=True)):
        raise ImplementationError(
            "returned before its result was written, by work on another stream; make the caller's stream wait for it"
        )


def _snapshot(inputs: Inputs) -> dict[str, Tensor]:
    names = ("q", "k", "v", "bias", "mask", "sinks", "dout", "q_descale", "k_descale", "v_descale")
    return {name: x.clone() for name in names if (x := getattr(inputs, name)) is not None}


def _unchanged(inputs: Inputs, before: dict[str, Tensor]) -> None:
    """Raises ImplementationError for an input that the call changed: the truth would be computed from other numbers."""
    for name, old in before.items():
        new = getattr(inputs, name)
        if new.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            new, old = new.view(torch.uint8), old.view(torch.uint8)  # not every operation knows FP8
        if not torch.equal(new, old) and not torch.equal(new.nan_to_num(), old.nan_to_num()):
            raise ImplementationError(f"changed its input {name} in place; work on a copy")


def _poison(inputs: Inputs, fill: float, *, gradients: bool) -> None:
    # Allocators hand freed blocks of the same size out again: these are the sizes of o, lse, dq, dk and dv.
    case, q = inputs.case, inputs.q
    sizes = [case.batch * case.heads * case.q * case.dv]
    if gradients:
        kv = case.batch * case.kv_heads * case.k
        sizes += [case.batch * case.heads * case.q * case.d, kv * case.d, kv * case.dv]
    blocks = [torch.full((size,), fill, dtype=output_dtype(case), device=q.device) for size in sizes]
    blocks.append(torch.full((case.batch * case.heads * case.q,), fill, dtype=torch.float32, device=q.device))
    del blocks
