"""The deterministic backward in two passes, without atomics: dK and dV, then dQ. Seven products for one pass's five.

Either kernel has two consumer warp groups of 64 keys (or rows) each, which share nothing but the stream that a producer
warp loads, and march on at their own pace. A step of dK, dV, for a block t of rows:

    dK += dS^T(t-1) Q(t-1)         started; its operand is all that was carried over
    S^T = K Q(t)^T                 started; wait for dK, release slot t-1
    dP^T = V dO(t)^T               started; wait for S
    P^T = exp2(S^T scale - lse2)   while dP is formed
    dV += P^T dO(t)                started; wait for dP
    dS^T = P^T o (dP^T - delta)    while dV is formed; wait for dV

and of dQ, for a block of keys, the same with S, dP and one product dQ += dS K. No product is in flight across the edge
of the loop: ptxas answers that by running all of them one after the other.

Grouped heads: the group's rows follow each other in one stream, and dK and dV are summed in their accumulators.

dK, dV, dQ, S, dP: float32. P and dS are rounded to the input dtype for their products; each gradient is rounded once.
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
from .gluon_compat import tma_load, tma_store


@gluon.jit
def dkv_rest(
    t, st, dv, v_h, stream, scale, diagonal, keys,
    FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """From the scores of block t in flight to dS^T, as an operand, and dV."""
    dtype: gl.constexpr = v_h.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    s = t % STAGES
    dpt = start_dp(t, v_h, stream)
    lse2 = stream.lse2.index(s).load(gl.SliceLayout(0, L))
    x = warpgroup_mma_wait(1, deps=(st,)) * scale - lse2[None, :]
    if MASKED:
        x = hide(x, diagonal, keys, FROM, CAUSAL)
    p = gl.exp2(x)
    dvt = warpgroup_mma(gl.convert_layout(p.to(dtype), A), stream.do.index(s), dv, is_async=True)
    delta = stream.delta.index(s).load(gl.SliceLayout(0, L))
    dp = warpgroup_mma_wait(1, deps=(dpt,))
    ds = (p * (dp - delta[None, :])).to(dtype)
    return gl.convert_layout(ds, A), warpgroup_mma_wait(0, deps=(dvt,))


@gluon.jit
def dkv_step(
    t, ds, dk, dv, k_h, v_h, stream, scale, diagonal, keys,
    FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dK of block t - 1, dS and dV of block t."""
    dkt = warpgroup_mma(ds, stream.q.index((t - 1) % STAGES), dk, is_async=True)
    st = start_scores(t, k_h, stream)
    dk = warpgroup_mma_wait(1, deps=(dkt,))
    stream.release(t - 1)
    ds, dv = dkv_rest(t, st, dv, v_h, stream, scale, diagonal, keys, FROM, D, CAUSAL, MASKED)
    return ds, dk, dv


@gluon.jit
def dkv_head(
    t, begin, ds, dk, dv, k_h, v_h, stream, scale, diagonal, keys, n, masked,
    FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, ROLLED: gl.constexpr,
):  # fmt: skip
    """The row blocks begin … n - 1 of a head whose block 0 is block t of the stream."""
    if ROLLED:
        for j in range(begin, masked):
            ds, dk, dv = dkv_step(
                t + j, ds, dk, dv, k_h, v_h, stream, scale, diagonal + j * ROWS, keys, FROM, D, CAUSAL, True
            )
        begin = gl.maximum(begin, masked)
    for j in range(begin, n):
        ds, dk, dv = dkv_step(t + j, ds, dk, dv, k_h, v_h, stream, scale, 0, keys, FROM, D, CAUSAL, False)
    return ds, dk, dv


@gluon.jit
def dkv_loop(
    k_s, v_s, stream, resident, dkd, dvd, scale, index, start, diagonal, keys, n, masked, group,
    FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    PEELED: gl.constexpr, ROLLED: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """A consumer: dK and dV of keys FROM … FROM + 63 of the tile. diagonal: the key that row block 0 stands on."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k_h = k_s.slice(FROM, 64)
    v_h = v_s.slice(FROM, 64)
    dk = gl.zeros([64, D], gl.float32, L)
    dv = gl.zeros([64, D], gl.float32, L)
    mbarrier.wait(resident, 0)
    st = start_scores(0, k_h, stream)
    ds, dv = dkv_rest(0, st, dv, v_h, stream, scale, diagonal, keys, FROM, D, CAUSAL, PEELED > 0 or ROLLED)
    for j in gl.static_range(1, PEELED):
        ds, dk, dv = dkv_step(j, ds, dk, dv, k_h, v_h, stream, scale, diagonal + j * ROWS, keys, FROM, D, CAUSAL, True)
    BEGIN: gl.constexpr = max(PEELED, 1)
    if GROUPED:
        for member in range(group):
            begin = gl.where(member == 0, BEGIN, 0)
            ds, dk, dv = dkv_head(
                member * n,
                begin,
                ds,
                dk,
                dv,
                k_h,
                v_h,
                stream,
                scale,
                diagonal,
                keys,
                n,
                masked,
                FROM,
                D,
                CAUSAL,
                ROLLED,
            )
        last = group * n - 1
    else:
        ds, dk, dv = dkv_head(
            0, BEGIN, ds, dk, dv, k_h, v_h, stream, scale, diagonal, keys, n, masked, FROM, D, CAUSAL, ROLLED
        )
        last = n - 1
    dk = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, stream.q.index(last % STAGES), dk, is_async=True),))
    k_h.store((dk * (scale * LN2)).to(k_s.dtype))
    v_h.store(dv.to(k_s.dtype))
    fence_async_shared()
    tma_store(dkd, [index, start + FROM, 0], k_h)
    tma_store(dvd, [index, start + FROM, 0], v_h)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "group", "Lq", "Lk"])
def dkv_kernel(
    qd, dod, kd, vd, ld, dd, dkd, dvd, scale, kv_heads, group, Lq, Lk,
    D: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr,
    PEELED: gl.constexpr, ROLLED: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """dK and dV of KEYS keys of one kv head. The grid: see place."""
    blocks = (Lq + ROWS - 1) // ROWS + 1
    tile, index = place()
    start = tile * KEYS
    members = group if GROUPED else 1
    first, n, masked = rows_of(start, Lq, Lk, KEYS, CAUSAL)
    n = gl.maximum(n, PEELED)
    masked = gl.minimum(masked, n)
    diagonal = first * ROWS + Lk - Lq - start
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], kd.dtype)
    k_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], KV)
    v_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], KV)
    stream = open_stream(qd, ld, D)
    resident = barriers(1, 1).index(0)
    fence_async_shared()
    gl.warp_specialize([
        (dkv_loop, (
            k_s, v_s, stream, resident, dkd, dvd, scale * LOG2E, index, start, diagonal, Lk - start, n, masked,
            group, 0, D, CAUSAL, PEELED, ROLLED, GROUPED,
        )),
        (dkv_loop, (
            k_s, v_s, stream, resident, dkd, dvd, scale * LOG2E, index, start, diagonal, Lk - start, n, masked,
            group, 64, D, CAUSAL, PEELED, ROLLED, GROUPED,
        )),
        (load_stream, (
            qd, dod, kd, vd, ld, dd, stream, k_s, v_s, resident, index, kv_heads, group, members, blocks, start,
            first, n,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def load_keys(
    qd, dod, kd, vd, q_s, do_s, k_s, v_s, resident, full, empty, index, heads, group, start, n, masked,
    BLOCK: gl.constexpr,
):  # fmt: skip
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
        mbarrier.wait(empty.index(s), (j // STAGES) & 1 ^ 1)
        mbarrier.expect(full.index(s), kd.block_type.nbytes + vd.block_type.nbytes)
        tma_load(kd, at, full.index(s), k_s.index(s))
        tma_load(vd, at, full.index(s), v_s.index(s))


@gluon.jit
def dq_start(j, q_h, k_s, full, BLOCK: gl.constexpr):
    """Wait for block j of keys and start S = Q K^T (64, BLOCK)."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    mbarrier.wait(full.index(j % STAGES), (j // STAGES) & 1)
    k = k_s.index(j % STAGES).permute((1, 0))
    return warpgroup_mma(q_h, k, gl.zeros([64, BLOCK], gl.float32, L), use_acc=False, is_async=True)


@gluon.jit
def dq_rest(
    j, st, do_h, v_s, lse2, delta, scale, last, key,
    BLOCK: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """From the scores of block j in flight to dS, as an operand. last (64,): the last key that a row sees."""
    dtype: gl.constexpr = v_s.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    v = v_s.index(j % STAGES).permute((1, 0))
    dpt = warpgroup_mma(do_h, v, gl.zeros([64, BLOCK], gl.float32, L), use_acc=False, is_async=True)
    x = warpgroup_mma_wait(1, deps=(st,)) * scale - lse2[:, None]
    if MASKED:
        x = gl.where(gl.arange(0, BLOCK, gl.SliceLayout(0, L))[None, :] + key <= last[:, None], x, -float("inf"))
    p = gl.exp2(x)
    ds = (p * (warpgroup_mma_wait(0, deps=(dpt,)) - delta[:, None])).to(dtype)
    return gl.convert_layout(ds, A)


@gluon.jit
def dq_step(
    j, ds, dq, q_h, do_h, k_s, v_s, lse2, delta, full, empty, scale, last, key,
    BLOCK: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dQ of block j - 1, dS of block j, whose first key is `key`."""
    dqt = warpgroup_mma(ds, k_s.index((j - 1) % STAGES), dq, is_async=True)
    st = dq_start(j, q_h, k_s, full, BLOCK)
    dq = warpgroup_mma_wait(1, deps=(dqt,))
    mbarrier.arrive(empty.index((j - 1) % STAGES), count=1)
    return dq_rest(j, st, do_h, v_s, lse2, delta, scale, last, key, BLOCK, D, CAUSAL, MASKED), dq


@gluon.jit
def dq_loop(
    q_s, do_s, k_s, v_s, resident, full, empty, lse2_p, delta_p, dqd, scale, index, start, workspace, offset, Lk, n,
    masked, FROM: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr,
    CAUSAL: gl.constexpr, MASKS: gl.constexpr, ROLLED: gl.constexpr,
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
    st = dq_start(0, q_h, k_s, full, BLOCK)
    ds = dq_rest(0, st, do_h, v_s, lse2, delta, scale, last, key, BLOCK, D, CAUSAL, MASKS)
    begin = 1
    if ROLLED:
        for j in range(1, masked):
            ds, dq = dq_step(
                j, ds, dq, q_h, do_h, k_s, v_s, lse2, delta, full, empty, scale, last, key + j * BLOCK,
                BLOCK, D, CAUSAL, True,
            )  # fmt: skip
        begin = masked
    for j in range(begin, n):
        ds, dq = dq_step(
            j, ds, dq, q_h, do_h, k_s, v_s, lse2, delta, full, empty, scale, last, 0, BLOCK, D, CAUSAL, False
        )
    dq = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, k_s.index((n - 1) % STAGES), dq, is_async=True),))
    q_h.store((dq * (scale * LN2)).to(q_s.dtype))
    fence_async_shared()
    tma_store(dqd, [index, start + FROM, 0], q_h)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def dq_kernel(
    qd, dod, kd, vd, dqd, lse2, delta, scale, heads, group, Lq, Lk,
    D: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, MASKS: gl.constexpr, ROLLED: gl.constexpr,
):  # fmt: skip
    """dQ of 128 rows of one query head. The grid: see place. BLOCK: keys that are streamed at a time.

    MASKS: the last block may hold hidden pairs; ROLLED: so may the one before.
    """
    TILE: gl.constexpr = 128
    tile, index = place()
    if CAUSAL:
        tile = gl.num_programs(1) - 1 - tile  # the longest first
    start = tile * TILE
    n = (Lk + BLOCK - 1) // BLOCK
    masked = 1
    if CAUSAL:
        # A tile without keys streams one block, all of it hidden, and stores zeros.
        n = gl.maximum((gl.minimum(start + TILE + Lk - Lq, Lk) + BLOCK - 1) // BLOCK, 1)
        if ROLLED:
            masked = gl.maximum(n - gl.maximum(start + Lk - Lq + 1, 0) // BLOCK, 1)
    T: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], qd.dtype)
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], qd.dtype)
    q_s = gl.allocate_shared_memory(qd.dtype, [TILE, D], T)
    do_s = gl.allocate_shared_memory(qd.dtype, [TILE, D], T)
    k_s = gl.allocate_shared_memory(qd.dtype, [STAGES, BLOCK, D], KV)
    v_s = gl.allocate_shared_memory(qd.dtype, [STAGES, BLOCK, D], KV)
    resident = barriers(1, 1).index(0)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    fence_async_shared()
    workspace = index * (((Lq + ROWS - 1) // ROWS + 1) * ROWS)
    gl.warp_specialize([
        (dq_loop, (
            q_s, do_s, k_s, v_s, resident, full, empty, lse2, delta, dqd, scale * LOG2E, index, start, workspace,
            Lk - Lq, Lk, n, masked, 0, BLOCK, D, CAUSAL, MASKS, ROLLED,
        )),
        (dq_loop, (
            q_s, do_s, k_s, v_s, resident, full, empty, lse2, delta, dqd, scale * LOG2E, index, start, workspace,
            Lk - Lq, Lk, n, masked, 64, BLOCK, D, CAUSAL, MASKS, ROLLED,
        )),
        (load_keys, (
            qd, dod, kd, vd, q_s, do_s, k_s, v_s, resident, full, empty, index, heads, group, start, n, masked, BLOCK,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
