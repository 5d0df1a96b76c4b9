"""The stream of query rows past the keys of a CTA, and what the kernels for dK and dV do with a block of them.

`Stream` is a ring of STAGES slots, each of Q, dO, lse2 and delta behind one barrier that says full and one that says
empty (count: the two consumers). The slot and the phase of block t are t mod STAGES and t div STAGES mod 2.

Scores are transposed, (keys, rows), so that P^T and dS^T, as they lie in registers, are the left operands of dV and dK.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against these types.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .backward_tile import ROWS, Tile
from .gluon_compat import aggregate, tma_load
from .wgmma import as_operand, result_layout, start_product

STAGES = gl.constexpr(2)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of whose phases ends with ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@aggregate
class Stream:
    """Slots of query rows: q, do (STAGES, ROWS, D), lse2, delta (STAGES, ROWS) and their barriers (STAGES, 1)."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse2: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, do, lse2, delta, full, empty):
        self.q = q
        self.do = do
        self.lse2 = lse2
        self.delta = delta
        self.full = full
        self.empty = empty

    @gluon.jit
    def wait(self, t):
        """Until block t is there."""
        mbarrier.wait(self.full.index(t % STAGES), (t // STAGES) & 1)

    @gluon.jit
    def release(self, t):
        """Block t has been read by this consumer."""
        mbarrier.arrive(self.empty.index(t % STAGES), count=1)


@gluon.jit
def open_stream(qd, ld, D: gl.constexpr):
    """qd, ld: the descriptors of Q (or dO) and lse2 (or delta)."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], qd.dtype)
    q = gl.allocate_shared_memory(qd.dtype, [STAGES, ROWS, D], LAYOUT)
    do = gl.allocate_shared_memory(qd.dtype, [STAGES, ROWS, D], LAYOUT)
    lse2 = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], ld.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], ld.layout)
    return Stream(q, do, lse2, delta, barriers(STAGES, 1), barriers(STAGES, 2))


@gluon.jit
def load_stream(qd, dod, kd, vd, ld, dd, stream, k_s, v_s, resident, route):
    """The producer: K and V of the tile, then the row blocks of each head in turn."""
    batch = route.index // route.kv_heads
    kv_head = route.index % route.kv_heads
    mbarrier.expect(resident, kd.block_type.nbytes + vd.block_type.nbytes)
    tma_load(kd, [batch, kv_head, route.start, 0], resident, k_s)
    tma_load(vd, [batch, kv_head, route.start, 0], resident, v_s)
    for member in range(route.members):
        for j in range(route.n):
            t = member * route.n + j
            s = t % STAGES
            block = route.first + j
            full = stream.full.index(s)
            mbarrier.wait(stream.empty.index(s), (t // STAGES) & 1 ^ 1)
            mbarrier.expect(full, 2 * (qd.block_type.nbytes + ld.block_type.nbytes))
            at = [batch, kv_head * route.group + member, block * ROWS, 0]
            tma_load(qd, at, full, stream.q.index(s))
            tma_load(dod, at, full, stream.do.index(s))
            row = ((route.index * route.group + member) * route.blocks + block) * ROWS
            tma_load(ld, [row], full, stream.lse2.index(s))
            tma_load(dd, [row], full, stream.delta.index(s))


@aggregate
class Half:
    """A consumer's half of the tile, k, v (64, D), the keys from key `offset` of the tile; and what it meets."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    tile: Tile
    stream: Stream
    offset: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v, tile, stream, offset):
        self.k = k
        self.v = v
        self.tile = tile
        self.stream = stream
        self.offset = gl.constexpr(offset)


@gluon.jit
def start_scores(t, k, stream):
    """Wait for block t and start S^T = K Q^T (64, ROWS), k (64, D)."""
    stream.wait(t)
    return start_product(k, stream.q.index(t % STAGES).permute((1, 0)))


@gluon.jit
def start_dp(t, v, stream):
    """Start dP^T = V dO^T (64, ROWS), v (64, D)."""
    return start_product(v, stream.do.index(t % STAGES).permute((1, 0)))


@gluon.jit
def probabilities(t, diagonal, st, tile, stream, OFFSET: gl.constexpr, MASKED: gl.constexpr, LATER: gl.constexpr):
    """P^T (64, ROWS), float32, from the scores of block t in flight. OFFSET, diagonal: as for Tile.hide.

    LATER: products that were started after them, and stay in flight.
    """
    lse2 = stream.lse2.index(t % STAGES).load(gl.SliceLayout(0, result_layout(ROWS)))
    x = warpgroup_mma_wait(LATER, deps=(st,)) * tile.scale - lse2[None, :]
    if MASKED:
        x = tile.hide(x, diagonal, OFFSET)
    return gl.exp2(x)


@gluon.jit
def grad_scores(t, diagonal, st, dpt, dv, half, MASKED: gl.constexpr):
    """dS^T (64, ROWS), in the input dtype, from the scores and dP of block t in flight; and dV (64, D), in flight."""
    stream = half.stream
    dtype: gl.constexpr = stream.do.dtype
    p = probabilities(t, diagonal, st, half.tile, stream, half.offset, MASKED, 1)
    dvt = warpgroup_mma(as_operand(p.to(dtype), dv.shape[1]), stream.do.index(t % STAGES), dv, is_async=True)
    delta = stream.delta.index(t % STAGES).load(gl.SliceLayout(0, result_layout(ROWS)))
    dp = warpgroup_mma_wait(1, deps=(dpt,))
    return (p * (dp - delta[None, :])).to(dtype), dvt
