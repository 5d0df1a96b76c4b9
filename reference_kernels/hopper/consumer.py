# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""A consumer: one warp group with 64 query rows, their softmax and their output, in registers.

In the loop two products are under way at a time: S = Q K^T of block j and acc += P V of block j - 1. While the tensor
cores work on the second, the warp group computes the softmax of the first:

    tensor cores    | Q K(j)      | P(j-1) V(j-1)        | Q K(j+1)    | P(j) V(j)            |
    this warp group |             | softmax(j)           |             | softmax(j+1)         |

and with ping-pong the other warp groups issue their products in turn, so that one's softmax also hides behind the
others' products. Blocks are visited from the last to the first: those that the diagonal crosses come first and are
peeled off the loop. Where block 0 has few keys (work.py) it is no block of the loop's: its products are as narrow as
its keys allow, and its softmax is that of the first block visited, with one maximum for both. A step of its own would
have nothing to hide behind.

The reference of the exponentials, m, is a running maximum ("online"), or the maximum of the blocks that the mask
touches, or of the first block, and kept ("freeze"). softmax may subtract any number: the frozen one is not above the
true maximum, so nothing underflows that would not have, and float32 and bfloat16 have room for what grows above it. At
the end of a tile one look at the row sums tells whether they had: beyond 2^96, or where the products with V overflowed,
the CTA walks over its tiles once more with a running maximum. Exact in any case, fast if scores stay within 66 nats.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_compat import tma_store
from .producer import end_of_repeat
from .ptx import before_next_wait, finish_stores, named_barrier, product, rounded_pairs, scale_rows
from .softmax import hide_after, hide_before, partial_sums, probabilities, raised_maximum, rows_like
from .work import few_columns

LN2 = gl.constexpr(0.6931471805599453)
LIMIT = gl.constexpr(7.9e28)
"""2^96: a row sum below it is a sum of exponentials that bfloat16 could hold."""
SUSPECT = gl.constexpr(65536.0)
"""A row sum that a running maximum may reach as well: below it the products with V are no larger than they would be."""
INF = gl.constexpr(float("inf"))


@gluon.jit
def step(
    q, p, m, l, acc, zero, keys, values, count, edge, scale,
    INDEX: gl.constexpr, BEFORE: gl.constexpr, DIAGONAL: gl.constexpr, ONLINE: gl.constexpr, P_LAYOUT: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Q K(count) and P V(count - 1) under way together, softmax(count) meanwhile. Returns p, m, l, acc.

    edge: BEFORE: the first column that there is. DIAGONAL: the last that the first row sees.
    """
    kt = keys.take(count)
    if CONFIG.ping_pong:
        named_barrier("sync", 8 + INDEX, count)
    st = warpgroup_mma(q, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
    vt = values.take(count - 1)
    at = warpgroup_mma(p, vt, acc, is_async=True)
    if CONFIG.ping_pong:
        named_barrier("arrive", 8 + (INDEX + 1) % CONFIG.consumers, count)
    s = warpgroup_mma_wait(1, deps=(st,))
    keys.release(count)
    if BEFORE:
        s = hide_before(s, edge)
    if DIAGONAL:
        s = hide_after(s, edge, True)
    if ONLINE:
        m, factor = raised_maximum(s, m, scale, DIAGONAL)
        pf = probabilities(s, m, scale, DIAGONAL)
        l = l * rows_like(factor, l) + gl.convert_layout(partial_sums(pf), l.type.layout, assert_trivial=True)
        if CONFIG.pin:
            l = before_next_wait(l)
    else:
        pf = probabilities(s, m, scale, False)
        l = l + gl.convert_layout(partial_sums(pf), l.type.layout, assert_trivial=True)
    acc = warpgroup_mma_wait(0, deps=(at,))
    values.release(count - 1)
    if ONLINE:
        acc = scale_rows(acc, rows_like(factor, acc))
    return gl.convert_layout(rounded_pairs(pf, q.dtype), P_LAYOUT), m, l, acc


@gluon.jit
def last_product(p, acc, queries, tile_count, values, count, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """acc + P V(count - 1), with nothing left to overlap."""
    if not CONFIG.o_in_q:
        queries.release(tile_count, FIRST)
    vt = values.take(count - 1)
    at = warpgroup_mma(p, vt, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(at,))
    values.release(count - 1)
    return acc


@gluon.jit
def pass_over(keys, values, count, INDEX: gl.constexpr, CONFIG: gl.constexpr):
    """What `step` does for the producer and the other consumers, without a product: for a consumer that has no rows."""
    keys.take(count)
    if CONFIG.ping_pong:
        named_barrier("sync", 8 + INDEX, count)
    values.take(count - 1)
    if CONFIG.ping_pong:
        named_barrier("arrive", 8 + (INDEX + 1) % CONFIG.consumers, count)
    keys.release(count)
    values.release(count - 1)


@gluon.jit
def has_outgrown(l, acc):
    """1 if a row sum l (64,) or a product in acc (64, D) is no longer a number to rely on."""
    most = gl.max(gl.where(l < LIMIT, l, INF), 0)  # NaN counts too
    found = gl.where(most < LIMIT, 0, 1)
    if most >= SUSPECT:
        finite = gl.sum(acc * 0.0, 1) == 0.0  # 0 times infinity is NaN
        found = gl.maximum(found, gl.max(gl.where(finite, 0, 1), 0))
    return found


@gluon.jit
def store_present(o_rows, ot, first, row):
    """Rows of ot (64, D) from row 0 on, without the TMA, which cannot store from before the first row.

    o_rows: pointer to o, contiguous; first: the number of row `row` among all rows of all heads.
    """
    D: gl.constexpr = ot.shape[1]
    L: gl.constexpr = ot.type.layout
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
    gl.store(o_rows + first * D + r * D + c, ot, mask=row + r >= 0)


@gluon.jit
def attend_tiles(
    outputs, lse, channels, buffer, work, end, q_count, kv_count, scale, heads,
    INDEX: gl.constexpr, D: gl.constexpr, CONFIG: gl.constexpr,
    CAUSAL: gl.constexpr, TAIL: gl.constexpr, DIAGONALS: gl.constexpr, SHORT: gl.constexpr, ROWLESS: gl.constexpr,
    FREEZE: gl.constexpr,
):  # fmt: skip
    """The tiles work.begin … end - 1. channels, q_count, kv_count: as for producer.load_tiles.

    Returns kv_count as it is then, and with FREEZE whether a row outgrew its reference.
    """
    queries, keys, values = channels[0], channels[1], channels[2]
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    FIRST: gl.constexpr = INDEX * CONFIG.q_stages
    zero = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    # Block 0 as a few keys beside the first block visited, or as a block of its own of which a part is hidden.
    FEW: gl.constexpr = few_columns(SHORT, BLOCK_N)
    BEFORE: gl.constexpr = SHORT == BLOCK_N
    if FEW:
        few_keys, few_values = channels[3], channels[4]
        FEW_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, FEW, 16])
    row_pad, key_pad = work.pads(BLOCK_M, BLOCK_N, CAUSAL, SHORT)
    outgrown = 0
    count = kv_count
    for t in range(work.begin, end):
        row, batch, head, _ = work.tile(t, BLOCK_M)
        row = row - row_pad
        n, last = work.blocks_to_visit(row + key_pad, BLOCK_M, BLOCK_N, CAUSAL, FEW)
        diagonal = row + key_pad + INDEX * 64 + work.Lk - work.Lq
        tile_count = q_count + t - work.begin
        acc = gl.zeros([64, D], gl.float32, layout=O_LAYOUT)
        # The last block of keys, and the few of block 0: there is no product yet to overlap with.
        q = queries.take(tile_count, FIRST)
        kt = keys.take(count)
        st = warpgroup_mma(q, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
        if FEW:
            few_kt = few_keys.take(tile_count, HERE=True)
            few_zero = gl.zeros([64, FEW], gl.float32, layout=FEW_LAYOUT)
            few_st = warpgroup_mma(q, few_kt.permute((1, 0)), few_zero, use_acc=False, is_async=True)
            s, few_s = warpgroup_mma_wait(0, deps=(st, few_st))
            few_keys.release(tile_count)
        else:
            s = warpgroup_mma_wait(0, deps=(st,))
        keys.release(count)
        if CONFIG.o_in_q and CONFIG.q_stages > 1:  # noqa: SIM102  (constexpr)
            # Now that there is something to compute, O of the tile before has left Q's buffer.
            if t > work.begin:
                tma.store_wait(0)
                queries.release(tile_count - 1, FIRST)
        if CAUSAL:
            # What is beyond the last key is beyond the diagonal of every row that counts, too.
            s = hide_after(s, diagonal - last * BLOCK_N, True)
        elif TAIL:
            s = hide_after(s, work.Lk - last * BLOCK_N - 1, False)
        if BEFORE:  # noqa: SIM102  (constexpr)
            if n == 1:
                s = hide_before(s, key_pad)
        m = gl.max(s, 1)
        if FEW:
            few_s = hide_before(few_s, key_pad - (BLOCK_N - FEW))
            if CAUSAL:
                few_s = hide_after(few_s, diagonal - (BLOCK_N - FEW), True)
            m = gl.maximum(m, gl.convert_layout(gl.max(few_s, 1), ROWS))
            few_pf = probabilities(few_s, m, scale, CAUSAL)
            few_p = gl.convert_layout(rounded_pairs(few_pf, q.dtype), P_LAYOUT)
            few_vt = few_values.take(tile_count, HERE=True)
            acc = warpgroup_mma(few_p, few_vt, acc, use_acc=False, is_async=True)
        pf = probabilities(s, m, scale, CAUSAL)
        l = partial_sums(pf)
        p = gl.convert_layout(rounded_pairs(pf, q.dtype), P_LAYOUT)
        if FEW:
            l = l + gl.convert_layout(partial_sums(few_pf), l.type.layout, assert_trivial=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            few_values.release(tile_count)
        count += 1
        done = 1
        if DIAGONALS:
            # The mask touches more blocks. A frozen reference is found here, so these need a running maximum as well.
            crossed = n - work.full_blocks(row + key_pad, BLOCK_N)
            if FEW:
                crossed = gl.minimum(crossed + 1, n)  # block 0 is not among the n
            done = gl.maximum(crossed, 1)
            for j in range(1, done):
                p, m, l, acc = step(
                    q, p, m, l, acc, zero, keys, values, count, diagonal - (last - j) * BLOCK_N, scale,
                    INDEX, False, True, True, P_LAYOUT, CONFIG,
                )  # fmt: skip
                count += 1
        if ROWLESS and INDEX > 0:
            # In the last tile of a head this consumer may have no rows; what it computes is not written.
            idle = gl.where(row + INDEX * 64 < work.Lq, done, n)
            for _ in range(done, idle):
                pass_over(keys, values, count, INDEX, CONFIG)
                count += 1
            done = idle
        whole = n
        if BEFORE:
            whole = n - 1
        for _ in range(done, whole):
            p, m, l, acc = step(
                q, p, m, l, acc, zero, keys, values, count, 0, scale,
                INDEX, False, False, not FREEZE, P_LAYOUT, CONFIG,
            )  # fmt: skip
            count += 1
        if BEFORE:
            # The last product in both branches: p and acc of two ways that meet before it would spill.
            if done < n:
                # Every row sees all keys of block 0.
                p, m, l, acc = step(
                    q, p, m, l, acc, zero, keys, values, count, key_pad, scale,
                    INDEX, True, False, not FREEZE, P_LAYOUT, CONFIG,
                )  # fmt: skip
                count += 1
                acc = last_product(p, acc, queries, tile_count, values, count, FIRST, CONFIG)
            else:
                acc = last_product(p, acc, queries, tile_count, values, count, FIRST, CONFIG)
        else:
            acc = last_product(p, acc, queries, tile_count, values, count, FIRST, CONFIG)

        # O leaves by TMA, which drops rows that are not there: through a buffer of its own or, for lack of memory, Q's.
        row += INDEX * 64
        l = gl.convert_layout(gl.sum(l, 1), ROWS)
        present = row < work.Lq
        if CAUSAL and SHORT:
            present = row > -64
        if present:
            if FREEZE:
                outgrown = gl.maximum(outgrown, has_outgrown(l, acc))
            l = gl.where(l == 0.0, 1.0, l)  # a row that sees no key: o = 0, lse = -inf
            o = outputs[0]
            ot = (acc * rows_like(1.0 / l, acc)).to(o.dtype)
            ob = q if CONFIG.o_in_q else buffer
            if not CONFIG.o_in_q:
                tma.store_wait(0)
            if CAUSAL and SHORT:
                if row < 0:
                    store_present(outputs[1], ot, (batch * heads + head).to(gl.int64) * work.Lq + row, row)
                else:
                    ob.store(ot)
                    fence_async_shared()
                    tma_store(o, [batch, head, row, 0], ob)
            else:
                ob.store(ot)
                fence_async_shared()
                tma_store(o, [batch, head, row, 0], ob)
            rows = row + gl.arange(0, 64, layout=ROWS)
            lse_rows = lse + (batch * heads + head).to(gl.int64) * work.Lq + rows
            there = rows < work.Lq
            if CAUSAL and SHORT:
                there = rows >= 0
            # The exponents had m scale rounded, once a row: the same here, and its error is none.
            gl.store(lse_rows, (product(m, scale) + gl.log2(l)) * LN2, mask=there)
        if CONFIG.o_in_q and CONFIG.q_stages == 1:
            tma.store_wait(0)
            queries.release(tile_count, FIRST)
    if CONFIG.o_in_q and CONFIG.q_stages > 1:  # noqa: SIM102  (constexpr)
        if end > work.begin:
            tma.store_wait(0)
            queries.release(q_count + end - work.begin - 1, FIRST)
    return count, outgrown


@gluon.jit
def consumer(
    outputs, lse, outgrown, decided, channels, buffer, work, scale, heads,
    INDEX: gl.constexpr, D: gl.constexpr, CONFIG: gl.constexpr,
    CAUSAL: gl.constexpr, TAIL: gl.constexpr, DIAGONALS: gl.constexpr, SHORT: gl.constexpr, ROWLESS: gl.constexpr,
    FREEZE: gl.constexpr,
):  # fmt: skip
    """All tiles of the CTA; with FREEZE once more with a running maximum, if any consumer found that it must be."""
    if CONFIG.ping_pong and CONFIG.consumers - 1 == INDEX:
        named_barrier("arrive", 8, work.begin)  # the first turn is consumer 0's
    count, mine = attend_tiles(
        outputs, lse, channels, buffer, work, work.end, 0, 0, scale, heads,
        INDEX, D, CONFIG, CAUSAL, TAIL, DIAGONALS, SHORT, ROWLESS, FREEZE,
    )  # fmt: skip
    if FREEZE:
        gl.store(outgrown + gl.program_id(0) * CONFIG.consumers + INDEX, mine)
        mbarrier.arrive(decided, count=1)
        end = end_of_repeat(outgrown, decided, work, CONFIG)
        finish_stores(end)  # the second walk writes the same rows
        attend_tiles(
            outputs, lse, channels, buffer, work, end, work.end - work.begin, count, scale, heads,
            INDEX, D, CONFIG, CAUSAL, TAIL, DIAGONALS, SHORT, ROWLESS, False,
        )  # fmt: skip
    tma.store_wait(0)
