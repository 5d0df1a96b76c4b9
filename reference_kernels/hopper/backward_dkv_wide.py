"""dK and dV at head dimension 256, deterministic, without atomics.

dK and dV of 64 keys by 256 columns are 256 registers of every thread of a warp group, one more than there are. So the
two consumers of a CTA do not share keys but products, and what one needs of the other goes through shared memory:

    consumer 1    S^T = K Q^T        P^T = exp2(S^T scale - lse2)      dV += P^T dO
    consumer 2    dP^T = V dO^T      dS^T = P^T o (dP^T - delta)       dK += dS^T Q

P passes in float32, as it would in registers, so that dS is rounded once; in the order of registers, so that no data
moves between threads. Each product of block t that ends in an accumulator is started in step t + 1, so that no consumer
waits for one with nothing else to do, and none is in flight across the loop's edge.

Accumulators dK, dV, S, dP: float32. P and dS are rounded to the input dtype for their products.
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

from .backward_stream import (
    STAGES,
    barriers,
    load_stream,
    open_stream,
    probabilities,
    start_dp,
    start_scores,
)
from .backward_tile import LN2, ROWS, Route, place, rows_of, tile_of
from .gluon_compat import aggregate, tma_store
from .wgmma import as_operand, flattened, load_flattened, result_layout

KEYS = gl.constexpr(64)


@aggregate
class Handover:
    """P on its way from consumer 1 to 2: tiles (STAGES, 4096) float32, full and empty barriers (STAGES, 1)."""

    p: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, p, full, empty):
        self.p = p
        self.full = full
        self.empty = empty

    @gluon.jit
    def give(self, t, p):
        """P of block t, (KEYS, ROWS)."""
        s = t % STAGES
        flat = flattened(p)
        mbarrier.wait(self.empty.index(s), (t // STAGES) & 1 ^ 1)
        self.p.index(s).store(flat)
        mbarrier.arrive(self.full.index(s), count=1)

    @gluon.jit
    def take(self, t):
        """What was given for block t, (KEYS, ROWS)."""
        s = t % STAGES
        mbarrier.wait(self.full.index(s), (t // STAGES) & 1)
        p = load_flattened(self.p.index(s))
        mbarrier.arrive(self.empty.index(s), count=1)
        return p


@gluon.jit
def give_scores(t, diagonal, st, tile, stream, handover, D: gl.constexpr, MASKED: gl.constexpr):
    """From the scores of block t in flight, the last product, to P^T: handed over, and as an operand."""
    p = probabilities(t, diagonal, st, tile, stream, 0, MASKED, 0)
    handover.give(t, p)
    return as_operand(p.to(stream.q.dtype), D)


@gluon.jit
def dv_step(t, j, p, dv, k_s, tile, stream, handover, MASKED: gl.constexpr):
    """dV of block t - 1, P of block t, which is block j of its head."""
    diagonal = tile.diagonal + j * ROWS
    dvt = warpgroup_mma(p, stream.do.index((t - 1) % STAGES), dv, is_async=True)
    st = start_scores(t, k_s, stream)
    dv = warpgroup_mma_wait(1, deps=(dvt,))
    stream.release(t - 1)
    return give_scores(t, diagonal, st, tile, stream, handover, dv.shape[1], MASKED), dv


@gluon.jit
def dv_consumer(k_s, stream, handover, resident, dvd, tile, MASKS: gl.constexpr):
    """Consumer 1: P and dV. MASKS: the first `masked` row blocks of a head hold hidden pairs."""
    D: gl.constexpr = k_s.shape[1]
    dv = gl.zeros([KEYS, D], gl.float32, result_layout(D))
    mbarrier.wait(resident, 0)
    p = give_scores(0, tile.diagonal, start_scores(0, k_s, stream), tile, stream, handover, D, MASKS)
    members = tile.group if tile.grouped else 1
    for member in range(members):
        begin = gl.where(member == 0, 1, 0)
        if MASKS:
            for j in range(begin, tile.masked):
                p, dv = dv_step(member * tile.n + j, j, p, dv, k_s, tile, stream, handover, True)
            begin = gl.maximum(begin, tile.masked)
        for j in range(begin, tile.n):
            p, dv = dv_step(member * tile.n + j, j, p, dv, k_s, tile, stream, handover, False)
    last = stream.do.index((members * tile.n - 1) % STAGES)
    dv = warpgroup_mma_wait(0, deps=(warpgroup_mma(p, last, dv, is_async=True),))
    # K has no other reader: it is this consumer's to overwrite.
    k_s.store(dv.to(k_s.dtype))
    fence_async_shared()
    tma_store(dvd, [tile.index, tile.start, 0], k_s)
    tma.store_wait(0)


@gluon.jit
def grad_scores(t, dpt, stream, handover, D: gl.constexpr):
    """From dP of block t in flight, the last product, to dS^T, as an operand."""
    delta = stream.delta.index(t % STAGES).load(gl.SliceLayout(0, result_layout(ROWS)))
    dp = warpgroup_mma_wait(0, deps=(dpt,)) - delta[None, :]
    return as_operand((handover.take(t) * dp).to(stream.q.dtype), D)


@gluon.jit
def dk_consumer(v_s, stream, handover, resident, dkd, tile, total):
    """Consumer 2: dS and dK of the stream's `total` blocks."""
    D: gl.constexpr = v_s.shape[1]
    dk = gl.zeros([KEYS, D], gl.float32, result_layout(D))
    mbarrier.wait(resident, 0)
    stream.wait(0)
    ds = grad_scores(0, start_dp(0, v_s, stream), stream, handover, D)
    for t in range(1, total):
        dkt = warpgroup_mma(ds, stream.q.index((t - 1) % STAGES), dk, is_async=True)
        stream.wait(t)
        dpt = start_dp(t, v_s, stream)
        dk = warpgroup_mma_wait(1, deps=(dkt,))
        stream.release(t - 1)
        ds = grad_scores(t, dpt, stream, handover, D)
    last = stream.q.index((total - 1) % STAGES)
    dk = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, last, dk, is_async=True),))
    v_s.store((dk * (tile.scale * LN2)).to(v_s.dtype))
    fence_async_shared()
    tma_store(dkd, [tile.index, tile.start, 0], v_s)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "group", "Lq", "Lk"])
def wide_dkv_kernel(
    qd, dod, kd, vd, ld, dd, dkd, dvd, scale, kv_heads, group, Lq, Lk,
    D: gl.constexpr, CAUSAL: gl.constexpr, MASKS: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys of one kv head. The grid: see place."""
    blocks = (Lq + ROWS - 1) // ROWS + 1
    number, index = place()
    start = number * KEYS
    first, n, masked = rows_of(start, Lq, Lk, KEYS, CAUSAL)
    masked = gl.minimum(masked, n)
    diagonal = first * ROWS + Lk - Lq - start
    row = (index * group * blocks + first) * ROWS
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], kd.dtype)
    k_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], LAYOUT)
    v_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], LAYOUT)
    stream = open_stream(qd, ld, D)
    p_s = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    handover = Handover(p_s, barriers(STAGES, 1), barriers(STAGES, 1))
    resident = barriers(1, 1).index(0)
    fence_async_shared()
    members = group if GROUPED else 1
    route = Route(index, kv_heads, group, members, blocks, start, first, n)
    tile = tile_of(route, masked, diagonal, row, scale, Lk, CAUSAL, GROUPED)
    gl.warp_specialize([
        (dv_consumer, (k_s, stream, handover, resident, dvd, tile, MASKS)),
        (dk_consumer, (v_s, stream, handover, resident, dkd, tile, members * n)),
        (load_stream, (qd, dod, kd, vd, ld, dd, stream, k_s, v_s, resident, route)),
    ], [4, 1], [240, 24])  # fmt: skip
