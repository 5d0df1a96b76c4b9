"""What all roles of a CTA must agree on: the tiles it works on, in order, and how many key blocks each has.

The list of tiles is data, made by schedule.py. A tile is BLOCK_M query rows of one head, and one int64:

    bits 0 … 19    number of the row block          20 … 31    kv head
    bits 32 … 43   query head                       44 … 63    batch
"""

# No `from __future__ import annotations`: an aggregate checks its fields against these types.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import aggregate


@aggregate
class Work:
    """tiles: pointer to the codes; this CTA's are begin … end - 1."""

    tiles: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    Lq: gl.tensor
    Lk: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tiles, begin, end, Lq, Lk):
        self.tiles = tiles
        self.begin = begin
        self.end = end
        self.Lq = Lq
        self.Lk = Lk

    @gluon.jit
    def tile(self, t, BLOCK_M: gl.constexpr):
        """First query row, batch, query head and kv head of tile t."""
        code = gl.load(self.tiles + t)
        low = code.to(gl.int32)
        high = (code >> 32).to(gl.int32)
        return (low & 0xFFFFF) * BLOCK_M, high >> 12, high & 0xFFF, (low >> 20) & 0xFFF

    @gluon.jit
    def key_blocks(self, row, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
        """How many blocks of keys the rows row … row + BLOCK_M - 1 see any of; at least 1, or it would be no tile."""
        n = gl.cdiv(self.Lk, BLOCK_N)
        if CAUSAL:
            n = gl.minimum(n, gl.cdiv(row + BLOCK_M + self.Lk - self.Lq, BLOCK_N))
        return n

    @gluon.jit
    def full_blocks(self, row, BLOCK_N: gl.constexpr):
        """How many of them, causal, come before the diagonal of every row from `row` on.

        Each row with keys sees one, that on its diagonal, in the blocks that are left. (A frozen reference needs it: if
        the first row's diagonal ends a block, that block is left over too, although all rows see all of it.)
        """
        return gl.maximum(row + self.Lk - self.Lq, 0) // BLOCK_N
