"""FP8 attention of others, where it can be had: cuDNN through its Python frontend, FlashAttention-3.

cuDNN has one descale a tensor, and FlashAttention-3 one a kv head: both get tensors quantised with one descale each.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

Call = Callable[[], tuple[Tensor, Tensor | float]]

P_SCALE = 256.0
"""Of P, at most 1, before it is rounded to E4M3, as in our kernels: unscaled, what is below 2^-10 would be 0."""


def available(arguments: dict[str, Any], *, scale: float, causal: bool) -> dict[str, Call]:
    """Calls by name that return o, and what a stored number of it is worth; those that fail are left out, and said.

    arguments: q, k, v (B, H, L, D) e4m3, and q_descale, k_descale, v_descale, float32 of shape ().
    """
    found: dict[str, Call] = {}
    makers = {"cudnn fp8": cudnn, "cudnn fp8, no amax": functools.partial(cudnn, amax=False), "fa3 fp8": fa3}
    for name, make in makers.items():
        try:
            call = make(arguments, scale, causal)
            call()
            found[name] = call
        except Exception as error:
            print(f"no {name}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


@functools.cache
def _handle() -> Any:
    """cuDNN's handle of this process, on PyTorch's stream."""
    import cudnn as frontend
    import torch

    handle = frontend.create_handle()
    frontend.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    return handle


def cudnn(arguments: dict[str, Any], scale: float, causal: bool, *, amax: bool = True) -> Call:
    """cuDNN's, as a graph of its frontend (nvidia-cudnn-frontend); on Hopper its output is E4M3 too.

    The output is stored with V's scale: it is a mean of V's rows, and no larger. amax: the largest P and O are outputs,
    as cuDNN's own samples have them; without, they are computed, if at all, for nobody.
    """
    import cudnn as frontend
    import torch

    q, k, v = (arguments[name].contiguous() for name in "qkv")
    fp8, fp32 = frontend.data_type.FP8_E4M3, frontend.data_type.FLOAT
    handle = _handle()
    graph = frontend.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    of_q, of_k, of_v = (graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=fp8) for x in (q, k, v))
    values = {f"descale_{name}": arguments[f"{name}_descale"] for name in "qkv"}
    values |= {
        "descale_s": torch.full((), 1 / P_SCALE, device="cuda"),
        "scale_s": torch.full((), P_SCALE, device="cuda"),
    }
    values["scale_o"] = 1 / arguments["v_descale"]
    scalars = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=fp32) for name in values}
    out, _, *largest = graph.sdpa_fp8(
        q=of_q, k=of_k, v=of_v, **scalars, generate_stats=False, attn_scale=scale, use_causal_mask=causal,
        name="attention",
    )  # fmt: skip
    o = torch.empty_like(q)
    out.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride())).set_data_type(fp8)
    for tensor in largest:
        tensor.set_output(amax).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    pack = {of_q: q, of_k: k, of_v: v, out: o}
    pack |= {scalars[name]: x.reshape(1, 1, 1, 1) for name, x in values.items()}
    pack |= {tensor: torch.zeros(1, 1, 1, 1, device="cuda") for tensor in largest if amax}

    def call() -> tuple[Tensor, Tensor | float]:
        graph.execute(pack, workspace, handle=handle)
        return o, arguments["v_descale"]

    return call


def fa3(arguments: dict[str, Any], scale: float, causal: bool) -> Call:
    """FlashAttention-3's: (B, L, H, D), descales (B, Hkv)."""
    from pytest_flashattn import peers

    q, k, v = (arguments[name].transpose(1, 2).contiguous() for name in "qkv")
    descales = {f"{name}_descale": arguments[f"{name}_descale"].expand(k.shape[0], k.shape[2]) for name in "qkv"}

    def call() -> tuple[Tensor, Tensor | float]:
        o = peers.fa3(q, k, v, softmax_scale=scale, causal=causal, **descales)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2), 1.0

    return call
