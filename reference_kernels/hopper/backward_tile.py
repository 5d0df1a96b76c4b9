"""What a CTA of the kernels for dK and dV works on: a tile of keys of one kv head, and the rows that see them.

Rows come in blocks of ROWS, of all query heads of the group, one head after the other: block t of what a CTA meets is
block j of one head, t = member n + j.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against these types.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import aggregate

ROWS = gl.constexpr(64)
"""Query rows of a block."""

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


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


@aggregate
class Route:
    """What the producer loads: the keys from `start` on of kv head `index` of the batch, and what passes them, the row
    blocks first … first + n - 1 of `members` query heads.

    kv_heads: of one problem of the batch. group: query heads to a kv head. blocks: what each has in the workspace.
    """

    index: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor
    members: gl.tensor
    blocks: gl.tensor
    start: gl.tensor
    first: gl.tensor
    n: gl.tensor

    @gluon.constexpr_function
    def __init__(self, index, kv_heads, group, members, blocks, start, first, n):
        self.index = index
        self.kv_heads = kv_heads
        self.group = group
        self.members = members
        self.blocks = blocks
        self.start = start
        self.first = first
        self.n = n


@aggregate
class Tile:
    """What a consumer must know of the keys that the CTA owns, from `start` on of kv head `index` of the batch.

    scale: of K Q^T, times log2(e). n: row blocks of each of the `group` query heads; the first `masked` may hold hidden
    pairs. diagonal: the key of the tile that the first row of block 0 stands on. keys: how many there are from `start`
    on. row: where block 0 of the first head begins in the workspace, of which each head has `rows`.
    """

    scale: gl.tensor
    index: gl.tensor
    start: gl.tensor
    diagonal: gl.tensor
    keys: gl.tensor
    row: gl.tensor
    rows: gl.tensor
    n: gl.tensor
    masked: gl.tensor
    group: gl.tensor
    causal: gl.constexpr
    grouped: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scale, index, start, diagonal, keys, row, rows, n, masked, group, causal, grouped):
        self.scale = scale
        self.index = index
        self.start = start
        self.diagonal = diagonal
        self.keys = keys
        self.row = row
        self.rows = rows
        self.n = n
        self.masked = masked
        self.group = group
        self.causal = gl.constexpr(causal)
        self.grouped = gl.constexpr(grouped)

    @gluon.jit
    def hide(self, x, diagonal, OFFSET: gl.constexpr):
        """-inf in x (64, ROWS), keys OFFSET … OFFSET + 63 of the tile, where the key is hidden from the row.

        diagonal: the key of the tile that the first row stands on.
        """
        LAYOUT: gl.constexpr = x.type.layout
        key = gl.arange(OFFSET, OFFSET + 64, gl.SliceLayout(1, LAYOUT))[:, None]
        row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
        seen = row + diagonal >= key if self.causal else key < self.keys
        return gl.where(seen, x, -float("inf"))


@gluon.jit
def tile_of(route, masked, diagonal, row, scale, Lk, CAUSAL: gl.constexpr, GROUPED: gl.constexpr):
    """The tile of a route; masked, diagonal, row: see Tile."""
    return Tile(
        scale * LOG2E, route.index, route.start, diagonal, Lk - route.start, row, route.blocks * ROWS,
        route.n, masked, route.group, CAUSAL, GROUPED,
    )  # fmt: skip
