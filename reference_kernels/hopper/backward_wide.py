"""Head dimension 256: dK, dV and dQ in two passes, deterministic, without atomics.

dK and dV of 64 keys by 256 columns are 256 registers of every thread of a warp group, one more than there are. So the
two consumers of a CTA do not share keys but products, and what one needs of the other goes through shared memory:

    consumer 1    S^T = K Q^T        P^T = exp2(S^T scale - lse2)      dV += P^T dO
    consumer 2    dP^T = V dO^T      dS^T = P^T o (dP^T - delta)       dK += dS^T Q

P passes in float32, as it would in registers, so that dS is rounded once; in the order of registers, so that no data
moves between threads. Each product of block t that ends in an accumulator is started in step t + 1, so that no consumer
waits for one with nothing else to do, and none is in flight across the loop's edge.

dQ is backward_twopass.py's kernel with the ring divided: K, which is needed until dQ has been formed, has two slots,
and V, which is not, has one.

Accumulators dK, dV, dQ, S, dP: float32. P and dS are rounded to the input dtype for their products.
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

from .backward_stream import (
    LN2,
    LOG2E,
    ROWS,
    STAGES,
    barriers,
    hide,
    load_stream,
    open_stream,
    place,
    rows_of,
    start_dp,
    start_scores,
)
from .gluon_compat import aggregate, tma_load, tma_store

KEYS = gl.constexpr(64)
BLOCK = gl.constexpr(64)
"""Keys that the dQ kernel streams at a time."""


@aggregate
class Handover:
    """P on its way from consumer 1 to 2: tiles (slots, 4096) float32, full and empty barriers (slots, 1)."""

    p: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, p, full, empty):
        self.p = p
        self.full = full
        self.empty = empty


@gluon.jit
def give(t, p, handover):
    """Store p (64, ROWS) in the order of registers: each thread has 4 neighbours, each warp 128."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    s = t % STAGES
    flat = p.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([4096])
    flat = gl.convert_layout(flat, L, assert_trivial=True)
    mbarrier.wait(handover.empty.index(s), (t // STAGES) & 1 ^ 1)
    handover.p.index(s).store(flat)
    mbarrier.arrive(handover.full.index(s), count=1)


@gluon.jit
def take(t, handover):
    """What was given for block t, (64, ROWS)."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    s = t % STAGES
    mbarrier.wait(handover.full.index(s), (t // STAGES) & 1)
    flat = handover.p.index(s).load(L)
    mbarrier.arrive(handover.empty.index(s), count=1)
    p = flat.reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, ROWS])
    return gl.convert_layout(p, S, assert_trivial=True)


@gluon.jit
def probabilities(
    t, st, stream, handover, scale, diagonal, keys, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr
):
    """From the scores of block t in flight, the last product, to P^T: handed over, and as an operand."""
    dtype: gl.constexpr = stream.q.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    lse2 = stream.lse2.index(t % STAGES).load(gl.SliceLayout(0, L))
    x = warpgroup_mma_wait(0, deps=(st,)) * scale - lse2[None, :]
    if MASKED:
        x = hide(x, diagonal, keys, 0, CAUSAL)
    p = gl.exp2(x)
    give(t, p, handover)
    return gl.convert_layout(p.to(dtype), A)


@gluon.jit
def dv_step(
    t, p, dv, k_s, stream, handover, scale, diagonal, keys, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr
):
    """dV of block t - 1, P of block t."""
    dvt = warpgroup_mma(p, stream.do.index((t - 1) % STAGES), dv, is_async=True)
    st = start_scores(t, k_s, stream)
    dv = warpgroup_mma_wait(1, deps=(dvt,))
    stream.release(t - 1)
    return probabilities(t, st, stream, handover, scale, diagonal, keys, D, CAUSAL, MASKED), dv


@gluon.jit
def dv_loop(
    k_s, v_s, stream, handover, resident, dvd, scale, index, start, diagonal, keys, n, masked, group,
    D: gl.constexpr, CAUSAL: gl.constexpr, MASKS: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """Consumer 1: P and dV. MASKS: the first `masked` row blocks of a head hold hidden pairs."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dv = gl.zeros([KEYS, D], gl.float32, L)
    mbarrier.wait(resident, 0)
    p = probabilities(0, start_scores(0, k_s, stream), stream, handover, scale, diagonal, keys, D, CAUSAL, MASKS)
    members = group if GROUPED else 1
    for member in range(members):
        begin = gl.where(member == 0, 1, 0)
        if MASKS:
            for j in range(begin, masked):
                p, dv = dv_step(
                    member * n + j, p, dv, k_s, stream, handover, scale, diagonal + j * ROWS, keys, D, CAUSAL, True
                )
            begin = gl.maximum(begin, masked)
        for j in range(begin, n):
            p, dv = dv_step(member * n + j, p, dv, k_s, stream, handover, scale, 0, keys, D, CAUSAL, False)
    last = stream.do.index((members * n - 1) % STAGES)
    dv = warpgroup_mma_wait(0, deps=(warpgroup_mma(p, last, dv, is_async=True),))
    # K has no other reader: it is this consumer's to overwrite.
    k_s.store(dv.to(k_s.dtype))
    fence_async_shared()
    tma_store(dvd, [index, start, 0], k_s)
    tma.store_wait(0)


@gluon.jit
def grad_scores(t, dpt, stream, handover, D: gl.constexpr):
    """From dP of block t in flight, the last product, to dS^T, as an operand."""
    dtype: gl.constexpr = stream.q.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    delta = stream.delta.index(t % STAGES).load(gl.SliceLayout(0, L))
    dp = warpgroup_mma_wait(0, deps=(dpt,)) - delta[None, :]
    return gl.convert_layout((take(t, handover) * dp).to(dtype), A)


@gluon.jit
def dk_loop(v_s, stream, handover, resident, dkd, scale, index, start, total, D: gl.constexpr):
    """Consumer 2: dS and dK of the stream's `total` blocks."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk = gl.zeros([KEYS, D], gl.float32, L)
    mbarrier.wait(resident, 0)
    mbarrier.wait(stream.full.index(0), 0)
    ds = grad_scores(0, start_dp(0, v_s, stream), stream, handover, D)
    for t in range(1, total):
        dkt = warpgroup_mma(ds, stream.q.index((t - 1) % STAGES), dk, is_async=True)
        mbarrier.wait(stream.full.index(t % STAGES), (t // STAGES) & 1)
        dpt = start_dp(t, v_s, stream)
        dk = warpgroup_mma_wait(1, deps=(dkt,))
        stream.release(t - 1)
        ds = grad_scores(t, dpt, stream, handover, D)
    last = stream.q.index((total - 1) % STAGES)
    dk = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, last, dk, is_async=True),))
    v_s.store((dk * (scale * LN2)).to(v_s.dtype))
    fence_async_shared()
    tma_store(dkd, [index, start, 0], v_s)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "group", "Lq", "Lk"])
def wide_dkv_kernel(
    qd, dod, kd, vd, ld, dd, dkd, dvd, scale, kv_heads, group, Lq, Lk,
    D: gl.constexpr, CAUSAL: gl.constexpr, MASKS: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys of one kv head. The grid: see place."""
    blocks = (Lq + ROWS - 1) // ROWS + 1
    tile, index = place()
    start = tile * KEYS
    first, n, masked = rows_of(start, Lq, Lk, KEYS, CAUSAL)
    masked = gl.minimum(masked, n)
    diagonal = first * ROWS + Lk - Lq - start
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], kd.dtype)
    k_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], KV)
    v_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], KV)
    stream = open_stream(qd, ld, D)
    p_s = gl.allocate_shared_memory(gl.float32, [STAGES, 4096], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    handover = Handover(p_s, barriers(STAGES, 1), barriers(STAGES, 1))
    resident = barriers(1, 1).index(0)
    fence_async_shared()
    members = group if GROUPED else 1
    gl.warp_specialize([
        (dv_loop, (
            k_s, v_s, stream, handover, resident, dvd, scale * LOG2E, index, start, diagonal, Lk - start, n, masked,
            group, D, CAUSAL, MASKS, GROUPED,
        )),
        (dk_loop, (v_s, stream, handover, resident, dkd, scale * LOG2E, index, start, members * n, D)),
        (load_stream, (
            qd, dod, kd, vd, ld, dd, stream, k_s, v_s, resident, index, kv_heads, group, members, blocks, start,
            first, n,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def load_keys(
    qd,
    dod,
    kd,
    vd,
    q_s,
    do_s,
    k_s,
    v_s,
    resident,
    k_full,
    k_empty,
    v_full,
    v_empty,
    index,
    heads,
    group,
    start,
    n,
    masked,
):
    """The producer of dQ: Q and dO of a tile of query head `index`, then n blocks of keys, the last `masked` first."""
    batch = index // heads
    head = index % heads
    kv_head = head // group
    mbarrier.expect(resident, qd.block_type.nbytes + dod.block_type.nbytes)
    tma_load(qd, [batch, head, start, 0], resident, q_s)
    tma_load(dod, [batch, head, start, 0], resident, do_s)
    for j in range(n):
        s = j % STAGES
        block = j + n - masked
        block = gl.where(block >= n, block - n, block)
        at = [batch, kv_head, block * BLOCK, 0]
        mbarrier.wait(k_empty.index(s), (j // STAGES) & 1 ^ 1)
        mbarrier.expect(k_full.index(s), kd.block_type.nbytes)
        tma_load(kd, at, k_full.index(s), k_s.index(s))
        mbarrier.wait(v_empty, j & 1 ^ 1)
        mbarrier.expect(v_full, vd.block_type.nbytes)
        tma_load(vd, at, v_full, v_s.index(0))


@gluon.jit
def dq_start(j, q_h, k_s, k_full):
    """Wait for block j of K and start S = Q K^T (64, BLOCK)."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    mbarrier.wait(k_full.index(j % STAGES), (j // STAGES) & 1)
    k = k_s.index(j % STAGES).permute((1, 0))
    return warpgroup_mma(q_h, k, gl.zeros([64, BLOCK], gl.float32, L), use_acc=False, is_async=True)


@gluon.jit
def dq_rest(j, st, do_h, v_s, v_full, v_empty, lse2, delta, scale, last, key, D: gl.constexpr, MASKED: gl.constexpr):
    """From the scores of block j in flight to dS, as an operand. last (64,): the last key that a row sees."""
    dtype: gl.constexpr = v_s.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    mbarrier.wait(v_full, j & 1)
    # Always slot 0. If the compiler knew, it would keep 16 addresses of V in registers that it does not have.
    v = v_s.index(j >> 30).permute((1, 0))
    dpt = warpgroup_mma(do_h, v, gl.zeros([64, BLOCK], gl.float32, L), use_acc=False, is_async=True)
    x = warpgroup_mma_wait(1, deps=(st,)) * scale - lse2[:, None]
    if MASKED:
        x = gl.where(gl.arange(0, BLOCK, gl.SliceLayout(0, L))[None, :] + key <= last[:, None], x, -float("inf"))
    p = gl.exp2(x)
    dp = warpgroup_mma_wait(0, deps=(dpt,))
    mbarrier.arrive(v_empty, count=1)
    return gl.convert_layout((p * (dp - delta[:, None])).to(dtype), A)


@gluon.jit
def dq_step(
    j, ds, dq, q_h, do_h, k_s, v_s, k_full, k_empty, v_full, v_empty, lse2, delta, scale, last, key,
    D: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dQ of block j - 1, dS of block j, whose first key is `key`."""
    dqt = warpgroup_mma(ds, k_s.index((j - 1) % STAGES), dq, is_async=True)
    st = dq_start(j, q_h, k_s, k_full)
    dq = warpgroup_mma_wait(1, deps=(dqt,))
    mbarrier.arrive(k_empty.index((j - 1) % STAGES), count=1)
    return dq_rest(j, st, do_h, v_s, v_full, v_empty, lse2, delta, scale, last, key, D, MASKED), dq


@gluon.jit
def dq_loop(
    q_s, do_s, k_s, v_s, resident, k_full, k_empty, v_full, v_empty, lse2_p, delta_p, dqd, scale, index, start,
    workspace, offset, Lk, n, masked, FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    PEELED: gl.constexpr, ROLLED: gl.constexpr,
):  # fmt: skip
    """A consumer: dQ of rows FROM … FROM + 63 of the tile. Row i of the sequence stands on key i + offset."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q_h = q_s.slice(FROM, 64)
    do_h = do_s.slice(FROM, 64)
    row = start + FROM + gl.arange(0, 64, gl.SliceLayout(1, L))
    lse2 = gl.load(lse2_p + workspace + row)
    delta = gl.load(delta_p + workspace + row)
    last = row + offset if CAUSAL else row * 0 + (Lk - 1)
    dq = gl.zeros([64, D], gl.float32, ACC)
    key = (n - masked) * BLOCK
    mbarrier.wait(resident, 0)
    st = dq_start(0, q_h, k_s, k_full)
    ds = dq_rest(0, st, do_h, v_s, v_full, v_empty, lse2, delta, scale, last, key, D, PEELED > 0)
    for j in gl.static_range(1, PEELED):
        ds, dq = dq_step(
            j, ds, dq, q_h, do_h, k_s, v_s, k_full, k_empty, v_full, v_empty, lse2, delta, scale, last,
            key + j * BLOCK, D, True,
        )  # fmt: skip
    begin = max(PEELED, 1)
    if ROLLED:
        for j in range(begin, masked):
            ds, dq = dq_step(
                j, ds, dq, q_h, do_h, k_s, v_s, k_full, k_empty, v_full, v_empty, lse2, delta, scale, last,
                key + j * BLOCK, D, True,
            )  # fmt: skip
        begin = gl.maximum(begin, masked)
    for j in range(begin, n):
        ds, dq = dq_step(
            j, ds, dq, q_h, do_h, k_s, v_s, k_full, k_empty, v_full, v_empty, lse2, delta, scale, last, 0, D, False
        )
    dq = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, k_s.index((n - 1) % STAGES), dq, is_async=True),))
    q_h.store((dq * (scale * LN2)).to(q_s.dtype))
    fence_async_shared()
    tma_store(dqd, [index, start + FROM, 0], q_h)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def wide_dq_kernel(
    qd, dod, kd, vd, dqd, lse2, delta, scale, heads, group, Lq, Lk,
    D: gl.constexpr, CAUSAL: gl.constexpr, PEELED: gl.constexpr, ROLLED: gl.constexpr,
):  # fmt: skip
    """dQ of 128 rows of one query head. The grid: see place.

    PEELED: how many blocks at the end may hold hidden pairs; ROLLED: or one more.
    """
    TILE: gl.constexpr = 128
    tile, index = place()
    if CAUSAL:
        tile = gl.num_programs(1) - 1 - tile  # the longest first
    start = tile * TILE
    n = (Lk + BLOCK - 1) // BLOCK
    masked = gl.maximum(PEELED, 1)
    if CAUSAL:
        # A tile without keys streams blocks all the same, all of them hidden, and stores zeros.
        n = gl.maximum((gl.minimum(start + TILE + Lk - Lq, Lk) + BLOCK - 1) // BLOCK, PEELED)
        if ROLLED:
            masked = gl.maximum(n - gl.maximum(start + Lk - Lq + 1, 0) // BLOCK, PEELED)
    T: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], qd.dtype)
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], qd.dtype)
    q_s = gl.allocate_shared_memory(qd.dtype, [TILE, D], T)
    do_s = gl.allocate_shared_memory(qd.dtype, [TILE, D], T)
    k_s = gl.allocate_shared_memory(qd.dtype, [STAGES, BLOCK, D], KV)
    v_s = gl.allocate_shared_memory(qd.dtype, [1, BLOCK, D], KV)
    resident = barriers(1, 1).index(0)
    k_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_full = barriers(1, 1).index(0)
    v_empty = barriers(1, 2).index(0)
    fence_async_shared()
    workspace = index * (((Lq + ROWS - 1) // ROWS + 1) * ROWS)
    gl.warp_specialize([
        (dq_loop, (
            q_s, do_s, k_s, v_s, resident, k_full, k_empty, v_full, v_empty, lse2, delta, dqd, scale * LOG2E, index,
            start, workspace, Lk - Lq, Lk, n, masked, 0, D, CAUSAL, PEELED, ROLLED,
        )),
        (dq_loop, (
            q_s, do_s, k_s, v_s, resident, k_full, k_empty, v_full, v_empty, lse2, delta, dqd, scale * LOG2E, index,
            start, workspace, Lk - Lq, Lk, n, masked, 64, D, CAUSAL, PEELED, ROLLED,
        )),
        (load_keys, (
            qd, dod, kd, vd, q_s, do_s, k_s, v_s, resident, k_full, k_empty, v_full, v_empty, index, heads, group,
            start, n, masked,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
