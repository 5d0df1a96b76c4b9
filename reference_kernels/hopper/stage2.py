# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""Stage 2 of 3: a warp of its own loads ahead.

In stage 1 the warps that multiply also load, and wait for what they loaded. Nothing forces that: which tiles are wanted
is known from the start. So the CTA gets another warp, the *producer*, that does nothing but ask the TMA for tiles, and
the warps that multiply become the *consumer* (warp specialisation). Between them are rings of SLOTS slots for K and for
V (channel.py): the producer runs ahead until all are full, and waits for one to be released:

    producer   | K0 V0 K1 V1 |      | K2             | V2   | K3             | V3   | ...
    consumer   | wait        | Q K0 | softmax | P V0 | Q K1 | softmax | P V1 | Q K2 | ...

Why it pays: a load takes as long as before, but it runs while earlier tiles are multiplied, and the consumer finds its
tiles in place. Nor does the consumer spend instructions on loads. Registers go where they are needed: the producer
keeps 24 a thread (`setmaxnreg`), and the consumer may hold 240.

A CTA now takes the registers of a whole SM, so no second one fills its gaps. Instead the tile has twice the rows of
stage 1, and eight warps, two warp groups in step: each K and V tile that was loaded serves 128 rows.

What is left: all eight warps compute the softmax at the same time, and the tensor cores stand still meanwhile; then
these work, and the warps wait. Stage 3 mends that.

bf16 or fp16, D 64 or 128, causal (bottom-right) or not, grouped heads; Lq and Lk multiples of 128.

    python -m reference_kernels.hopper.stage2      error against the float64 oracle, TFLOP/s beside SDPA (Hopper GPU)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .channel import open_channel
from .softmax import hide_after, rows_like
from .stage1 import my_tile, softmax_step, write_out
from .stages import Stage, demonstrate

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
SLOTS = gl.constexpr(2)


@gluon.jit
def producer(q, k, v, queries, keys, values, batch, head, kv_head, row, n):
    """One warp: Q, then K and V of every block, in the order in which the consumer wants them."""
    queries.fill(q, batch, head, row, 0)
    for j in range(n):
        keys.fill(k, batch, kv_head, j * BLOCK_N, j)
        values.fill(v, batch, kv_head, j * BLOCK_N, j)


@gluon.jit
def consumer(
    o, lse, queries, keys, values, scale, batch, head, heads, row, n, Lq, Lk, D: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """Eight warps: the loop of stage 1, less the loads. acc, m, l and S: float32; P is rounded to V's dtype."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], instr_shape=[16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    # (BLOCK_M, D), in shared memory
    qt = queries.take(0)
    # (BLOCK_M, D), (BLOCK_M,), (BLOCK_M,), in registers
    acc = gl.zeros([BLOCK_M, D], gl.float32, layout=O_LAYOUT)
    m = gl.full([BLOCK_M], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    l = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S_LAYOUT)
    for j in range(n):
        # (BLOCK_N, D), in shared memory
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
        vt = values.take(j)
        # (BLOCK_M, D)
        acc = warpgroup_mma(gl.convert_layout(p.to(o.dtype), P_LAYOUT), vt, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values.release(j)
    write_out(o, lse, qt, acc, m, l, scale, batch, head, heads, row, Lq)


@gluon.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def stage2_kernel(
    q, k, v, o, lse, scale, heads, group, Lq, Lk, D: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """BLOCK_M rows of one head, by a consumer and a producer. Arguments as for stage 1."""
    batch, head, kv_head, row, n = my_tile(heads, group, Lq, Lk, BLOCK_M, BLOCK_N, CAUSAL)
    queries = open_channel(q.dtype, 1, 1, BLOCK_M, D, 1)
    keys = open_channel(q.dtype, 1, SLOTS, BLOCK_N, D, 1)
    values = open_channel(q.dtype, 1, SLOTS, BLOCK_N, D, 1)
    fence_async_shared()
    # The first has the warps that the kernel was launched with; then the warps and registers a thread of the others.
    gl.warp_specialize(
        [
            (consumer, (o, lse, queries, keys, values, scale, batch, head, heads, row, n, Lq, Lk, D, CAUSAL)),
            (producer, (q, k, v, queries, keys, values, batch, head, kv_head, row, n)),
        ],
        [1],
        [24],
    )


STAGE = Stage("stage2", stage2_kernel, block_m=128, q_rows=128, block_n=128, num_warps=8)

if __name__ == "__main__":
    demonstrate(STAGE)
