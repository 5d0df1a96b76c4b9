"""FP8 attention of others, where it can be had: cuDNN through its Python frontend, FlashAttention-3.

cuDNN has one descale a tensor, and FlashAttention-3 one a kv head: both get tensors quantised with one descale each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def available(arguments: dict[str, Any], *, scale: float, causal: bool) -> dict[str, Callable[[], Any]]:
    """Calls that return (o,) by name; those that fail are left out, and said.

    arguments: q, k, v (B, H, L, D) e4m3, and q_descale, k_descale, v_descale, float32 of shape ().
    """
    found: dict[str, Callable[[], Any]] = {}
    for name, make in (("cudnn fp8", cudnn), ("fa3 fp8", fa3)):
        try:
            call = make(arguments, scale, causal)
            call()
            found[name] = call
        except Exception as error:
            print(f"no {name}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def cudnn(arguments: dict[str, Any], scale: float, causal: bool) -> Callable[[], Any]:
    """cuDNN's, as a graph of its frontend (nvidia-cudnn-frontend); on Hopper its output is FP8 too."""
    import cudnn as frontend
    import torch

    q, k, v = (arguments[name].contiguous() for name in "qkv")
    fp8, fp32 = frontend.data_type.FP8_E4M3, frontend.data_type.FLOAT
    graph = frontend.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32)
    inputs = {x: graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=fp8) for x in (q, k, v)}
    # Of q, k, v; then of P, and of P and O when they are rounded.
    values = [arguments[f"{name}_descale"] for name in "qkv"] + [torch.ones((), device="cuda")] * 3
    scalars = [graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=fp32) for _ in values]
    out, _, amax_s, amax_o = graph.sdpa_fp8(
        *inputs.values(), *scalars, is_inference=True, attn_scale=scale, use_causal_mask=causal, name="attention"
    )
    o = torch.empty_like(q)
    out.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride())).set_data_type(fp8)
    for amax in (amax_s, amax_o):
        amax.set_output(False).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    pack = {handle: x for x, handle in inputs.items()} | {out: o}
    pack |= {handle: x.reshape(1, 1, 1, 1) for handle, x in zip(scalars, values, strict=True)}

    def call() -> tuple[Any]:
        graph.execute(pack, workspace)
        return (o,)

    return call


def fa3(arguments: dict[str, Any], scale: float, causal: bool) -> Callable[[], Any]:
    """FlashAttention-3's (flash_attn_interface): (B, L, H, D), descales (B, Hkv)."""
    from flash_attn_interface import flash_attn_func

    q, k, v = (arguments[name].transpose(1, 2).contiguous() for name in "qkv")
    descales = {f"{name}_descale": arguments[f"{name}_descale"].expand(k.shape[0], k.shape[2]) for name in "qkv"}

    def call() -> tuple[Any]:
        o = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, **descales)
        return ((o[0] if isinstance(o, tuple) else o).transpose(1, 2),)

    return call
