"""The Hopper FP8 forward by tensors: what it serves, and its launch. `measurements/fp8.py` checks and times it."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...hopper.launch import LOG2E
from ...hopper.schedule import MOST_BATCHES, MOST_BLOCKS, MOST_HEADS, Problem, is_kept, schedule
from ...launch import tma_refusal, tma_strides
from ..forward import by_block
from ..quantiser import BLOCK
from .configs import TABLE, Fp8Config, lookup
from .interleaving import as_stored, padding_refusal
from .kernel import forward_kernel

_GLUON = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16}


def supports(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, v_interleaved: bool = False) -> str | None:
    """Why this kernel cannot run on q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D); None if it can.

    The tensors fit together as api.py checks; q, k and the transpose of v must be as the TMA reads them
    (../../launch.tma_refusal), v with room for a multiple of 16 keys if v_interleaved. While a CUDA graph is captured
    only shapes that ran before are served.
    """
    if not q.dtype == k.dtype == v.dtype == torch.float8_e4m3fn:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: the Hopper FP8 kernel multiplies float8_e4m3fn"
    if q.shape[3] not in TABLE or v.shape[3] != q.shape[3]:
        known = ", ".join(map(str, TABLE))
        return f"head dims D {q.shape[3]}, Dv {v.shape[3]}: the Hopper FP8 kernel has equal ones of {known}"
    if not scale > 0:
        return f"scale {scale}: the Hopper FP8 kernel folds a positive one into the exponent"
    if q.shape[0] >= MOST_BATCHES or q.shape[1] >= MOST_HEADS or q.shape[2] // 64 >= MOST_BLOCKS:
        return f"q {tuple(q.shape)}: more batches, heads or rows than the Hopper kernel's list of tiles can name"
    for name, x in (("q", q), ("k", k)):
        if said := tma_refusal(name, x):
            return said
    if v.numel() and v.stride(2) != 1:
        return f"v's keys are not contiguous, strides {v.stride()}: quantise it with transposed=True"
    if said := tma_refusal("v, transposed,", v.mT):
        return said
    if v_interleaved and (said := padding_refusal(v)):
        return said
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "q is not on a GPU of compute capability 9.0"
    if torch.cuda.is_current_stream_capturing() and not is_kept(*_work(q, k, causal, None)):
        return "a CUDA graph is being captured, and these shapes were not run before it: run them once"
    return None


def _work(q: Tensor, k: Tensor, causal: bool, config: Fp8Config | None) -> tuple[Problem, int, torch.device]:
    """What `schedule` takes. It counts four bytes of K and V an element of a head, and here there are two."""
    (batch, heads, lq, d), (kv_heads, lk) = q.shape, k.shape[1:3]
    causal = causal and lq > 1  # one row at the end sees every key
    config = config or lookup(d, causal=causal)
    problem = Problem(batch, heads, heads // kv_heads, lq, lk, d // 2, config.block_m, config.block_n, causal)
    return problem, _sms(q.device), q.device


@functools.cache
def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _GLUON[dtype])


def _described(x: Tensor, rows: int, columns: int) -> Any:
    """What the TMA must know of x, four dimensions, to copy tiles of its last two."""
    block = [1, 1, rows, columns]
    return TensorDescriptor(x, list(x.shape), [*tma_strides(x), 1], block, _layout(rows, columns, x.dtype))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_descale: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    scale: float,
    causal: bool,
    v_interleaved: bool = False,
    config: Fp8Config | None = None,
) -> tuple[Tensor, Tensor]:
    """o (B, Hq, Lq, D) bfloat16 and lse (B, Hq, Lq) float32, natural log; rows without keys: 0 and -inf.

    q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D) float8_e4m3fn, v contiguous along Lk; descales as of api.py, positive.
    v_interleaved: its keys are in the order of interleaving.py. config: None takes the table's.
    Raises NotImplementedError with the reason of `supports`.
    """
    reason = supports(q, k, v, scale=scale, causal=causal, v_interleaved=v_interleaved)
    if reason:
        raise NotImplementedError(reason)
    (batch, heads, lq, d), lk = q.shape, k.shape[2]
    causal = causal and lq > 1  # one row at the end sees every key
    config = config or lookup(d, causal=causal)
    o = torch.empty((batch, heads, lq, d), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty((batch, heads, lq), dtype=torch.float32, device=q.device)
    if causal and lq > lk:
        # Tiles all of whose rows see no key are not computed.
        o[:, :, : lq - lk].zero_()
        lse[:, :, : lq - lk].fill_(-math.inf)
    tiles, starts = schedule(*_work(q, k, causal, config))
    by_blocks = v_descale.dim() == 3
    top = v_descale.amax(-1) if by_blocks else v_descale
    top, top_b, top_h, _ = by_block(top, v)
    columns = as_stored(v, interleaved=v_interleaved)
    code = fixed(d, config, causal=causal, lq=lq, lk=lk, by_blocks=by_blocks, interleaved=v_interleaved)
    with torch.cuda.device(q.device):
        forward_kernel[(len(starts) - 1,)](
            _described(q, 64, d), _described(k, config.block_n, d), _described(columns, d, config.block_n),
            _described(o, 64, d), lse, tiles, starts,
            *by_block(q_descale, q), *by_block(k_descale, k), *by_block(v_descale, v), top, top_b, top_h,
            scale * LOG2E, heads, lq, lk,
            num_warps=4, enable_fp_fusion=True, **code,
        )  # fmt: skip
    return o, lse


def fixed(
    d: int, config: Fp8Config, *, causal: bool, lq: int, lk: int, by_blocks: bool, interleaved: bool = False
) -> dict[str, Any]:
    """The kernel's constants; by_blocks: V has a scale for each block of keys; interleaved: as of `forward`."""
    aligned = config.block_m == config.block_n and (lk - lq) % config.block_n == 0
    return {
        "D": d,
        "CONFIG": config,
        "CAUSAL": causal,
        "TAIL": not causal and lk % config.block_n != 0,
        "DIAGONALS": causal and not aligned,
        "SCALE_BLOCK": BLOCK,
        "V_BLOCKS": by_blocks,
        "INTERLEAVED": interleaved,
    }
