"""How tiles get from the producer to the consumers: a ring of buffers in shared memory with two barriers each.

The producer fills slot after slot: it waits until the slot is empty, says how many bytes will come, and lets the TMA
copy them; the hardware arrives at `full` when they are there. A consumer waits for `full`, reads, and arrives at
`empty`; when all consumers have, the slot may be filled again. Neither counts slots by messages: both count the tiles
that went through, and slot and phase follow from the count:

    slot = count mod stages        phase = (count div stages) mod 2

An mbarrier flips its phase bit each time that all expected arrivals (and bytes) have come. wait(phase) returns once the
phase of that parity is complete; a new barrier counts as having completed phase 1, so that the producer's first wait on
`empty`, for phase 1, returns at once.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against these types.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import aggregate, tma_load
from .ptx import known_here


@aggregate
class Channel:
    """tiles (slots, rows, D); full and empty (slots, 1), barriers. With several rings in one channel (the row blocks of
    Q, one for each consumer) the slots of a ring begin at `first`."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, stages):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def fill(self, descriptor, batch, head, row, count, first: gl.constexpr = 0):
        """Producer: tile number `count` from `row` of one head. Rows beyond the tensor arrive as zeros."""
        slot = first + count % self.stages
        mbarrier.wait(self.empty.index(slot), ((count // self.stages) & 1) ^ 1)
        mbarrier.expect(self.full.index(slot), descriptor.block_type.nbytes)
        tma_load(descriptor, [batch, head, row, 0], self.full.index(slot), self.tiles.index(slot))

    @gluon.jit
    def take(self, count, first: gl.constexpr = 0, HERE: gl.constexpr = False):
        """Consumer: wait for tile number `count`, return it.

        HERE: what follows from its address is computed here. The address of a ring's only slot is the same for all
        tiles: LLVM would compute what all products of all tiles are told of it once, and keep it in registers.
        """
        slot = first + count % self.stages
        if HERE:
            slot = known_here(slot)
        mbarrier.wait(self.full.index(slot), (count // self.stages) & 1)
        return self.tiles.index(slot)

    @gluon.jit
    def release(self, count, first: gl.constexpr = 0):
        """Consumer: tile number `count` has been read."""
        mbarrier.arrive(self.empty.index(first + count % self.stages), count=1)


@gluon.jit
def open_channel(
    dtype: gl.constexpr, rings: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, D: gl.constexpr,
    readers: gl.constexpr,
):  # fmt: skip
    """Allocate a channel of `rings` rings of `stages` tiles (rows, D), each read by `readers` consumers."""
    SLOTS: gl.constexpr = rings * stages
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, D], dtype)
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, rows, D], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=readers)
    return Channel(tiles, full, empty, stages)
