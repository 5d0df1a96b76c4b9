"""The backward in one pass of five products: dK and dV of a tile of keys stay in registers, dQ is added up in memory.

A CTA owns 128 keys, 64 for each of two consumer warp groups, and streams row blocks past (backward_stream.py). Scores
are transposed, so that P^T and dS^T feed dV and dK from registers. dQ = dS K sums over keys: dS of both meets in shared
memory, and the product goes to float32 sums in global memory by a TMA that adds. The order in which CTAs add
differs from run to run, and with it the last bits of dQ; dK and dV are always the same.

A step, for block t of the stream:

    dK += dS^T(t-1) Q(t-1)         started; its operand is carried in registers
    dQ(t-2) = dS(t-2) K            started, once both consumers have given dS(t-2)
    S^T = K Q(t)^T                 started; wait for dK and dQ, release slot t-1
    add dQ(t-2) to its rows
    dP^T = V dO(t)^T               started; wait for S
    P^T = exp2(S^T scale - lse2)   while dP is formed
    dV += P^T dO(t)                started; wait for dP
    dS^T = P^T o (dP^T - delta)    while dV is formed; to shared memory; wait for dV

So a consumer waits for the other only if it is a whole block ahead: dS has DS_SLOTS = 4 buffers, each with a barrier.
D = 128: each forms 64 columns of every block of dQ. D = 64: they take turns, since 32 columns would cut the 128-byte
swizzle of K.

Accumulators dK, dV, dQ, S, dP: float32. P and dS are rounded to the input dtype for their products.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against these types.
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
    STAGES,
    Half,
    barriers,
    grad_scores,
    load_stream,
    open_stream,
    start_dp,
    start_scores,
)
from .backward_tile import LN2, ROWS, Route, place, rows_of, tile_of
from .gluon_compat import aggregate, tma_store
from .wgmma import as_operand, flattened, result_layout, start_product

KEYS = gl.constexpr(128)
DS_SLOTS = gl.constexpr(4)


@builtin
def tma_add(descriptor, coordinates, tile, _semantic=None):
    """Add a tile in shared memory to global memory. (tma.async_atomic_add in Triton 3.8 and later.)"""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@aggregate
class Exchange:
    """dS of both consumers: ds (DS_SLOTS, KEYS, ROWS) and full (DS_SLOTS, 1). out (2, 16, 256): by which dQ leaves."""

    ds: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, ds, full, out):
        self.ds = ds
        self.full = full
        self.out = out

    @gluon.jit
    def give(self, t, ds, OFFSET: gl.constexpr):
        """dS of block t, (64, ROWS), of keys OFFSET … OFFSET + 63 of the tile."""
        self.ds.index(t % DS_SLOTS).slice(OFFSET, 64).store(ds)
        fence_async_shared()
        mbarrier.arrive(self.full.index(t % DS_SLOTS), count=1)

    @gluon.jit
    def wait(self, t):
        """Until both consumers have given dS of block t."""
        mbarrier.wait(self.full.index(t % DS_SLOTS), (t // DS_SLOTS) & 1)


@aggregate
class Share:
    """A consumer's share of dQ, dS K in the 64 columns of K, (KEYS, 64), that begin at 64 part: it leaves by way of out
    (16, 256) and is added to `sums`."""

    exchange: Exchange
    columns: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    sums: tma.tensor_descriptor
    part: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, exchange, columns, out, sums, part):
        self.exchange = exchange
        self.columns = columns
        self.out = out
        self.sums = sums
        self.part = gl.constexpr(part)

    @gluon.jit
    def start(self, t):
        """Start dQ of block t, once both consumers have given its dS: (ROWS, 64)."""
        self.exchange.wait(t)
        ds = self.exchange.ds.index(t % DS_SLOTS).permute((1, 0))
        return start_product(ds, self.columns)

    @gluon.jit
    def add(self, dq, member, j, half):
        """Add dq (ROWS, 64) to the sums of row block j of a head; j < 0: of the head before it.

        In the order of registers, which finish_kernel undoes.
        """
        tile = half.tile
        flat = flattened(dq)
        row = tile.row + j * ROWS
        if tile.grouped:
            row += gl.where(j < 0, (member - 1) * tile.rows + tile.n * ROWS, member * tile.rows)
        # The division keeps LLVM from making the result another variable of the loop, for which D = 64 has no register.
        to = row // ROWS * (half.k.shape[1] // 4) + self.part * 16
        tma.store_wait(0)
        self.out.store(flat.reshape([16, 256]))
        fence_async_shared()
        tma_add(self.sums, [to, 0], self.out)


@gluon.jit
def rest(t, diagonal, st, dpt, dv, half, exchange, MASKED: gl.constexpr):
    """From the scores and dP of block t in flight to dS^T (given to both consumers, and as an operand) and dV."""
    ds, dvt = grad_scores(t, diagonal, st, dpt, dv, half, MASKED)
    exchange.give(t, ds, half.offset)
    return as_operand(ds, half.k.shape[1]), warpgroup_mma_wait(0, deps=(dvt,))


@gluon.jit
def step(t, member, j, ds, dk, dv, half, share, MASKED: gl.constexpr, LATER: gl.constexpr, TURN: gl.constexpr):
    """dQ of block t - 2 (if it is this consumer's TURN), dK of block t - 1, dS and dV of block t = member n + j.

    LATER: t > 1.
    """
    diagonal = half.tile.diagonal + j * ROWS
    dkt = warpgroup_mma(ds, half.stream.q.index((t - 1) % STAGES), dk, is_async=True)
    if TURN:
        dqt = share.start(t - 2)
        st = start_scores(t, half.k, half.stream)
        dk, dq = warpgroup_mma_wait(1, deps=(dkt, dqt))
        half.stream.release(t - 1)
        share.add(dq, member, j - 2, half)
    else:
        if LATER:  # All the same: a consumer that is never more than two blocks ahead needs no more than 4 slots.
            share.exchange.wait(t - 2)
        st = start_scores(t, half.k, half.stream)
        dk = warpgroup_mma_wait(1, deps=(dkt,))
        half.stream.release(t - 1)
    dpt = start_dp(t, half.v, half.stream)
    ds, dv = rest(t, diagonal, st, dpt, dv, half, share.exchange, MASKED)
    return ds, dk, dv


@gluon.jit
def steps(t, member, j, ds, dk, dv, half, share, MASKED: gl.constexpr):
    """D = 128: one step. D = 64: an even one, whose dQ the first consumer forms, and an odd one."""
    D: gl.constexpr = half.k.shape[1]
    ds, dk, dv = step(t, member, j, ds, dk, dv, half, share, MASKED, True, D == 128 or half.offset == 0)
    if D == 64:
        ds, dk, dv = step(t + 1, member, j + 1, ds, dk, dv, half, share, MASKED, True, half.offset == 64)
    return ds, dk, dv


@gluon.jit
def one_head(member, begin, ds, dk, dv, half, share, ROLLED: gl.constexpr):
    """The row blocks begin … n - 1 of one query head."""
    STEP: gl.constexpr = 128 // half.k.shape[1]
    t = member * half.tile.n
    if ROLLED:
        for j in range(begin, half.tile.masked, STEP):
            ds, dk, dv = steps(t + j, member, j, ds, dk, dv, half, share, True)
        begin = gl.maximum(begin, half.tile.masked)
    for j in range(begin, half.tile.n, STEP):
        ds, dk, dv = steps(t + j, member, j, ds, dk, dv, half, share, False)
    return ds, dk, dv


@gluon.jit
def consumer(
    k_s, v_s, exchange, stream, resident, dkd, dvd, sums, tile,
    OFFSET: gl.constexpr, MASKS: gl.constexpr, ROLLED: gl.constexpr,
):  # fmt: skip
    """dK and dV of keys OFFSET … OFFSET + 63 of the tile, and a share of dQ. MASKS, ROLLED: see onepass_kernel."""
    D: gl.constexpr = k_s.shape[1]
    EVEN: gl.constexpr = D == 128 or OFFSET == 0
    ODD: gl.constexpr = D == 128 or OFFSET == 64
    COLUMN: gl.constexpr = OFFSET if D == 128 else 0
    k = k_s.slice(OFFSET, 64)
    v = v_s.slice(OFFSET, 64)
    half = Half(k, v, tile, stream, OFFSET)
    share = Share(exchange, k_s.slice(COLUMN, 64, 1), exchange.out.index(OFFSET // 64), sums, COLUMN // 64)
    dk = gl.zeros([64, D], gl.float32, result_layout(D))
    dv = gl.zeros([64, D], gl.float32, result_layout(D))
    mbarrier.wait(resident, 0)
    st = start_scores(0, k, stream)
    dpt = start_dp(0, v, stream)
    ds, dv = rest(0, tile.diagonal, st, dpt, dv, half, exchange, MASKS)
    ds, dk, dv = step(1, 0, 1, ds, dk, dv, half, share, MASKS, False, False)
    end = tile.n
    if tile.grouped:
        for member in range(tile.group):
            ds, dk, dv = one_head(member, gl.where(member == 0, 2, 0), ds, dk, dv, half, share, ROLLED)
        end = tile.group * tile.n
    else:
        ds, dk, dv = one_head(0, 2, ds, dk, dv, half, share, ROLLED)
    # What is left: dK of the last block, dQ of the last two.
    member = (tile.group - 1) if tile.grouped else 0
    dkt = warpgroup_mma(ds, stream.q.index((end - 1) % STAGES), dk, is_async=True)
    if EVEN:
        dqt = share.start(end - 2)
    v.store(dv.to(v.dtype))
    fence_async_shared()
    tma_store(dvd, [tile.index, tile.start + OFFSET, 0], v)
    if EVEN:
        dk, dq = warpgroup_mma_wait(0, deps=(dkt, dqt))
        share.add(dq, member, tile.n - 2, half)
    else:
        dk = warpgroup_mma_wait(0, deps=(dkt,))
    if ODD:
        dq = warpgroup_mma_wait(0, deps=(share.start(end - 1),))
        share.add(dq, member, tile.n - 1, half)
    else:
        exchange.wait(end - 1)
    # This slot is free: both consumers have given dS of the last block, so neither reads the one before any more.
    slot = stream.q.index(end % STAGES) if OFFSET == 0 else stream.do.index(end % STAGES)
    slot.store((dk * (tile.scale * LN2)).to(k.dtype))
    fence_async_shared()
    tma_store(dkd, [tile.index, tile.start + OFFSET, 0], slot)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "group", "Lq", "Lk"])
def onepass_kernel(
    qd, dod, kd, vd, ld, dd, dkd, dvd, sumd, scale, kv_heads, group, Lq, Lk,
    D: gl.constexpr, CAUSAL: gl.constexpr, MASKS: gl.constexpr, ROLLED: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """dK, dV of KEYS keys of one kv head, and their share of dQ of all rows that see them. The grid: see place.

    MASKS: the first two row blocks may hold hidden pairs; ROLLED: so may others.
    """
    blocks = (Lq + ROWS - 1) // ROWS + 1
    number, index = place()
    start = number * KEYS
    first, n, masked = rows_of(start, Lq, Lk, KEYS, CAUSAL)
    # At least two blocks, and an even number where the consumers take turns: the workspace has a block without rows.
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
    exchange = Exchange(ds_s, barriers(DS_SLOTS, 2), dq_s)
    fence_async_shared()
    members = group if GROUPED else 1
    route = Route(index, kv_heads, group, members, blocks, start, first, n)
    tile = tile_of(route, masked, diagonal, row, scale, Lk, CAUSAL, GROUPED)
    gl.warp_specialize([
        (consumer, (k_s, v_s, exchange, stream, resident, dkd, dvd, sumd, tile, 0, MASKS, ROLLED)),
        (consumer, (k_s, v_s, exchange, stream, resident, dkd, dvd, sumd, tile, 64, MASKS, ROLLED)),
        (load_stream, (qd, dod, kd, vd, ld, dd, stream, k_s, v_s, resident, route)),
    ], [4, 1], [240, 24])  # fmt: skip
