# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""Stage 3 of 3: the softmax hides under the products. This is the schedule of FlashAttention-3.

Exponentials are few beside multiplications, but the units that compute them are slow beside the tensor cores, and in
stage 2 each stands still while the other works. The softmax of block j needs Q K(j), and P V(j) needs the softmax, but
two things are free to run under it:

1. **The product of the block before** (in one warp group). Q K(j) and P V(j - 1) are issued together; when the first is
   ready its softmax begins, while the tensor cores work on the second. P stays in registers for a turn of the loop:

    tensor cores    | Q K(j)      | P(j-1) V(j-1)        | Q K(j+1)    | P(j) V(j)            |
    warp group      |             | softmax(j)           |             | softmax(j+1)         |

2. **The products of the other warp group.** The two warp groups of stage 2 become two consumers with 64 rows each,
   which share K and V but need not keep step. Left alone they may fall into step all the same, both wanting the tensor
   cores and then both the exponentials. A pair of named barriers makes them take turns (*ping-pong*): a consumer issues
   its products, lets the other issue its own, and computes its softmax meanwhile.

For the overlap the first block stands before the loop. Taking the blocks from the last to the first makes that the one
which the causal mask cuts: only it is masked, and the loop has no mask in it.

bf16 or fp16, D 64 or 128, causal (bottom-right) or not, grouped heads; Lq and Lk multiples of 128.

What kernel.py adds to this: tails; a persistent grid, where loads of the next tile run under the end of this one;
rescaling acc only where the maximum rose by much, or never (the frozen maximum); sums reduced once a tile.

    python -m reference_kernels.hopper.stage3      error against the float64 oracle, TFLOP/s beside SDPA (Hopper GPU)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .channel import open_channel
from .ptx import before_next_wait, named_barrier, rounded_pairs
from .softmax import hide_after, rows_like
from .stage1 import my_tile, softmax_step, write_out
from .stages import Stage, demonstrate

ROWS = gl.constexpr(64)  # of a consumer
BLOCK_N = gl.constexpr(128)
SLOTS = gl.constexpr(2)


@gluon.jit
def producer(q, k, v, queries, keys, values, batch, head, kv_head, row, n):
    """One warp: Q of both consumers, then K and V from the last block to the first, K of the next before V of this."""
    queries.fill(q, batch, head, row, 0, 0)
    queries.fill(q, batch, head, row + ROWS, 0, 1)
    last = (n - 1) * BLOCK_N
    keys.fill(k, batch, kv_head, last, 0)
    for j in range(1, n):
        keys.fill(k, batch, kv_head, last - j * BLOCK_N, j)
        values.fill(v, batch, kv_head, last - (j - 1) * BLOCK_N, j - 1)
    values.fill(v, batch, kv_head, 0, n - 1)


@gluon.jit
def consumer(
    o, lse, queries, keys, values, scale, batch, head, heads, tile, n, Lq, Lk,
    INDEX: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A warp group with the INDEX-th ROWS rows from `tile` on. acc, m, l and S: float32; P is rounded to V's dtype."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    row = tile + INDEX * ROWS
    if INDEX == 1:
        named_barrier("arrive", 8, n)  # the first turn is consumer 0's
    # (ROWS, D), (ROWS,), (ROWS,), in registers
    acc = gl.zeros([ROWS, D], gl.float32, layout=O_LAYOUT)
    m = gl.full([ROWS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    l = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=S_LAYOUT)

    # The last block of keys: there is no product yet to overlap with.
    # (ROWS, D), (BLOCK_N, D), in shared memory
    qt = queries.take(0, INDEX)
    kt = keys.take(0)
    # (ROWS, BLOCK_N), float32, in registers
    st = warpgroup_mma(qt, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(st,))
    keys.release(0)
    if CAUSAL:
        s = hide_after(s, row + Lk - Lq - (n - 1) * BLOCK_N, True)
    pf, m, l, _ = softmax_step(s, m, l, scale)
    # (ROWS, BLOCK_N), V's dtype, in registers
    p = gl.convert_layout(rounded_pairs(pf, o.dtype), P_LAYOUT)

    for j in range(1, n):
        kt = keys.take(j)
        named_barrier("sync", 8 + INDEX, j)  # my turn
        # Both products are under way: (ROWS, BLOCK_N) and (ROWS, D), float32.
        st = warpgroup_mma(qt, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
        vt = values.take(j - 1)
        at = warpgroup_mma(p, vt, acc, is_async=True)
        named_barrier("arrive", 8 + (INDEX + 1) % 2, j)  # the other's turn
        # All but the youngest product are done: that is S.
        s = warpgroup_mma_wait(1, deps=(st,))
        keys.release(j)
        pf, m, l, alpha = softmax_step(s, m, l, scale)
        l = before_next_wait(l)
        acc = warpgroup_mma_wait(0, deps=(at,))
        values.release(j - 1)
        # acc holds the blocks up to j - 1, which alpha corrects; P of block j waits for the next turn.
        acc = acc * rows_like(alpha, acc)
        p = gl.convert_layout(rounded_pairs(pf, o.dtype), P_LAYOUT)

    vt = values.take(n - 1)
    at = warpgroup_mma(p, vt, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(at,))
    values.release(n - 1)
    write_out(o, lse, qt, acc, m, l, scale, batch, head, heads, row, Lq)


@gluon.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def stage3_kernel(
    q, k, v, o, lse, scale, heads, group, Lq, Lk, D: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """2 ROWS rows of one head, by two consumers and a producer. Arguments as for stage 1."""
    batch, head, kv_head, row, n = my_tile(heads, group, Lq, Lk, 2 * ROWS, BLOCK_N, CAUSAL)
    queries = open_channel(q.dtype, 2, 1, ROWS, D, 1)
    keys = open_channel(q.dtype, 1, SLOTS, BLOCK_N, D, 2)
    values = open_channel(q.dtype, 1, SLOTS, BLOCK_N, D, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (o, lse, queries, keys, values, scale, batch, head, heads, row, n, Lq, Lk, 0, D, CAUSAL)),
            (consumer, (o, lse, queries, keys, values, scale, batch, head, heads, row, n, Lq, Lk, 1, D, CAUSAL)),
            (producer, (q, k, v, queries, keys, values, batch, head, kv_head, row, n)),
        ],
        [4, 1],
        [240, 24],
    )


STAGE = Stage("stage3", stage3_kernel, block_m=128, q_rows=64, block_n=128, num_warps=4)

if __name__ == "__main__":
    demonstrate(STAGE)
