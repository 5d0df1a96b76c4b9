"""The backward in one pass of five products: dK and dV of a tile of keys stay in registers, dQ is added up in memory.

A CTA owns 128 keys, 64 for each of two consumer warp groups, and streams row blocks past (backward_stream.py). Scores
are transposed, so that P^T and dS^T feed dV and dK from registers. dQ = dS K sums over keys: dS of both groups meets in
shared memory, and the product goes to float32 sums in global memory by a TMA that adds. The order in which CTAs add
differs from run to run, and with it the last bits of dQ; dK and dV are always the same.

A step, for block t of the stream:

    dK += dS^T(t-1) Q(t-1)         started; its operand is carried in registers
    dQ(t-2) = dS(t-2) K            started, once both groups have stored dS(t-2)
    S^T = K Q(t)^T                 started; wait for dK and dQ, release slot t-1
    add dQ(t-2) to its rows
    dP^T = V dO(t)^T               started; wait for S
    P^T = exp2(S^T scale - lse2)   while dP is formed
    dV += P^T dO(t)                started; wait for dP
    dS^T = P^T o (dP^T - delta)    while dV is formed; to shared memory; wait for dV

So a group waits for the other one only if it is a whole block ahead: dS has DS_SLOTS = 4 buffers, each with a barrier.
D = 128: each group forms 64 columns of every dQ block. D = 64: the groups take turns, since 32 columns would cut the
128-byte swizzle of K.

Accumulators dK, dV, dQ, S, dP: float32. P and dS are rounded to the input dtype for their products.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
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
from .gluon_compat import aggregate, tma_store

DS_SLOTS = gl.constexpr(4)
WORDS = gl.constexpr(4096)
"""float32 sums of dQ that a group adds at a time: 64 rows by 64 columns."""


@builtin
def tma_add(descriptor, coordinates, tile, _semantic=None):
    """Add a tile in shared memory to global memory. (tma.async_atomic_add in Triton 3.8 and later.)"""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@aggregate
class Exchange:
    """dS of both groups: tiles (DS_SLOTS, 128, ROWS) and their barriers; and where dQ goes.

    out: this group's buffer (16, 256). row: where block 0 of the stream begins in the workspace, of which a head has
    `rows`. n: row blocks of a head.
    """

    ds: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    row: gl.tensor
    rows: gl.tensor
    n: gl.tensor

    @gluon.constexpr_function
    def __init__(self, ds, full, out, row, rows, n):
        self.ds = ds
        self.full = full
        self.out = out
        self.row = row
        self.rows = rows
        self.n = n


@gluon.jit
def start_dq(t, exchange, k_c):
    """dQ of block t in the columns of k_c: (ROWS, 64)."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    s = t % DS_SLOTS
    mbarrier.wait(exchange.full.index(s), (t // DS_SLOTS) & 1)
    ds = exchange.ds.index(s).permute((1, 0))
    return warpgroup_mma(ds, k_c, gl.zeros([ROWS, 64], gl.float32, L), use_acc=False, is_async=True)


@gluon.jit
def add_dq(dq, sumd, exchange, member, j, PART: gl.constexpr, D: gl.constexpr, GROUPED: gl.constexpr):
    """Add dq (ROWS, 64) to the sums of row block j of a head; j < 0: of the head before it.

    In the order of registers: each thread holds 4 neighbours, each warp 128, so that no data moves between threads.
    finish_kernel undoes the order.
    """
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    flat = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([WORDS])
    flat = gl.convert_layout(flat, L, assert_trivial=True)
    row = exchange.row + j * ROWS
    if GROUPED:
        row += gl.where(j < 0, (member - 1) * exchange.rows + exchange.n * ROWS, member * exchange.rows)
    # The division keeps LLVM from making the result another variable of the loop, for which D = 64 has no register.
    to = row // ROWS * (D // 4) + PART * 16
    tma.store_wait(0)
    exchange.out.store(flat.reshape([16, 256]))
    fence_async_shared()
    tma_add(sumd, [to, 0], exchange.out)


@gluon.jit
def grad_scores(
    t, st, dpt, dv, stream, exchange, scale, diagonal, keys,
    FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """From the scores and dP of block t in flight to dS^T (in shared memory, and returned as an operand) and dV."""
    dtype: gl.constexpr = stream.do.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    s = t % STAGES
    lse2 = stream.lse2.index(s).load(gl.SliceLayout(0, L))
    x = warpgroup_mma_wait(1, deps=(st,)) * scale - lse2[None, :]
    if MASKED:
        x = hide(x, diagonal, keys, FROM, CAUSAL)
    p = gl.exp2(x)
    dvt = warpgroup_mma(gl.convert_layout(p.to(dtype), A), stream.do.index(s), dv, is_async=True)
    delta = stream.delta.index(s).load(gl.SliceLayout(0, L))
    dp = warpgroup_mma_wait(1, deps=(dpt,))
    ds = (p * (dp - delta[None, :])).to(dtype)
    exchange.ds.index(t % DS_SLOTS).slice(FROM, 64).store(ds)
    fence_async_shared()
    mbarrier.arrive(exchange.full.index(t % DS_SLOTS), count=1)
    return gl.convert_layout(ds, A), warpgroup_mma_wait(0, deps=(dvt,))


@gluon.jit
def step(
    t, member, j, ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale, diagonal, keys,
    FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    LATER: gl.constexpr, TURN: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """dQ of block t - 2 (if it is this group's TURN), dK of block t - 1, dS and dV of block t = member n + j.

    LATER: t > 1.
    """
    dkt = warpgroup_mma(ds, stream.q.index((t - 1) % STAGES), dk, is_async=True)
    if TURN:
        dqt = start_dq(t - 2, exchange, k_c)
        st = start_scores(t, k_h, stream)
        dk, dq = warpgroup_mma_wait(1, deps=(dkt, dqt))
        stream.release(t - 1)
        add_dq(dq, sumd, exchange, member, j - 2, FROM // 64 if D == 128 else 0, D, GROUPED)
    else:
        if LATER:  # All the same: a group that is never more than two blocks ahead needs no more than 4 slots.
            mbarrier.wait(exchange.full.index((t - 2) % DS_SLOTS), ((t - 2) // DS_SLOTS) & 1)
        st = start_scores(t, k_h, stream)
        dk = warpgroup_mma_wait(1, deps=(dkt,))
        stream.release(t - 1)
    dpt = start_dp(t, v_h, stream)
    ds, dv = grad_scores(t, st, dpt, dv, stream, exchange, scale, diagonal, keys, FROM, D, CAUSAL, MASKED)
    return ds, dk, dv


@gluon.jit
def steps(
    t, member, j, ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale, diagonal, keys,
    FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """D = 128: one step. D = 64: an even one, whose dQ the first group forms, and an odd one."""
    EVEN: gl.constexpr = D == 128 or FROM == 0
    ODD: gl.constexpr = FROM == 64
    ds, dk, dv = step(
        t, member, j, ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale, diagonal + j * ROWS, keys,
        FROM, D, CAUSAL, MASKED, True, EVEN, GROUPED,
    )  # fmt: skip
    if D == 64:
        ds, dk, dv = step(
            t + 1, member, j + 1, ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale,
            diagonal + (j + 1) * ROWS, keys, FROM, D, CAUSAL, MASKED, True, ODD, GROUPED,
        )  # fmt: skip
    return ds, dk, dv


@gluon.jit
def one_head(
    member, begin, ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale, diagonal, keys, masked,
    FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, ROLLED: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """The row blocks begin … n - 1 of one query head."""
    STEP: gl.constexpr = 128 // D
    t = member * exchange.n
    if ROLLED:
        for j in range(begin, masked, STEP):
            ds, dk, dv = steps(
                t + j, member, j, ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale, diagonal, keys,
                FROM, D, CAUSAL, True, GROUPED,
            )  # fmt: skip
        begin = gl.maximum(begin, masked)
    for j in range(begin, exchange.n, STEP):
        ds, dk, dv = steps(
            t + j, member, j, ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale, diagonal, keys,
            FROM, D, CAUSAL, False, GROUPED,
        )  # fmt: skip
    return ds, dk, dv


@gluon.jit
def mma_loop(
    k_s, v_s, ds_s, ds_full, dq_s, stream, resident, dkd, dvd, sumd, scale, index, start, diagonal, keys,
    row, rows, n, masked, group,
    FROM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    MASKS: gl.constexpr, ROLLED: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """A consumer: dK and dV of keys FROM … FROM + 63 of the tile, its share of dQ. diagonal: the key of row block 0."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    EVEN: gl.constexpr = D == 128 or FROM == 0
    ODD: gl.constexpr = D == 128 or FROM == 64
    PART: gl.constexpr = FROM // 64 if D == 128 else 0
    k_h = k_s.slice(FROM, 64)
    v_h = v_s.slice(FROM, 64)
    k_c = k_s.slice(FROM if D == 128 else 0, 64, 1)
    exchange = Exchange(ds_s, ds_full, dq_s.index(FROM // 64), row, rows, n)
    dk = gl.zeros([64, D], gl.float32, L)
    dv = gl.zeros([64, D], gl.float32, L)
    mbarrier.wait(resident, 0)
    st = start_scores(0, k_h, stream)
    dpt = start_dp(0, v_h, stream)
    ds, dv = grad_scores(0, st, dpt, dv, stream, exchange, scale, diagonal, keys, FROM, D, CAUSAL, MASKS)
    ds, dk, dv = step(
        1, 0, 1, ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale, diagonal + ROWS, keys,
        FROM, D, CAUSAL, MASKS, False, False, GROUPED,
    )  # fmt: skip
    end = n
    if GROUPED:
        for member in range(group):
            ds, dk, dv = one_head(
                member, gl.where(member == 0, 2, 0), ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale,
                diagonal, keys, masked, FROM, D, CAUSAL, ROLLED, True,
            )  # fmt: skip
        end = group * n
    else:
        ds, dk, dv = one_head(
            0, 2, ds, dk, dv, k_h, v_h, k_c, stream, exchange, sumd, scale,
            diagonal, keys, masked, FROM, D, CAUSAL, ROLLED, False,
        )  # fmt: skip
    # What is left: dK of the last block, dQ of the last two.
    member = (group - 1) if GROUPED else 0
    dkt = warpgroup_mma(ds, stream.q.index((end - 1) % STAGES), dk, is_async=True)
    if EVEN:
        dqt = start_dq(end - 2, exchange, k_c)
    v_h.store(dv.to(v_s.dtype))
    fence_async_shared()
    tma_store(dvd, [index, start + FROM, 0], v_h)
    if EVEN:
        dk, dq = warpgroup_mma_wait(0, deps=(dkt, dqt))
        add_dq(dq, sumd, exchange, member, n - 2, PART, D, GROUPED)
    else:
        dk = warpgroup_mma_wait(0, deps=(dkt,))
    if ODD:
        dq = warpgroup_mma_wait(0, deps=(start_dq(end - 1, exchange, k_c),))
        add_dq(dq, sumd, exchange, member, n - 1, PART, D, GROUPED)
    else:
        mbarrier.wait(exchange.full.index((end - 1) % DS_SLOTS), ((end - 1) // DS_SLOTS) & 1)
    # This slot is free: both groups have stored dS of the last block, so neither reads the one before any more.
    tile = stream.q.index(end % STAGES) if FROM == 0 else stream.do.index(end % STAGES)
    tile.store((dk * (scale * LN2)).to(k_s.dtype))
    fence_async_shared()
    tma_store(dkd, [index, start + FROM, 0], tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "group", "Lq", "Lk"])
def onepass_kernel(
    qd, dod, kd, vd, ld, dd, dkd, dvd, sumd, scale, kv_heads, group, Lq, Lk,
    D: gl.constexpr, CAUSAL: gl.constexpr, MASKS: gl.constexpr, ROLLED: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """dK, dV of 128 keys of one kv head, and their share of dQ of all rows that see them.

    The grid: see place. MASKS: the first two row blocks may hold
    hidden pairs; ROLLED: so may others.
    """
    KEYS: gl.constexpr = 128
    blocks = (Lq + ROWS - 1) // ROWS + 1
    tile, index = place()
    start = tile * KEYS
    first, n, masked = rows_of(start, Lq, Lk, KEYS, CAUSAL)
    # At least two blocks, and an even number where the groups take turns: the workspace has a block without rows.
    n = gl.maximum(n, 2)
    if D == 64:
        n = (n + 1) // 2 * 2
        masked = (masked + 1) // 2 * 2
    masked = gl.minimum(masked, n)
    diagonal = first * ROWS + Lk - Lq - start
    row = (index * group * blocks + first) * ROWS
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], kd.dtype)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], kd.dtype)
    stream = open_stream(qd, ld, D)
    k_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], KV)
    v_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], KV)
    ds_s = gl.allocate_shared_memory(kd.dtype, [DS_SLOTS, KEYS, ROWS], DS)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 16, 256], sumd.layout)
    resident = barriers(1, 1).index(0)
    ds_full = barriers(DS_SLOTS, 2)
    fence_async_shared()
    members = group if GROUPED else 1
    gl.warp_specialize([
        (mma_loop, (
            k_s, v_s, ds_s, ds_full, dq_s, stream, resident, dkd, dvd, sumd, scale * LOG2E, index, start, diagonal,
            Lk - start, row, blocks * ROWS, n, masked, group, 0, D, CAUSAL, MASKS, ROLLED, GROUPED,
        )),
        (mma_loop, (
            k_s, v_s, ds_s, ds_full, dq_s, stream, resident, dkd, dvd, sumd, scale * LOG2E, index, start, diagonal,
            Lk - start, row, blocks * ROWS, n, masked, group, 64, D, CAUSAL, MASKS, ROLLED, GROUPED,
        )),
        (load_stream, (
            qd, dod, kd, vd, ld, dd, stream, k_s, v_s, resident, index, kv_heads, group, members, blocks, start,
            first, n,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
