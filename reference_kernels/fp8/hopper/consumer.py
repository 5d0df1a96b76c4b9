# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""A consumer in FP8: ../../hopper/consumer.py, with scales, with P in E4M3, and with another order of work.

    S8 = Q8 K8^T      P = 2^8 exp2(unit S8 - m)      acc = sum_t P_t V8_t      O = w r acc / l      (scales.py)

An FP8 product takes half the time of a 16-bit one and the softmax as long as ever: what the softmax does not hide
behind is lost. There are two orders. `step` is that of the 16-bit consumer, in which it hides behind P V of the block
before, and behind the products of the other consumers if they take turns. `step_ahead` has the scores of a block ready
before its turn, so that two products are under way from the first instruction of a softmax to the last:

    tensor cores    | P(j-1) V(j-1)   Q K(j+1)        | P(j) V(j)   Q K(j+2)            |
    this warp group | softmax(j)                      | softmax(j+1)                    |

for which two tiles of scores, S(j) and S(j+1), are in registers at a time. Two such steps make a turn of the loop: the
two change places from step to step, and after two they are back where they were, without moves. configs.py has which
order is the faster one where.

What else is different:

- **P times 2^8**, in the exponent, for nothing: ../forward.py says what it is good for. m is the running maximum in
  units of log2, since every block may have a unit of its own. It is never frozen, nor raised late: at 2^8 times its
  largest, P has not even a factor of two left to the end of E4M3.
- **The registers of P.** wgmma leaves a thread two neighbours of each eight columns, and takes four of each sixteen as
  its FP8 operand. If V's keys are stored in the order of interleaving.py, these are the same numbers; otherwise the
  four threads of a quad exchange them (operand.py).
- **The sum.** acc stays in the tensor cores, as in FlashAttention-3, and only warps whose maximum or whose unit of V
  changed rescale it. The FP8 products of Hopper add up in fewer bits than float32 has, some 14 of 24 (DeepSeek-V3
  technical report, section 3.3.2), and what is cut off adds up with the number of keys. To begin P V at 0 for every
  block and add it to acc in float32 ("promotion") would keep the loss to that of one block; it is left out since it
  takes a second accumulator, for which D = 256 has no registers, and one more multiply-add an element and block.

Accumulators: S8 and acc as the tensor cores add up; m, l float32; O is rounded once, to bfloat16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...hopper.gluon_compat import tma_store
from ...hopper.ptx import before_next_wait, named_barrier, scale_rows
from ...hopper.softmax import NEG_INF, hide_after, partial_sums, rows_like
from .operand import packed, packed_in_place, unpacked
from .scales import next_units, unit_and_ratio

LN2 = gl.constexpr(0.6931471805599453)
P_BITS = gl.constexpr(8.0)
"""P, at most 1, is multiplied by 2 to this before it is rounded to E4M3, whose largest number is 448."""


@gluon.jit
def row_maximum(s):
    """The largest of each row of s (64, N), (64,). Pairs first: a chain of comparisons half as long."""
    own = gl.max(gl.max(gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(gl.max(own, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def softmax(s, m, l, unit, HIDDEN: gl.constexpr):
    """P (64, BLOCK_N), m (64,), l (64, 4) after block s, in float32, and the factor for what was summed before it.

    HIDDEN: a row may have seen no key yet.
    """
    top = gl.maximum(m, row_maximum(s) * unit)
    factor = gl.exp2(m - top)
    shift = top - P_BITS
    if HIDDEN:
        factor = gl.where(top == NEG_INF, 1.0, factor)
        shift = gl.where(top == NEG_INF, 0.0, shift)  # exp2(-inf + inf) would be NaN
    p = gl.exp2(s * unit - shift[:, None])
    return p, top, l * rows_like(factor, l) + partial_sums(p), factor


@gluon.jit
def in_words(p, INTERLEAVED: gl.constexpr):
    """P as int32, four numbers of E4M3 each, for keys in either order."""
    if INTERLEAVED:  # noqa: SIM108  (constexpr: one of the two is compiled)
        w = packed_in_place(p)
    else:
        w = packed(p)
    return w


@gluon.jit
def scores(q, keys, count, zero):
    """Q K(count) (64, BLOCK_N), alone under way."""
    kt = keys.take(count)
    st = warpgroup_mma(q, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(st,))
    keys.release(count)
    return s


@gluon.jit
def add_product(p, acc, values, count, P_LAYOUT: gl.constexpr):
    """acc + P V(count) (64, D), alone under way. p as of in_words."""
    vt = values.take(count)
    at = warpgroup_mma(unpacked(p, P_LAYOUT), vt, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(at,))
    values.release(count)
    return acc


@gluon.jit
def step(
    q, p, m, l, acc, zero, keys, values, count, unit, change,
    INDEX: gl.constexpr, P_LAYOUT: gl.constexpr, CONFIG: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Q K(count) and P V(count - 1) under way together, softmax(count) meanwhile. Returns p, m, l, acc.

    p (64, BLOCK_N / 4) as of in_words, m (64,), l (64, 4), acc (64, D); zero (64, BLOCK_N): zeros. unit: of block
    count. change: of the units of V, from block count - 1 to count.
    """
    kt = keys.take(count)
    if CONFIG.ping_pong:
        named_barrier("sync", 8 + INDEX, count)
    st = warpgroup_mma(q, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
    vt = values.take(count - 1)
    at = warpgroup_mma(unpacked(p, P_LAYOUT), vt, acc, is_async=True)
    if CONFIG.ping_pong:
        named_barrier("arrive", 8 + (INDEX + 1) % CONFIG.consumers, count)
    s = warpgroup_mma_wait(1, deps=(st,))
    keys.release(count)
    pf, m, l, factor = softmax(s, m, l, unit, False)
    if CONFIG.pin:
        l = before_next_wait(l)
    acc = warpgroup_mma_wait(0, deps=(at,))
    values.release(count - 1)
    acc = scale_rows(acc, rows_like(factor * change, acc))
    return in_words(pf, INTERLEAVED), m, l, acc


@gluon.jit
def step_ahead(
    q, p, s, m, l, acc, zero, keys, values, count, unit, change,
    LAST: gl.constexpr, P_LAYOUT: gl.constexpr, CONFIG: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """P V(count - 1) and Q K(count + 1) under way together, softmax(count) meanwhile. Returns p, s, m, l, acc.

    s (64, BLOCK_N): Q K(count), and as returned Q K(count + 1). LAST: there is no block count + 1, and s is returned as
    it came. The others as of `step`.
    """
    vt = values.take(count - 1)
    at = warpgroup_mma(unpacked(p, P_LAYOUT), vt, acc, is_async=True)
    if not LAST:
        kt = keys.take(count + 1)
        st = warpgroup_mma(q, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
    pf, m, l, factor = softmax(s, m, l, unit, False)
    if CONFIG.pin:
        l = before_next_wait(l)
    acc = warpgroup_mma_wait(0 if LAST else 1, deps=(at,))
    values.release(count - 1)
    # A plain product LLVM would move over the back edge of the loop, and all of acc would spill.
    acc = scale_rows(acc, rows_like(factor * change, acc))
    # Were it packed before the wait, the ptxas of Triton 3.6.0 would wait for every single product.
    w = in_words(pf, INTERLEAVED)
    if not LAST:
        s = warpgroup_mma_wait(0, deps=(st,))
        keys.release(count + 1)
    return w, s, m, l, acc


@gluon.jit
def step_in_turn(
    q, p, m, l, acc, zero, keys, values, count, last, unit, change,
    P_LAYOUT: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """The same one after the other, of a block that the diagonal crosses: columns after `last` are hidden.

    There is at most one of these a tile (two where block_m is more than block_n), and the mask, a second product and
    a second loop around them would not fit into the registers.
    """
    acc = add_product(p, acc, values, count - 1, P_LAYOUT)
    s = hide_after(scores(q, keys, count, zero), last, True)
    pf, m, l, factor = softmax(s, m, l, unit, True)
    acc = scale_rows(acc, rows_like(factor * change, acc))
    return in_words(pf, INTERLEAVED), m, l, acc


@gluon.jit
def turn_ahead(
    q, p, s, m, l, acc, zero, keys, values, count, scales, batch, kv_head, key, row_unit, inverse, r, dk, dv,
    LAST: gl.constexpr, P_LAYOUT: gl.constexpr, CONFIG: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    V_BLOCKS: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """step_ahead in the units of its block, from dk and dv, and the next ones asked for, of the block of `key`.

    Returns p, s, m, l, acc, r, dk, dv, count.
    """
    unit, r, change = next_units(row_unit, inverse, dk, dv, r, V_BLOCKS)
    if not LAST:
        dk, dv = scales.of_keys(batch, kv_head, key, SCALE_BLOCK, V_BLOCKS)
    p, s, m, l, acc = step_ahead(
        q, p, s, m, l, acc, zero, keys, values, count, unit, change, LAST, P_LAYOUT, CONFIG, INTERLEAVED
    )
    return p, s, m, l, acc, r, dk, dv, count + 1


@gluon.jit
def blocks_ahead(
    q, p, m, l, acc, zero, keys, values, count, left, scales, batch, kv_head, row_unit, inverse, r, dk, dv,
    P_LAYOUT: gl.constexpr, CONFIG: gl.constexpr, SCALE_BLOCK: gl.constexpr, V_BLOCKS: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Blocks left - 1 … 0 of the keys, left at least 1, with step_ahead. Returns p, m, l, acc, r, count.

    r: of the block before. dk, dv: of block left - 1.
    """
    BLOCK_N: gl.constexpr = CONFIG.block_n
    s = scores(q, keys, count, zero)
    for j in range(0, left - 2, 2):
        for half in gl.static_range(2):
            p, s, m, l, acc, r, dk, dv, count = turn_ahead(
                q, p, s, m, l, acc, zero, keys, values, count, scales, batch, kv_head, (left - 2 - j - half) * BLOCK_N,
                row_unit, inverse, r, dk, dv, False, P_LAYOUT, CONFIG, SCALE_BLOCK, V_BLOCKS, INTERLEAVED,
            )  # fmt: skip
    if left % 2 == 0:
        p, s, m, l, acc, r, dk, dv, count = turn_ahead(
            q, p, s, m, l, acc, zero, keys, values, count, scales, batch, kv_head, 0,
            row_unit, inverse, r, dk, dv, False, P_LAYOUT, CONFIG, SCALE_BLOCK, V_BLOCKS, INTERLEAVED,
        )  # fmt: skip
    p, s, m, l, acc, r, dk, dv, count = turn_ahead(
        q, p, s, m, l, acc, zero, keys, values, count, scales, batch, kv_head, 0,
        row_unit, inverse, r, dk, dv, True, P_LAYOUT, CONFIG, SCALE_BLOCK, V_BLOCKS, INTERLEAVED,
    )  # fmt: skip
    return p, m, l, acc, r, count


@gluon.jit
def consumer(
    o, lse, queries, keys, values, buffer, work, scales, heads,
    INDEX: gl.constexpr, D: gl.constexpr, CONFIG: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr, TAIL: gl.constexpr, DIAGONALS: gl.constexpr,
    V_BLOCKS: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """All tiles of the CTA, 64 rows of each."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, D, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=4)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    FIRST: gl.constexpr = INDEX * CONFIG.q_stages
    # The first turn is consumer 0's.
    if CONFIG.ping_pong and CONFIG.consumers - 1 == INDEX:
        named_barrier("arrive", 8, work.begin)
    zero = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    count = work.begin * 0
    for t in range(work.begin, work.end):
        row, batch, head, kv_head = work.tile(t, BLOCK_M)
        n = work.key_blocks(row, BLOCK_M, BLOCK_N, CAUSAL)
        diagonal = row + INDEX * 64 + work.Lk - work.Lq
        mine = row + INDEX * 64
        if SCALE_BLOCK % BLOCK_M:
            mine = gl.minimum(mine, work.Lq - 1)  # the rows of a consumer may all be in a block that is not there
        row_unit, w, inverse = scales.of_rows(batch, head, kv_head, mine, SCALE_BLOCK)
        dk, dv = scales.of_keys(batch, kv_head, (n - 1) * BLOCK_N, SCALE_BLOCK, V_BLOCKS)
        unit, r = unit_and_ratio(row_unit, inverse, dk, dv)
        acc = gl.zeros([64, D], gl.float32, layout=O_LAYOUT)
        # The last block of keys: there is no product yet to overlap with.
        q = queries.take(t - work.begin, FIRST)
        s = scores(q, keys, count, zero)
        if CAUSAL:
            # What is beyond the last key is beyond the diagonal of every row that counts, too.
            s = hide_after(s, diagonal - (n - 1) * BLOCK_N, True)
        elif TAIL:
            s = hide_after(s, work.Lk - (n - 1) * BLOCK_N - 1, False)
        m = gl.full([64], NEG_INF, gl.float32, layout=ROWS)
        l = partial_sums(zero)
        pf, m, l, _ = softmax(s, m, l, unit, CAUSAL)
        p = in_words(pf, INTERLEAVED)
        count += 1
        done = 1
        if DIAGONALS:
            # The mask touches more blocks.
            done = gl.maximum(n - work.full_blocks(row, BLOCK_N), 1)
            for j in gl.static_range(1, (BLOCK_M + BLOCK_N - 1) // BLOCK_N + 1):
                if j < done:
                    column = (n - 1 - j) * BLOCK_N
                    dk, dv = scales.of_keys(batch, kv_head, column, SCALE_BLOCK, V_BLOCKS)
                    unit, r, change = next_units(row_unit, inverse, dk, dv, r, V_BLOCKS)
                    p, m, l, acc = step_in_turn(
                        q, p, m, l, acc, zero, keys, values, count, diagonal - column, unit, change,
                        P_LAYOUT, INTERLEAVED,
                    )  # fmt: skip
                    count += 1
        dk, dv = scales.of_keys(batch, kv_head, gl.maximum(n - 1 - done, 0) * BLOCK_N, SCALE_BLOCK, V_BLOCKS)
        if CONFIG.ahead:
            if done < n:
                p, m, l, acc, r, count = blocks_ahead(
                    q, p, m, l, acc, zero, keys, values, count, n - done, scales, batch, kv_head, row_unit, inverse,
                    r, dk, dv, P_LAYOUT, CONFIG, SCALE_BLOCK, V_BLOCKS, INTERLEAVED,
                )  # fmt: skip
        else:
            for j in range(done, n):
                unit, r, change = next_units(row_unit, inverse, dk, dv, r, V_BLOCKS)
                # Those of the next turn: a load takes as long as a product.
                dk, dv = scales.of_keys(batch, kv_head, gl.maximum(n - 2 - j, 0) * BLOCK_N, SCALE_BLOCK, V_BLOCKS)
                p, m, l, acc = step(
                    q, p, m, l, acc, zero, keys, values, count, unit, change, INDEX, P_LAYOUT, CONFIG, INTERLEAVED
                )
                count += 1
        queries.release(t - work.begin, FIRST)
        acc = add_product(p, acc, values, count - 1, P_LAYOUT)

        # O leaves by TMA, which drops the rows beyond Lq.
        row += INDEX * 64
        l = gl.convert_layout(gl.sum(l, 1), ROWS)
        if row < work.Lq:
            l = gl.where(l == 0.0, 1.0, l)  # a row that sees no key: o = 0, lse = -inf
            if V_BLOCKS:
                w = w * r
            ot = (acc * rows_like(w / l, acc)).to(o.dtype)
            tma.store_wait(0)
            buffer.store(ot)
            fence_async_shared()
            tma_store(o, [batch, head, row, 0], buffer)
            rows = row + gl.arange(0, 64, layout=ROWS)
            lse_rows = lse + (batch * heads + head).to(gl.int64) * work.Lq + rows
            gl.store(lse_rows, (m + (gl.log2(l) - P_BITS)) * LN2, mask=rows < work.Lq)
    tma.store_wait(0)
