# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""Stage 1 of 3: attention with Hopper's two new instructions, everything in turn.

    S = Q K^T      P = exp(scale (S - m))      O = P V / l      m = rowmax S, l = rowsum P

S never exists as a whole. A CTA keeps BLOCK_M query rows and takes the keys and values BLOCK_N at a time; what it has
summed so far refers to the largest score so far, m, and is corrected when a later block has a larger one:

    m' = max(m, rowmax S)    alpha = exp(scale (m - m'))    l = alpha l + rowsum P    acc = alpha acc + P V

All exponentials are powers of two, and the kernel's `scale` is scale times log2(e): exp2 is one instruction.

What Hopper adds:

- **TMA**: one thread asks for a whole tile by its coordinates, and a barrier in shared memory tells when its bytes have
  come. Without it every thread computes addresses and copies a part of the tile.
- **wgmma**: a warp group (four warps, 128 threads) multiplies 64 rows at once. The tensor cores read B, and A if one
  likes, from shared memory themselves: no thread loads them into registers. It is asynchronous: issued at one place,
  waited for at another.

Here every wait follows at once upon what it waits for:

    load K | Q K^T | softmax | load V | P V | load K | Q K^T | ...

so at any time a CTA uses one of three units: the TMA, the tensor cores, or the ordinary ones that compute the softmax.
Other CTAs on the same SM fill some of the gaps. Stage 2 takes the loads off this line, stage 3 the softmax.

bf16 or fp16, D 64 or 128, causal (bottom-right) or not, grouped heads; Lq a multiple of 64, Lk of 128.

    python -m reference_kernels.hopper.stage1      error against the float64 oracle, TFLOP/s beside SDPA (Hopper GPU)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .channel import open_channel
from .gluon_compat import tma_store
from .softmax import hide_after, rows_like
from .stages import Stage, demonstrate

BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(128)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def my_tile(heads, group, Lq, Lk, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """Batch, query head, kv head and first of the M rows of this CTA, and how many blocks of N keys these rows see.

    Causal, query i sees the keys up to i + Lk - Lq. The longest tiles of a head go first.
    """
    blocks = Lq // M
    row = (blocks - 1 - gl.program_id(0) % blocks) * M
    head = gl.program_id(0) // blocks
    n = Lk // N
    if CAUSAL:
        n = gl.cdiv(row + M + Lk - Lq, N)
    return head // heads, head % heads, head % heads // group, row, n


@gluon.jit
def softmax_step(s, m, l, scale):
    """P (rows, N), m and l (rows,) after block S (rows, N), and alpha (rows,), the factor for acc. All float32."""
    top = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - top) * scale)
    p = gl.exp2(s * scale - (top * scale)[:, None])  # one multiply-add and one exponential
    return p, top, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def write_out(o, lse, tile, acc, m, l, scale, batch, head, heads, row, Lq):
    """O = acc / l, by TMA out of `tile` (rows, D) in shared memory, and lse = ln(2) (scale m + log2 l)."""
    tile.store((acc * rows_like(1.0 / l, acc)).to(o.dtype))
    fence_async_shared()  # the TMA sees shared memory by another way than the threads that wrote it
    tma_store(o, [batch, head, row, 0], tile)
    rows = row + gl.arange(0, acc.shape[0], layout=m.type.layout)
    gl.store(lse + (batch * heads + head).to(gl.int64) * Lq + rows, (m * scale + gl.log2(l)) * LN2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def stage1_kernel(
    q, k, v, o, lse, scale, heads, group, Lq, Lk, D: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """BLOCK_M rows of one head, by one warp group. acc, m, l and S: float32; P is rounded to V's dtype.

    q, o: descriptors of (B, Hq, Lq, D) with blocks of BLOCK_M rows; k, v: of (B, Hkv, Lk, D), BLOCK_N rows.
    lse (B, Hq, Lq) float32 is written. scale: of q k^T, times log2(e), positive. group: query heads of a kv head.
    """
    batch, head, kv_head, row, n = my_tile(heads, group, Lq, Lk, BLOCK_M, BLOCK_N, CAUSAL)
    # How wgmma lays its results out over the four warps, and how it wants P, its A operand, in registers.
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    # One slot each: `fill` asks for a tile, `take` waits for it, `release` says that the slot may be filled again.
    queries = open_channel(q.dtype, 1, 1, BLOCK_M, D, 1)
    keys = open_channel(q.dtype, 1, 1, BLOCK_N, D, 1)
    values = open_channel(q.dtype, 1, 1, BLOCK_N, D, 1)
    fence_async_shared()

    # (BLOCK_M, D), in shared memory
    queries.fill(q, batch, head, row, 0)
    qt = queries.take(0)
    # (BLOCK_M, D), (BLOCK_M,), (BLOCK_M,), in registers
    acc = gl.zeros([BLOCK_M, D], gl.float32, layout=O_LAYOUT)
    m = gl.full([BLOCK_M], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    l = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S_LAYOUT)
    for j in range(n):
        # (BLOCK_N, D), in shared memory
        keys.fill(k, batch, kv_head, j * BLOCK_N, j)
        kt = keys.take(j)
        # (BLOCK_M, BLOCK_N), float32, in registers
        s = warpgroup_mma(qt, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        keys.release(j)
        if CAUSAL:
            s = hide_after(s, row + Lk - Lq - j * BLOCK_N, True)
        # (BLOCK_M, BLOCK_N), (BLOCK_M,), (BLOCK_M,), (BLOCK_M,)
        p, m, l, alpha = softmax_step(s, m, l, scale)
        acc = acc * rows_like(alpha, acc)
        # (BLOCK_N, D), in shared memory
        values.fill(v, batch, kv_head, j * BLOCK_N, j)
        vt = values.take(j)
        # (BLOCK_M, D)
        acc = warpgroup_mma(gl.convert_layout(p.to(q.dtype), P_LAYOUT), vt, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values.release(j)
    write_out(o, lse, qt, acc, m, l, scale, batch, head, heads, row, Lq)


STAGE = Stage("stage1", stage1_kernel, block_m=64, q_rows=64, block_n=128, num_warps=4)

if __name__ == "__main__":
    demonstrate(STAGE)
