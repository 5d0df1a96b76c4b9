"""One small flash attention in Triton, forward and backward, with the faults that only a GPU shows as switches.

Right when all switches are off: `lane.py` runs the suite on it beside every mutant. Accumulators are float32. Shapes:
BM x BN a tile of scores, BD the head dim padded to a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_N = 64, 32
_PLAIN_INTEGERS = ["LQ", "LK", "H", "GROUP", "TILES"]  # unspecialised: a 1 would be no tensor, and have no .to()


@triton.jit(do_not_specialize=_PLAIN_INTEGERS)
def _forward(
    Q, K, V, OUT, L, scale, LQ, LK, H, GROUP, TILES,
    qb, qh, ql, qd, kb, kh, kl, kd, vb, vh, vl, vd,
    DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    NARROW: tl.constexpr, SHORT: tl.constexpr, TWO_AXES: tl.constexpr, READ_ON: tl.constexpr,
):  # fmt: skip
    """A program has one tile of rows of one head.

    NARROW: offsets in 32 bits. SHORT: the number of keys in 16. TWO_AXES: heads on the grid's second axis. READ_ON: V
    is read behind its last row.
    """
    if TWO_AXES:
        tile = tl.program_id(0)
        head = tl.program_id(1)
    else:
        tile = tl.program_id(0) % TILES
        head = tl.program_id(0) // TILES
    b = head // H
    h = head % H
    g = h // GROUP
    if NARROW:
        q_at = b * qb + h * qh
        k_at = b * kb + g * kh
        v_at = b * vb + g * vh
    else:
        q_at = b.to(tl.int64) * qb + h.to(tl.int64) * qh
        k_at = b.to(tl.int64) * kb + g.to(tl.int64) * kh
        v_at = b.to(tl.int64) * vb + g.to(tl.int64) * vh
    rows = tile * BM + tl.arange(0, BM)
    cols = tl.arange(0, BD)
    in_dim = cols[None, :] < DIM
    q = tl.load(Q + q_at + rows[:, None] * ql + cols[None, :] * qd, mask=(rows[:, None] < LQ) & in_dim, other=0.0)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    end = LK
    if SHORT:
        end = LK.to(tl.int16).to(tl.int32)
    stop = end
    if CAUSAL:
        stop = tl.minimum(end, (tile + 1) * BM + LK - LQ)
    for j in range(0, stop, BN):
        keys = j + tl.arange(0, BN)
        inside = keys < end
        tile_of_k = K + k_at + keys[:, None] * kl + cols[None, :] * kd
        k = tl.load(tile_of_k, mask=inside[:, None] & in_dim, other=0.0)  # (BN, BD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BM, BN)
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + LK - LQ)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - base[:, None])
        alpha = tl.exp(m - base)
        total = total * alpha + tl.sum(p, 1)
        tile_of_v = V + v_at + keys[:, None] * vl + cols[None, :] * vd
        if READ_ON:
            v = tl.load(tile_of_v, mask=in_dim, other=0.0)
        else:
            v = tl.load(tile_of_v, mask=inside[:, None] & in_dim, other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    o = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    first = head.to(tl.int64) * LQ
    at = (first + rows)[:, None] * DIM + cols[None, :]
    tl.store(OUT + at, o.to(OUT.dtype.element_ty), mask=(rows[:, None] < LQ) & in_dim)
    tl.store(L + first + rows, m + tl.log(total), mask=rows < LQ)


@triton.jit
def _add(pointers, x, mask, RACE: tl.constexpr):
    """RACE: read, add, write back; what another program wrote in between is lost."""
    if RACE:
        tl.store(pointers, tl.load(pointers, mask=mask, other=0.0) + x, mask=mask)
    else:
        tl.atomic_add(pointers, x, mask=mask)


@triton.jit(do_not_specialize=_PLAIN_INTEGERS)
def _add_up(
    Q, K, V, L, ACC, DO, DELTA, DQ, DK, DV, scale, LQ, LK, H, GROUP, TILES,
    qb, qh, ql, qd, kb, kh, kl, kd, vb, vh, vl, vd, db, dh, dl, dd,
    DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    BACKWARD: tl.constexpr, RACE: tl.constexpr,
):  # fmt: skip
    """A program has one tile of scores of one head, and adds its share to float32 sums, in whatever order it comes.

    Not BACKWARD: P V onto ACC, P being final since L is known. BACKWARD: onto DQ, DK, DV (all of query heads).
    """
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    g = h // GROUP
    rows = tile * BM + tl.arange(0, BM)
    keys = tl.program_id(1) * BN + tl.arange(0, BN)
    cols = tl.arange(0, BD)
    in_dim = cols[None, :] < DIM
    in_rows = (rows[:, None] < LQ) & in_dim
    in_keys = (keys[:, None] < LK) & in_dim
    q = tl.load(Q + b * qb + h * qh + rows[:, None] * ql + cols[None, :] * qd, mask=in_rows, other=0.0)
    k = tl.load(K + b * kb + g * kh + keys[:, None] * kl + cols[None, :] * kd, mask=in_keys, other=0.0)
    v = tl.load(V + b * vb + g * vh + keys[:, None] * vl + cols[None, :] * vd, mask=in_keys, other=0.0)
    first = head.to(tl.int64) * LQ
    lse = tl.load(L + first + rows, mask=rows < LQ, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = (keys[None, :] < LK) & (rows[:, None] < LQ)
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None] + LK - LQ)
    p = tl.exp(tl.where(seen, s, float("-inf")) - lse[:, None])
    of_rows = (first + rows)[:, None] * DIM + cols[None, :]
    of_keys = (head.to(tl.int64) * LK + keys)[:, None] * DIM + cols[None, :]
    if BACKWARD:
        do = tl.load(DO + b * db + h * dh + rows[:, None] * dl + cols[None, :] * dd, mask=in_rows, other=0.0)
        delta = tl.load(DELTA + first + rows, mask=rows < LQ, other=0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        _add(DQ + of_rows, tl.dot(ds, k, input_precision="ieee") * scale, in_rows, RACE)
        _add(DK + of_keys, tl.dot(tl.trans(ds), q, input_precision="ieee") * scale, in_keys, RACE)
        _add(DV + of_keys, tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee"), in_keys, RACE)
    else:
        _add(ACC + of_rows, tl.dot(p.to(v.dtype), v, input_precision="ieee"), in_rows, RACE)


SWITCHES = ("NARROW", "SHORT", "TWO_AXES", "READ_ON")


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, **on: bool) -> tuple[Tensor, Tensor]:
    """o (B, H, Lq, D) in q's dtype and lse (B, H, Lq) float32; `on`: the switches that are on."""
    batch, heads, lq, dim = q.shape
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    if not o.numel():
        return o, lse
    tiles = triton.cdiv(lq, BLOCK_M)
    grid = (tiles, batch * heads) if on.get("TWO_AXES") else (tiles * batch * heads,)
    _forward[grid](
        q, k, v, o, lse, scale, lq, k.shape[2], heads, heads // k.shape[1], tiles,
        *q.stride(), *k.stride(), *v.stride(),
        **_tiles(dim), CAUSAL=causal, **{name: on.get(name, False) for name in SWITCHES},
    )  # fmt: skip
    return o, lse


def add_up(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, causal: bool, scale: float, *, race: bool, **given: Tensor
) -> tuple[Tensor, ...]:
    """Without do: (o,) in float32. With do and delta: dq, dk and dv in float32, of query heads."""
    batch, heads, lq, dim = q.shape
    lk, backward = k.shape[2], "do" in given
    acc, dq = (q.new_zeros(q.shape, dtype=torch.float32) for _ in range(2))
    dk, dv = (q.new_zeros((batch, heads, lk, dim), dtype=torch.float32) for _ in range(2))
    do, delta = given.get("do", q), given.get("delta", lse)
    if q.numel() and k.numel():
        tiles = triton.cdiv(lq, BLOCK_M)
        _add_up[(tiles * batch * heads, triton.cdiv(lk, BLOCK_N))](
            q, k, v, lse, acc, do, delta, dq, dk, dv, scale, lq, lk, heads, heads // k.shape[1], tiles,
            *q.stride(), *k.stride(), *v.stride(), *do.stride(),
            **_tiles(dim), CAUSAL=causal, BACKWARD=backward, RACE=race,
        )  # fmt: skip
    return (dq, dk, dv) if backward else (acc,)


def _tiles(dim: int) -> dict[str, Any]:
    return {"DIM": dim, "BM": BLOCK_M, "BN": BLOCK_N, "BD": max(16, triton.next_power_of_2(dim))}
