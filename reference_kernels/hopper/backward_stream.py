"""What the backward kernels share: which blocks a CTA meets, the stream of query rows, the masks.

A CTA of the kernels for dK and dV owns KEYS keys of one kv head and streams all rows that see them past, in blocks of
ROWS, of all query heads of the group: `Stream` is its ring of STAGES slots, each of Q, dO, lse2 and delta behind one
barrier that says full and one that says empty (count: the two consumers). The slot and the phase of block t are
t mod STAGES and t div STAGES mod 2.

Scores are transposed, (keys, rows), so that P^T and dS^T, as they lie in registers, are the left operands of dV and dK.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against these types.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from .gluon_compat import aggregate, tma_load

ROWS = gl.constexpr(64)
"""Query rows of a block."""

STAGES = gl.constexpr(2)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


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
    def release(self, t):
        """Block t has been read by this consumer."""
        mbarrier.arrive(self.empty.index(t % STAGES), count=1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of whose phases ends with ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def open_stream(qd, ld, D: gl.constexpr):
    """qd, ld: the descriptors of Q (or dO) and lse2 (or delta)."""
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], qd.dtype)
    q = gl.allocate_shared_memory(qd.dtype, [STAGES, ROWS, D], L)
    do = gl.allocate_shared_memory(qd.dtype, [STAGES, ROWS, D], L)
    lse2 = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], ld.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], ld.layout)
    return Stream(q, do, lse2, delta, barriers(STAGES, 1), barriers(STAGES, 2))


@gluon.jit
def place():
    """(tile, index) of a CTA: which tile of which head of the batch. The grid is (heads in a chunk, tiles, chunks).

    Heads of a chunk share the L2 cache. Tiles are ordered from long to short, and so is a whole chunk: what is left for
    the end is short. A grid of three axes saves the consumers the registers that a division of one axis would take.
    """
    return gl.program_id(1), gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)


@gluon.jit
def rows_of(start, Lq, Lk, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """(first, n, masked): the blocks of rows that see a key of start … start + KEYS - 1 are first … first + n - 1.

    The first `masked` of them (perhaps more than n) hold pairs of a row and a key that are hidden from each other, or
    keys that do not exist; a causal mask hides those from every row that exists. n > 0, since start < Lk.
    """
    total = (Lq + ROWS - 1) // ROWS
    if CAUSAL:
        first = gl.maximum(start + Lq - Lk, 0) // ROWS
        n = total - first
        # From this row on all keys are seen.
        masked = gl.maximum(start + KEYS - 1 + Lq - Lk + ROWS - 1, 0) // ROWS - first
    else:
        first = 0
        n = total
        masked = gl.where(start + KEYS > Lk, n, 0)
    return first, n, masked


@gluon.jit
def load_stream(
    qd, dod, kd, vd, ld, dd, stream, k_s, v_s, resident, index, kv_heads, group, members, blocks, start, first, n,
):  # fmt: skip
    """The producer: K and V of a tile of kv head `index` of the batch, then n row blocks of each of `members` heads.

    blocks: how many a head has in lse2 and delta.
    """
    batch = index // kv_heads
    kv_head = index % kv_heads
    mbarrier.expect(resident, kd.block_type.nbytes + vd.block_type.nbytes)
    tma_load(kd, [batch, kv_head, start, 0], resident, k_s)
    tma_load(vd, [batch, kv_head, start, 0], resident, v_s)
    for member in range(members):
        for j in range(n):
            t = member * n + j
            s = t % STAGES
            block = first + j
            full = stream.full.index(s)
            mbarrier.wait(stream.empty.index(s), (t // STAGES) & 1 ^ 1)
            mbarrier.expect(full, 2 * (qd.block_type.nbytes + ld.block_type.nbytes))
            at = [batch, kv_head * group + member, block * ROWS, 0]
            tma_load(qd, at, full, stream.q.index(s))
            tma_load(dod, at, full, stream.do.index(s))
            row = ((index * group + member) * blocks + block) * ROWS
            tma_load(ld, [row], full, stream.lse2.index(s))
            tma_load(dd, [row], full, stream.delta.index(s))


@gluon.jit
def start_scores(t, k_h, stream):
    """Wait for block t and start S^T = K Q^T (64, ROWS)."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    mbarrier.wait(stream.full.index(t % STAGES), (t // STAGES) & 1)
    q = stream.q.index(t % STAGES).permute((1, 0))
    return warpgroup_mma(k_h, q, gl.zeros([64, ROWS], gl.float32, L), use_acc=False, is_async=True)


@gluon.jit
def start_dp(t, v_h, stream):
    """Start dP^T = V dO^T (64, ROWS)."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    do = stream.do.index(t % STAGES).permute((1, 0))
    return warpgroup_mma(v_h, do, gl.zeros([64, ROWS], gl.float32, L), use_acc=False, is_async=True)


@gluon.jit
def hide(x, diagonal, keys, FROM: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf in x (64, ROWS), keys FROM … FROM + 63 of the tile, where the key is hidden from the row.

    diagonal: the key of the tile that the block's first row stands on. keys: how many the tile has.
    """
    L: gl.constexpr = x.type.layout
    key = gl.arange(FROM, FROM + 64, gl.SliceLayout(1, L))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, L))[None, :]
    seen = row + diagonal >= key if CAUSAL else key < keys
    return gl.where(seen, x, -float("inf"))


@gluon.jit
def store_tile(descriptor, batch, head, row, x, tile, D: gl.constexpr):
    """x (64, D) by way of the tile in shared memory to rows row … row + 63; those that do not exist are dropped."""
    tile.store(x.to(tile.dtype))
    fence_async_shared()
