"""The producer: one warp that does nothing but ask the TMA for tiles, as far ahead as there are empty slots.

For each tile of queries: Q, then K and V of every block of keys from the last to the first, in the order in which the
consumers will want them: K of block j + 1 before V of block j. It runs into the next tile while the consumers are
finishing this one. Where block 0 has few keys (work.py), they come with Q, in a ring of their own: so what is under way
is as far ahead as without them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .work import few_columns


@gluon.jit
def load_tiles(
    rows, channels, work, end, q_count, kv_count,
    CONFIG: gl.constexpr, CAUSAL: gl.constexpr, SHORT: gl.constexpr = 0,
):  # fmt: skip
    """Fill the channels with the tiles work.begin … end - 1. q_count, kv_count: tiles that went through them before.

    channels: of Q, K and V and, if SHORT is less than a block, of the last SHORT keys and values of block 0. rows:
    descriptors of what goes through them. Returns kv_count as it is then.
    """
    queries, keys, values = channels[0], channels[1], channels[2]
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    NC: gl.constexpr = CONFIG.consumers
    FEW: gl.constexpr = few_columns(SHORT, BLOCK_N)
    count = kv_count  # a literal argument cannot change in a loop
    row_pad, key_pad = work.pads(BLOCK_M, BLOCK_N, CAUSAL, SHORT)
    for t in range(work.begin, end):
        row, batch, q_head, kv_head = work.tile(t, BLOCK_M)
        row = row - row_pad
        n, last = work.blocks_to_visit(row + key_pad, BLOCK_M, BLOCK_N, CAUSAL, FEW)
        tile_count = q_count + t - work.begin
        for c in gl.static_range(NC):
            queries.fill(rows[0], batch, q_head, row + c * 64, tile_count, c * CONFIG.q_stages)
        first_key = last * BLOCK_N - key_pad
        keys.fill(rows[1], batch, kv_head, first_key, count)
        if FEW:
            few_keys, few_values = channels[3], channels[4]
            few_keys.fill(rows[3], batch, kv_head, BLOCK_N - FEW - key_pad, tile_count)
            few_values.fill(rows[4], batch, kv_head, BLOCK_N - FEW - key_pad, tile_count)
        for j in range(1, n):
            keys.fill(rows[1], batch, kv_head, first_key - j * BLOCK_N, count + j)
            values.fill(rows[2], batch, kv_head, first_key - j * BLOCK_N + BLOCK_N, count + j - 1)
        count += n
        values.fill(rows[2], batch, kv_head, first_key - (n - 1) * BLOCK_N, count - 1)
    return count


@gluon.jit
def end_of_repeat(outgrown, decided, work, CONFIG: gl.constexpr):
    """Where a second walk over this CTA's tiles ends: after the last one if a row outgrew its reference, or at once."""
    NC: gl.constexpr = CONFIG.consumers
    mbarrier.wait(decided, 0)
    again = 0
    for c in gl.static_range(NC):
        again = again | gl.load(outgrown + gl.program_id(0) * NC + c, volatile=True)
    return gl.where(again != 0, work.end, work.begin)


@gluon.jit
def producer(
    rows, outgrown, decided, channels, work,
    CONFIG: gl.constexpr, CAUSAL: gl.constexpr, SHORT: gl.constexpr, FREEZE: gl.constexpr,
):  # fmt: skip
    """Load everything; with FREEZE once more, if consumer.py asks for it."""
    count = load_tiles(rows, channels, work, work.end, 0, 0, CONFIG, CAUSAL, SHORT)
    if FREEZE:
        end = end_of_repeat(outgrown, decided, work, CONFIG)
        load_tiles(rows, channels, work, end, work.end - work.begin, count, CONFIG, CAUSAL, SHORT)
