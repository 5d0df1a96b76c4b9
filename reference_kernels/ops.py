# No `from __future__ import annotations`: torch.library reads the types of the signatures below.
"""The kernels as operators of PyTorch, so that autograd, torch.compile and CUDA graphs see them.

An operator takes tensors and numbers, and has beside its kernel a fake one that only knows shapes and dtypes. Which
kernel runs is decided when it runs (dispatch.py), where there are strides and addresses to look at: the fake one is the
same for all. torch.library.opcheck is run on both operators by tests/kernels.
"""

from typing import Any

import torch
from torch import Tensor

from . import dispatch


@torch.library.custom_op("reference_kernels::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    input_precision: str,
    kernel: str | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """o (B, Hq, Lq, Dv), lse (B, Hq, Lq) float32; arguments as of dispatch. deterministic: for the backward."""
    return dispatch.forward(
        q, k, v, kernel=kernel, scale=scale, left=left, right=right, softcap=softcap, slopes=slopes, bias=bias,
        mask=mask, sinks=sinks, input_precision=input_precision,
    )  # fmt: skip


@attention.register_fake
def _(q, k, v, slopes, bias, mask, sinks, scale, softcap, left, right, input_precision, kernel, deterministic):
    shape = (q.shape[0], q.shape[1], q.shape[2])
    return q.new_empty((*shape, v.shape[3])), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("reference_kernels::attention_backward", mutates_args=())
def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    slopes: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    input_precision: str,
    kernel: str | None,
    deterministic: bool,
    wants: list[bool],
) -> list[Tensor]:
    """dq, dk, dv, dbias, dsinks; of what `wants` (q, k or v, bias, sinks) does not ask for an empty tensor."""
    want_q, want_kv, want_bias, want_sinks = wants
    grads = dispatch.backward(
        do, dlse, q, k, v, o, lse, kernel=kernel, deterministic=deterministic, scale=scale, left=left, right=right,
        softcap=softcap, slopes=slopes, bias=bias, mask=mask, sinks=sinks, want_q=want_q, want_kv=want_kv,
        want_bias=want_bias, want_sinks=want_sinks, input_precision=input_precision,
    )  # fmt: skip
    return [q.new_empty(0) if grad is None else grad for grad in grads]


@attention_backward.register_fake
def _(
    do, dlse, q, k, v, o, lse, slopes, bias, mask, sinks, scale, softcap, left, right, input_precision, kernel,
    deterministic, wants,
):  # fmt: skip
    want_q, want_kv, want_bias, want_sinks = wants
    wanted = ((q, want_q), (k, want_kv), (v, want_kv), (bias, want_bias), (sinks, want_sinks))
    return [q.new_empty(0) if not want or x is None else x.new_empty(x.shape) for x, want in wanted]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.numbers = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, *output)
    # An upstream gradient that does not exist is None, not a tensor of zeros to be read.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slopes, bias, mask, sinks, o, lse = ctx.saved_tensors
    need_q, need_k, need_v, _, need_bias, _, need_sinks = ctx.needs_input_grad[:7]
    do = torch.zeros_like(o) if do is None else do
    wants = [need_q, need_k or need_v, need_bias, need_sinks]
    dq, dk, dv, dbias, dsinks = attention_backward(
        do, dlse, q, k, v, o, lse, slopes, bias, mask, sinks, *ctx.numbers, wants
    )
    return (
        dq if need_q else None,
        dk if need_k else None,
        dv if need_v else None,
        None,
        dbias if need_bias else None,
        None,
        dsinks if need_sinks else None,
        *(None for _ in ctx.numbers),
    )


attention.register_autograd(_backward, setup_context=_setup)
