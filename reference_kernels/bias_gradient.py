"""dbias = dS, summed over the dimensions along which the bias was broadcast: one more pass, one writer per element.

    dbias[b', h', i', j'] = sum of dS over the batches, heads, rows and keys that read bias[b', h', i', j']

A program owns a tile of dbias and visits every tile of dS that falls on it, so that the memory is that of dbias, never
that of S, and no atomics are needed. The price: S and dP are computed once more, and a bias shared by all rows and keys
keeps few programs busy. Hidden tiles are visited too; their dS is 0.

Accumulator: float32 (BLOCK_M, BLOCK_N), summed along its broadcast axes at the end and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .launch import as_grid, options
from .scores import hide, logits, row_shift
from .tiles import dot, rounded, widened


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk", "left", "right", "batch", "db_B", "db_H", "db_Q", "db_K"])
def dbias_kernel(
    q, q_b, q_h, q_l, q_d,
    k, k_b, k_h, k_l, k_d,
    v, v_b, v_h, v_l, v_d,
    do, do_b, do_h, do_l, do_d,
    lse, delta, slopes, slopes_b, slopes_h,
    bias, bias_b, bias_h, bias_l, bias_k,
    mask, mask_b, mask_h, mask_l, mask_k,
    heads, group, Lq, Lk, left, right, scale, softcap,
    dbias, batch, db_B, db_H, db_Q, db_K,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dbias, contiguous (db_B, db_H, db_Q, db_K), each size 1 or full. Accumulator float32."""
    tiles_n = tl.cdiv(db_K, BLOCK_N)
    tiles = tl.cdiv(db_Q, BLOCK_M) * tiles_n
    tile = tl.program_id(0) % tiles
    own_h = tl.program_id(0) // tiles % db_H
    own_b = tl.program_id(0) // tiles // db_H
    own_m = tile // tiles_n * BLOCK_M
    own_n = tile % tiles_n * BLOCK_N
    # Along a broadcast dimension everything falls on this tile, else only what lies under it.
    b_end = tl.where(db_B == 1, batch, own_b + 1)
    h_end = tl.where(db_H == 1, heads, own_h + 1)
    m_end = tl.where(db_Q == 1, Lq, tl.minimum(own_m + BLOCK_M, Lq))
    n_end = tl.where(db_K == 1, Lk, tl.minimum(own_n + BLOCK_N, Lk))

    dims = tl.arange(0, BLOCK_D)[None, :].to(tl.int64)  # (1, BLOCK_D)
    v_dims = tl.arange(0, BLOCK_DV)[None, :].to(tl.int64)  # (1, BLOCK_DV)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # (BLOCK_M, BLOCK_N)
    for b_index in tl.range(own_b, b_end):
        b = tl.cast(b_index, tl.int64)
        for h_index in tl.range(own_h, h_end):
            h = tl.cast(h_index, tl.int64)
            slope = None
            mask_head = None
            if slopes is not None:
                slope = widened(tl.load(slopes + b * slopes_b + h * slopes_h))
            if mask is not None:
                mask_head = mask + b * mask_b + h * mask_h
            for m in tl.range(own_m, m_end, BLOCK_M):
                row = m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
                rows = row[:, None]  # (BLOCK_M, 1)
                wide_rows = rows.to(tl.int64)
                # (BLOCK_M, BLOCK_D), (BLOCK_M, BLOCK_DV), (BLOCK_M,), (BLOCK_M,)
                q_tile = q + b * q_b + h * q_h + wide_rows * q_l + dims * q_d
                do_tile = do + b * do_b + h * do_h + wide_rows * do_l + v_dims * do_d
                qt = tl.load(q_tile, mask=(rows < Lq) & (dims < D), other=0.0)
                dot_ = tl.load(do_tile, mask=(rows < Lq) & (v_dims < DV), other=0.0)
                shift = row_shift(lse + (b * heads + h) * Lq, row, True, row < Lq)
                d = tl.load(delta + (b * heads + h) * Lq + row, mask=row < Lq, other=0.0)
                for n in tl.range(own_n, n_end, BLOCK_N):
                    keys = n + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
                    wide_keys = keys.to(tl.int64)
                    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
                    k_tile = k + b * k_b + (h // group) * k_h + wide_keys * k_l + dims * k_d
                    v_tile = v + b * v_b + (h // group) * v_h + wide_keys * v_l + v_dims * v_d
                    kt = tl.load(k_tile, mask=(keys < Lk) & (dims < D), other=0.0)
                    vt = tl.load(v_tile, mask=(keys < Lk) & (v_dims < DV), other=0.0)
                    # (BLOCK_M, BLOCK_N)
                    key = n + tl.arange(0, BLOCK_N)[None, :]
                    s = dot(qt, tl.trans(kt), None, PRECISION)
                    s, _ = logits(
                        s, scale, softcap, slope, bias + b * bias_b + h * bias_h, bias_l, bias_k,
                        mask_head, mask_l, mask_k, rows, key, Lq, Lk, False, True,
                    )  # fmt: skip
                    s = hide(s, rows, key, Lq, Lk, left, right, True)
                    p = tl.exp2(s - shift[:, None])
                    acc += p * (dot(dot_, tl.trans(vt), None, PRECISION) - d[:, None])

    own = dbias + (own_b.to(tl.int64) * db_H + own_h) * db_Q * db_K
    rows = own_m + tl.arange(0, BLOCK_M)[:, None]
    keys = own_n + tl.arange(0, BLOCK_N)[None, :]
    if db_Q == 1:
        acc = tl.where(rows == 0, tl.sum(acc, 0)[None, :], 0.0)
    if db_K == 1:
        acc = tl.where(keys == 0, tl.sum(acc, 1)[:, None], 0.0)
    tl.store(
        own + rows.to(tl.int64) * db_K + keys,
        rounded(acc, dbias.dtype.element_ty),
        mask=(rows < db_Q) & (keys < db_K),
    )


def bias_gradient(
    bias: Tensor,
    inputs: tuple[Any, ...],
    rest: tuple[Any, ...],
    dims: dict[str, Any],
    config: Config,
) -> Tensor:
    """dbias in the shape and dtype of bias. inputs, rest, dims: the arguments that backward.backward has assembled."""
    q = inputs[0]
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    dbias = torch.empty(shape, dtype=bias.dtype, device=bias.device)
    programs = shape[0] * shape[1] * triton.cdiv(shape[2], config.block_m) * triton.cdiv(shape[3], config.block_n)
    if programs:
        dbias_kernel[as_grid(programs)](
            *inputs, *rest, dbias, q.shape[0], *shape, **dims, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            **options(config._replace(num_stages=1)),
        )  # fmt: skip
    return dbias.reshape(bias.shape)
