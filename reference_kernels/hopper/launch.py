"""The Hopper forward by tensors: what it serves, and its launch. `measurements/hopper.py` checks and times it."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch import tma_refusal, tma_strides
from .configs import MOST_SHARED, TABLE, Config, lookup
from .kernel import forward_kernel
from .schedule import MOST_BATCHES, MOST_BLOCKS, MOST_HEADS, Problem, is_kept, schedule
from .work import few_columns

Form = Literal["auto", "online", "freeze"]
LOG2E = 1.4426950408889634
_GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def supports(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, form: Form = "auto"
) -> str | None:
    """Why this kernel cannot run on q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D); None if it can.

    The tensors fit together as api.py checks; all must be as the TMA reads them (../launch.tma_refusal). While a CUDA
    graph is captured only shapes that ran before are served: the list of tiles of others would be copied from the host.
    """
    if q.dtype not in _GLUON:
        return f"dtype {q.dtype}: the Hopper kernel multiplies float16 and bfloat16"
    if q.shape[3] not in TABLE or v.shape[3] != q.shape[3]:
        known = ", ".join(map(str, TABLE))
        return f"head dims D {q.shape[3]}, Dv {v.shape[3]}: the Hopper kernel has equal ones of {known}"
    if form == "freeze" and q.dtype == torch.float16:
        return "form 'freeze' with float16: it has no room for what grows above a frozen maximum"
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        return f"scale {scale}: the Hopper kernel folds a positive one into the exponent"
    if q.shape[0] >= MOST_BATCHES or q.shape[1] >= MOST_HEADS or q.shape[2] // 64 >= MOST_BLOCKS:
        return f"q {tuple(q.shape)}: more batches, heads or rows than the Hopper kernel's list of tiles can name"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if said := tma_refusal(name, x):
            return said
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "q is not on a GPU of compute capability 9.0"
    if torch.cuda.is_current_stream_capturing() and not is_kept(*_work(q, k, causal, None)):
        return "a CUDA graph is being captured, and these shapes were not run before it: run them once"
    return None


def _work(q: Tensor, k: Tensor, causal: bool, config: Config | None) -> tuple[Problem, int, torch.device]:
    """What `schedule` takes."""
    (batch, heads, lq, d), (kv_heads, lk) = q.shape, k.shape[1:3]
    causal = causal and lq > 1  # one row at the end sees every key
    config = config or lookup(d, causal=causal, lq=lq, lk=lk)
    return problem_of(batch, heads, kv_heads, lq, lk, d, config, causal=causal), _sms(q.device), q.device


def problem_of(
    batch: int, heads: int, kv_heads: int, lq: int, lk: int, d: int, config: Config, *, causal: bool
) -> Problem:
    """What the schedule depends on, for a launch with `config`."""
    code = constants(d, config, causal=causal, freeze=False, lq=lq, lk=lk)
    return Problem(
        batch, heads, heads // kv_heads, lq, lk, d, config.block_m, config.block_n, causal,
        code["SHORT"], code["ROWLESS"],
    )  # fmt: skip


@functools.cache
def _layout(rows: int, d: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, d], _GLUON[dtype])


@functools.cache
def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def descriptor(x: Tensor, rows: int) -> Any:
    """What the TMA must know of x (B, H, L, D) to copy blocks of `rows` rows of one head."""
    d = x.shape[3]
    return TensorDescriptor(x, list(x.shape), [*tma_strides(x), 1], [1, 1, rows, d], _layout(rows, d, x.dtype))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    form: Form = "auto",
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """o (B, Hq, Lq, D) in q's dtype and lse (B, Hq, Lq) float32, natural log; rows without keys: 0 and -inf.

    q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D); query head h reads kv head h // (Hq // Hkv); causal is bottom-right.
    scale: None takes D ** -0.5. form: "online" keeps a running maximum; "freeze" keeps the first one and repeats where
    that was not enough, bfloat16 only; "auto" is "freeze" where it may be. config: None takes the table's.
    Raises NotImplementedError with the reason of `supports`.
    """
    reason = supports(q, k, v, scale=scale, causal=causal, form=form)
    if reason:
        raise NotImplementedError(reason)
    (batch, heads, lq, d), lk = q.shape, k.shape[2]
    causal = causal and lq > 1  # one row at the end sees every key
    config = config or lookup(d, causal=causal, lq=lq, lk=lk)
    freeze = q.dtype == torch.bfloat16 if form == "auto" else form == "freeze"
    o = torch.empty((batch, heads, lq, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, lq), dtype=torch.float32, device=q.device)
    if causal and lq > lk:
        # Tiles all of whose rows see no key are not computed.
        o[:, :, : lq - lk].zero_()
        lse[:, :, : lq - lk].fill_(-math.inf)
    tiles, starts = schedule(*_work(q, k, causal, config))
    grid = len(starts) - 1
    outgrown = torch.empty(grid * config.consumers, dtype=torch.int32, device=q.device)
    code = constants(d, config, causal=causal, freeze=freeze, lq=lq, lk=lk)
    columns = few_columns(code["SHORT"], config.block_n)
    few = [descriptor(x, columns) if columns else None for x in (k, v)]
    with torch.cuda.device(q.device):
        forward_kernel[(grid,)](
            descriptor(q, 64), descriptor(k, config.block_n), descriptor(v, config.block_n), *few, descriptor(o, 64),
            lse, outgrown, tiles, starts, (d**-0.5 if scale is None else scale) * LOG2E,
            heads, lq, lk, o,
            num_warps=4, enable_fp_fusion=True, **code,
        )  # fmt: skip
    return o, lse


def short_block(config: Config, *, causal: bool, lq: int, lk: int) -> int:
    """The kernel's SHORT: 16, or a quarter of a block, where no more keys are left over beside whole blocks.

    More of them are not worth it: then all blocks begin with key 0, and the last one has a tail that is masked, by the
    diagonal if causal. But with a square tile whose rows and keys are not ragged alike, the diagonal would cross a
    second block in every tile; a whole block 0 that is short spares that. 192 rows and 128 keys never meet: always 0.
    """
    if causal and config.block_m % config.block_n:
        return 0
    if lk > config.block_n:
        for width in (16, config.block_n // 4):
            if 0 < lk % config.block_n <= width:
                return width
    apart = causal and config.block_m == config.block_n and (lk - lq) % config.block_n
    return config.block_n if apart else 0


def constants(d: int, config: Config, *, causal: bool, freeze: bool, lq: int, lk: int) -> dict[str, Any]:
    """The kernel's constants. What ragged lengths need, and more than one diagonal block a tile, is code of its own."""
    short = short_block(config, causal=causal, lq=lq, lk=lk)
    if config.shared_bytes(d, few_columns(short, config.block_n)) > MOST_SHARED:
        config = replace(config, o_in_q=True)
    return {
        "D": d,
        "CONFIG": config,
        "CAUSAL": causal,
        "DIAGONALS": causal and config.block_m != config.block_n,
        "TAIL": not causal and not short and lk % config.block_n != 0,
        "SHORT": short,
        # With SHORT whether or not this lq leaves a consumer without rows, for fewer variants.
        "ROWLESS": not causal and (short > 0 or (config.consumers == 2 and -(-lq // 64) % 2 == 1)),
        "FREEZE": freeze,
    }
