"""dQ of two passes, deterministic, without atomics, for every head dimension.

The two consumer warp groups have 64 rows each of one query head, share nothing but the ring of keys that a producer
warp loads, and march on at their own pace. A step, for a block j of keys:

    dQ += dS(j-1) K(j-1)         started; its operand is all that was carried over
    S = Q K(j)^T                 started; wait for dQ, release K(j-1)
    dP = dO V(j)^T               started; wait for S
    P = exp2(S scale - lse2)     while dP is formed; wait for dP
    dS = P o (dP - delta)        release V(j)

No product is in flight across the edge of the loop. K is needed a step longer than V: where memory is short (D = 256),
V has one slot and barriers of its own. Blocks that a mask may touch, the last of the keys, come first.

dQ, S, dP: float32. dS is rounded to the input dtype for its product; dQ is rounded once.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against these types.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_stream import STAGES, barriers
from .backward_tile import LN2, LOG2E, ROWS, place
from .gluon_compat import aggregate, tma_load, tma_store
from .wgmma import as_operand, result_layout, start_product

TILE_ROWS = gl.constexpr(128)
"""Rows of a CTA."""


@aggregate
class Shared:
    """What the roles of a CTA share: q, do (TILE_ROWS, D), which `resident` says are there, and the ring of keys.

    The ring: k (STAGES, BLOCK, D), full and empty (STAGES, 1), v (v_slots, BLOCK, D). With v_slots = STAGES, K and V of
    a block share barriers; with v_slots = 1, V has v_full and v_empty (1,).
    """

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    resident: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    v_slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, resident, full, empty, v_full, v_empty, v_slots):
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.resident = resident
        self.full = full
        self.empty = empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.v_slots = gl.constexpr(v_slots)

    @gluon.jit
    def fill(self, kd, vd, at, j):
        """Producer: block j, from the coordinates `at`."""
        s = j % STAGES
        mbarrier.wait(self.empty.index(s), (j // STAGES) & 1 ^ 1)
        full = self.full.index(s)
        if self.v_slots == STAGES:
            mbarrier.expect(full, kd.block_type.nbytes + vd.block_type.nbytes)
            tma_load(kd, at, full, self.k.index(s))
            tma_load(vd, at, full, self.v.index(s))
        else:
            mbarrier.expect(full, kd.block_type.nbytes)
            tma_load(kd, at, full, self.k.index(s))
            mbarrier.wait(self.v_empty, j & 1 ^ 1)
            mbarrier.expect(self.v_full, vd.block_type.nbytes)
            tma_load(vd, at, self.v_full, self.v.index(0))

    @gluon.jit
    def take_k(self, j):
        """Consumer: K of block j, (BLOCK, D)."""
        mbarrier.wait(self.full.index(j % STAGES), (j // STAGES) & 1)
        return self.k.index(j % STAGES)

    @gluon.jit
    def release_k(self, j):
        """Consumer: K of block j has been read, and V before it."""
        mbarrier.arrive(self.empty.index(j % STAGES), count=1)

    @gluon.jit
    def take_v(self, j):
        """Consumer: V of block j, (BLOCK, D), whose K has been taken."""
        if self.v_slots == STAGES:
            v = self.v.index(j % STAGES)
        else:
            mbarrier.wait(self.v_full, j & 1)
            # Slot 0. If the compiler knew, it would keep 16 addresses of V in registers that it does not have.
            v = self.v.index(j >> 30)
        return v

    @gluon.jit
    def release_v(self, j):
        """Consumer: V of block j has been read."""
        if self.v_slots != STAGES:
            mbarrier.arrive(self.v_empty, count=1)


@gluon.jit
def share(dtype: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, V_SLOTS: gl.constexpr):
    """Allocate what the roles share."""
    ROWS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_ROWS, D], dtype)
    KEYS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dtype)
    q = gl.allocate_shared_memory(dtype, [TILE_ROWS, D], ROWS_LAYOUT)
    do = gl.allocate_shared_memory(dtype, [TILE_ROWS, D], ROWS_LAYOUT)
    k = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], KEYS_LAYOUT)
    v = gl.allocate_shared_memory(dtype, [V_SLOTS, BLOCK, D], KEYS_LAYOUT)
    resident = barriers(1, 1).index(0)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    v_full = full
    v_empty = empty
    if V_SLOTS == 1:
        v_full = barriers(1, 1).index(0)
        v_empty = barriers(1, 2).index(0)
    return Shared(q, do, k, v, resident, full, empty, v_full, v_empty, V_SLOTS)


@aggregate
class Tile:
    """The rows that a CTA owns, from row `start` of query head `index` of the batch, and the keys that they see.

    scale: of Q K^T, times log2(e). workspace: where the head begins in lse2 and delta. Row i stands on key i + offset,
    and there are Lk keys. n: blocks of keys that the rows meet; the last `masked` may hold hidden pairs.
    """

    scale: gl.tensor
    index: gl.tensor
    start: gl.tensor
    workspace: gl.tensor
    offset: gl.tensor
    Lk: gl.tensor
    n: gl.tensor
    masked: gl.tensor
    causal: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scale, index, start, workspace, offset, Lk, n, masked, causal):
        self.scale = scale
        self.index = index
        self.start = start
        self.workspace = workspace
        self.offset = offset
        self.Lk = Lk
        self.n = n
        self.masked = masked
        self.causal = gl.constexpr(causal)


@gluon.jit
def load_keys(qd, dod, kd, vd, shared, tile, heads, group):
    """The producer: Q and dO of the tile, then its blocks of keys, the last `masked` first."""
    BLOCK: gl.constexpr = shared.k.shape[1]
    batch = tile.index // heads
    head = tile.index % heads
    kv_head = head // group
    mbarrier.expect(shared.resident, qd.block_type.nbytes + dod.block_type.nbytes)
    tma_load(qd, [batch, head, tile.start, 0], shared.resident, shared.q)
    tma_load(dod, [batch, head, tile.start, 0], shared.resident, shared.do)
    for j in range(tile.n):
        block = j + tile.n - tile.masked
        block = gl.where(block >= tile.n, block - tile.n, block)
        shared.fill(kd, vd, [batch, kv_head, block * BLOCK, 0], j)


@aggregate
class Half:
    """A consumer's half of the tile: q, do (64, D), lse2, delta (64,); last (64,): the last key that a row sees."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse2: gl.tensor
    delta: gl.tensor
    last: gl.tensor
    scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, do, lse2, delta, last, scale):
        self.q = q
        self.do = do
        self.lse2 = lse2
        self.delta = delta
        self.last = last
        self.scale = scale


@gluon.jit
def start_scores(j, half, shared):
    """Wait for K of block j and start S = Q K^T (64, BLOCK)."""
    return start_product(half.q, shared.take_k(j).permute((1, 0)))


@gluon.jit
def grad_scores(j, key, st, half, shared, MASKED: gl.constexpr):
    """From the scores of block j in flight, whose first key is `key`, to dS (64, BLOCK), as an operand."""
    BLOCK: gl.constexpr = shared.k.shape[1]
    dpt = start_product(half.do, shared.take_v(j).permute((1, 0)))
    x = warpgroup_mma_wait(1, deps=(st,)) * half.scale - half.lse2[:, None]
    if MASKED:
        keys = gl.arange(0, BLOCK, gl.SliceLayout(0, result_layout(BLOCK)))[None, :] + key
        x = gl.where(keys <= half.last[:, None], x, -float("inf"))
    p = gl.exp2(x)
    dp = warpgroup_mma_wait(0, deps=(dpt,))
    shared.release_v(j)
    return as_operand((p * (dp - half.delta[:, None])).to(shared.v.dtype), half.q.shape[1])


@gluon.jit
def step(j, key, ds, dq, half, shared, MASKED: gl.constexpr):
    """dQ of block j - 1, dS of block j, whose first key is `key`."""
    dqt = warpgroup_mma(ds, shared.k.index((j - 1) % STAGES), dq, is_async=True)
    st = start_scores(j, half, shared)
    dq = warpgroup_mma_wait(1, deps=(dqt,))
    shared.release_k(j - 1)
    return grad_scores(j, key, st, half, shared, MASKED), dq


@gluon.jit
def consumer(
    shared, lse2_p, delta_p, dqd, tile, OFFSET: gl.constexpr, PEELED: gl.constexpr, ROLLED: gl.constexpr
):  # fmt: skip
    """dQ of rows OFFSET … OFFSET + 63 of the tile. PEELED, ROLLED: see dq_kernel."""
    BLOCK: gl.constexpr = shared.k.shape[1]
    D: gl.constexpr = shared.k.shape[2]
    row = tile.start + OFFSET + gl.arange(0, 64, gl.SliceLayout(1, result_layout(BLOCK)))
    lse2 = gl.load(lse2_p + tile.workspace + row)
    delta = gl.load(delta_p + tile.workspace + row)
    last = row + tile.offset if tile.causal else row * 0 + (tile.Lk - 1)
    half = Half(shared.q.slice(OFFSET, 64), shared.do.slice(OFFSET, 64), lse2, delta, last, tile.scale)
    dq = gl.zeros([64, D], gl.float32, result_layout(D))
    key = (tile.n - tile.masked) * BLOCK
    mbarrier.wait(shared.resident, 0)
    st = start_scores(0, half, shared)
    ds = grad_scores(0, key, st, half, shared, PEELED > 0)
    for j in gl.static_range(1, PEELED):
        ds, dq = step(j, key + j * BLOCK, ds, dq, half, shared, True)
    begin = max(PEELED, 1)
    if ROLLED:
        for j in range(begin, tile.masked):
            ds, dq = step(j, key + j * BLOCK, ds, dq, half, shared, True)
        # The same number either way, and the machine code that was measured.
        begin = gl.maximum(begin, tile.masked) if PEELED > 1 else tile.masked
    for j in range(begin, tile.n):
        ds, dq = step(j, 0, ds, dq, half, shared, False)
    last_k = shared.k.index((tile.n - 1) % STAGES)
    dq = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, last_k, dq, is_async=True),))
    half.q.store((dq * (tile.scale * LN2)).to(half.q.dtype))
    fence_async_shared()
    tma_store(dqd, [tile.index, tile.start + OFFSET, 0], half.q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def dq_kernel(
    qd, dod, kd, vd, dqd, lse2, delta, scale, heads, group, Lq, Lk,
    D: gl.constexpr, BLOCK: gl.constexpr, V_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, PEELED: gl.constexpr, ROLLED: gl.constexpr,
):  # fmt: skip
    """dQ of TILE_ROWS rows of one query head. The grid: see place. BLOCK: keys that are streamed at a time.

    V_SLOTS: 1, or STAGES as K has. PEELED: how many blocks at the end may hold hidden pairs; ROLLED: or one more.
    """
    number, index = place()
    if CAUSAL:
        number = gl.num_programs(1) - 1 - number  # the longest first
    start = number * TILE_ROWS
    n = (Lk + BLOCK - 1) // BLOCK
    masked = gl.maximum(PEELED, 1)
    if CAUSAL:
        # A tile without keys streams blocks all the same, all of them hidden, and stores zeros.
        n = gl.maximum((gl.minimum(start + TILE_ROWS + Lk - Lq, Lk) + BLOCK - 1) // BLOCK, PEELED)
        if ROLLED:
            masked = gl.maximum(n - gl.maximum(start + Lk - Lq + 1, 0) // BLOCK, PEELED)
    shared = share(qd.dtype, D, BLOCK, V_SLOTS)
    fence_async_shared()
    workspace = index * (((Lq + ROWS - 1) // ROWS + 1) * ROWS)
    tile = Tile(scale * LOG2E, index, start, workspace, Lk - Lq, Lk, n, masked, CAUSAL)
    gl.warp_specialize([
        (consumer, (shared, lse2, delta, dqd, tile, 0, PEELED, ROLLED)),
        (consumer, (shared, lse2, delta, dqd, tile, 64, PEELED, ROLLED)),
        (load_keys, (qd, dod, kd, vd, shared, tile, heads, group)),
    ], [4, 1], [240, 24])  # fmt: skip
