"""Which kernels serve a call: those for Hopper where nothing speaks against them, plain Triton otherwise.

            "hopper"                      "triton"               "specialised"
forward     hopper.launch.forward         forward.forward        specialised.forward
backward    hopper.backward.backward      backward.backward      backward.backward

The last runs in the interpreter alone, where it is named: see specialised_machine.

A choice asks for the device, the dtype, the shapes, the memory layout and the options of a call, never for its numbers.
Plain Triton serves all that api.flash_attention accepts, so that nothing fails for want of a faster kernel. Forward and
backward are chosen apart: both compute the same function, and the backward needs only o and lse.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import triton
from torch import Tensor

from . import backward as plain_backward
from . import forward as plain_forward
from . import specialised
from .backward import Grads
from .launch import sides
from .tiles import INTERPRETED

KERNELS = ("hopper", "triton", "specialised")
"""What `kernel=` takes."""

TRITON_VERSIONS = ((3, 6), (3, 9))
"""The oldest and the newest Triton that the Hopper kernels are written for; the compile lane runs both."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: str | None,
    scale: float,
    left: int | None,
    right: int | None,
    input_precision: str,
    **terms: Any,
) -> tuple[Tensor, Tensor]:
    """o and lse by the best kernel, or by the one that is named; arguments as of forward.forward.

    terms: softcap, slopes, bias, mask, sinks. Raises NotImplementedError with the reason if the named one cannot.
    """
    left, right = sides(left, right, q.shape[2], k.shape[2])
    with torch.cuda.device_of(q):
        if kernel == "specialised":
            reason = against(kernel, left, right, terms) or specialised_machine(q.device)
            _refuse(kernel, reason or specialised.supports(q, k, v, scale=scale))
            return specialised.forward(q, k, v, scale=scale, causal=right == 0)
        if kernel != "triton":
            reason = against_hopper(q.device, left, right, terms)
            if reason is None:
                from .hopper import launch

                reason = launch.supports(q, k, v, scale=scale, causal=right == 0)
                if reason is None:
                    return launch.forward(q, k, v, scale=scale, causal=right == 0)
            _refuse(kernel, reason)
        return plain_forward.forward(
            q, k, v, scale=scale, left=left, right=right, input_precision=input_precision, **terms
        )


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    kernel: str | None,
    deterministic: bool,
    scale: float,
    left: int | None,
    right: int | None,
    input_precision: str,
    want_q: bool,
    want_kv: bool,
    want_bias: bool,
    want_sinks: bool,
    **terms: Any,
) -> Grads:
    """The gradients by the best kernel, or by the one that is named; arguments as of backward.backward.

    deterministic: the same bits from every call. Where not all of q, k and v need a gradient, plain Triton computes
    only what is wanted; the Hopper kernels always compute all three. "specialised" has plain Triton's. Errors as of
    `forward`.
    """
    left, right = sides(left, right, q.shape[2], k.shape[2])
    with torch.cuda.device_of(q):
        if kernel == "hopper" or (kernel is None and want_q and want_kv):
            reason = against_hopper(q.device, left, right, terms)
            if reason is None:
                from .hopper import backward as hopper

                reason = hopper.supports(q, k, v)
                if reason is None:
                    dq, dk, dv = hopper.backward(
                        q, k, v, o, lse, do, dlse, scale=scale, causal=right == 0, deterministic=deterministic
                    )
                    return Grads(dq if want_q else None, dk if want_kv else None, dv if want_kv else None, None, None)
            _refuse(kernel, reason)
        return plain_backward.backward(
            do, dlse, q, k, v, o, lse, scale=scale, left=left, right=right, input_precision=input_precision,
            want_q=want_q, want_kv=want_kv, want_bias=want_bias, want_sinks=want_sinks, **terms,
        )  # fmt: skip


def against_hopper(device: torch.device, left: int | None, right: int | None, terms: dict[str, Any]) -> str | None:
    """What, but for the tensors themselves, speaks against the Hopper kernels; None if nothing does."""
    return against("Hopper", left, right, terms) or machine(device)


def against(kernels: str, left: int | None, right: int | None, terms: dict[str, Any]) -> str | None:
    """What of a call neither the Hopper nor the specialised kernels have; None if nothing. kernels: who is asked.

    left, right: as launch.sides leaves them. terms: softcap, slopes, bias, mask, sinks, None where absent.
    """
    if asked := [name for name, value in terms.items() if value is not None]:
        return f"the {kernels} kernels have no {', '.join(asked)}"
    if left is not None or right not in (None, 0):
        return f"the {kernels} kernels have no window"
    return None


@functools.cache
def machine(device: torch.device) -> str | None:
    """Why the Hopper kernels cannot run on this device, with this Triton; None if they can. Compiles nothing."""
    needs = "the Hopper kernels need a GPU of compute capability 9.0"
    if INTERPRETED.value:
        return f"{needs}, and Triton's interpreter is in use"
    if device.type != "cuda":
        return f"{needs}; the tensors are on {device.type}"
    if (found := torch.cuda.get_device_capability(device)) != (9, 0):
        return f"{needs}; this one has {found[0]}.{found[1]}"
    oldest, newest = TRITON_VERSIONS
    if oldest <= tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) <= newest:
        return None
    tested = " to ".join(f"{major}.{minor}" for major, minor in TRITON_VERSIONS)
    return f"the Hopper kernels are written for the Gluon of Triton {tested}; this is {triton.__version__}"


@functools.cache
def specialised_machine(device: torch.device) -> str | None:
    """The same for the specialised kernel, which the interpreter alone runs.

    What Triton 3.6 makes of it for compute capability 9.0 races on an H200: up to 240 of 2000 calls differed from the
    first (measurements/h200/specialised-races.json). Later compilers, and 10.x, have not been tried on a GPU.
    """
    if specialised.form_for(device) is None:
        found = ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else "none"
        needs = "a GPU of compute capability 9.0 or 10, or TRITON_INTERPRET=1"
        return f"the specialised kernels need {needs}; the tensors' device has {found}"
    if not INTERPRETED.value:
        return "what the compiler makes of the specialised kernels races; specialised.forward runs them all the same"
    return None


def _refuse(kernel: str | None, reason: str | None) -> None:
    if kernel in ("hopper", "specialised") and reason is not None:
        raise NotImplementedError(f"kernel={kernel!r}: {reason}")
