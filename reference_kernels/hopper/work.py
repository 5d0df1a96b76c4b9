"""What all roles of a CTA must agree on: the tiles it works on, in order, and how many key blocks each has.

The list of tiles is data, made by schedule.py. A tile is BLOCK_M query rows of one head, and one int64:

    bits 0 … 19    number of the row block          20 … 31    kv head
    bits 32 … 43   query head                       44 … 63    batch

Where lengths are no multiples of the blocks, something must be short: the last block and the last tile or, with the
kernel's SHORT (launch.short_block), the first ones. Then block 0 has fewer keys, at most SHORT: block j begins
`key_pad` keys before key j BLOCK_N, and the last block ends with the last key. With a causal mask row tiles end with
the last row likewise, `row_pad` rows earlier: so the diagonal meets the blocks of keys as it does at even lengths, and
the tile that is short sees the fewest keys. What is before the first row or key is not there: the TMA loads zeros.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against these types.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import aggregate


@gluon.constexpr_function
def few_columns(SHORT, BLOCK_N):
    """How many columns of block 0 are multiplied as a few keys beside the first block visited: SHORT, if that is less
    than a block. Otherwise 0, and block 0 is whole, or a block like the others of which a part is hidden.
    """
    return SHORT if SHORT < BLOCK_N else 0


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
    def pads(self, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, SHORT: gl.constexpr):
        """row_pad and key_pad: the rows that tile 0 lacks, and the keys that block 0 does; their first ones."""
        row_pad = 0
        key_pad = 0
        if SHORT:
            key_pad = gl.cdiv(self.Lk, BLOCK_N) * BLOCK_N - self.Lk
            if CAUSAL:
                row_pad = gl.cdiv(self.Lq, BLOCK_M) * BLOCK_M - self.Lq
        return row_pad, key_pad

    @gluon.jit
    def key_blocks(self, row, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
        """How many blocks of keys the rows row … row + BLOCK_M - 1 see any of; at least 1, or it would be no tile.

        row: here and below plus key_pad, so that the diagonal is counted from the first column of block 0.
        """
        n = gl.cdiv(self.Lk, BLOCK_N)
        if CAUSAL:
            n = gl.minimum(n, gl.cdiv(row + BLOCK_M + self.Lk - self.Lq, BLOCK_N))
        return n

    @gluon.jit
    def blocks_to_visit(
        self, row, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, FEW: gl.constexpr
    ):
        """How many blocks of keys the rows row … row + BLOCK_M - 1 visit, and which is the last of these, visited
        first. With FEW block 0 is not among them.
        """
        n = self.key_blocks(row, BLOCK_M, BLOCK_N, CAUSAL)
        last = n - 1
        if FEW:
            # For rows that see no other than block 0, one beyond all keys stands in: zeros, beyond the diagonal.
            last = gl.where(n > 1, last, gl.cdiv(self.Lk, BLOCK_N))
            n = gl.maximum(n - 1, 1)
        return n, last

    @gluon.jit
    def full_blocks(self, row, BLOCK_N: gl.constexpr):
        """How many of them, causal, come before the diagonal of every row from `row` on.

        Each row with keys sees one, that on its diagonal, in the blocks that are left. (A frozen reference needs it: if
        the first row's diagonal ends a block, that block is left over too, although all rows see all of it.)
        """
        return gl.maximum(row + self.Lk - self.Lq, 0) // BLOCK_N
