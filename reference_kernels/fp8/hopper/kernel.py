"""The FP8 kernel: one CTA per SM, two or three consumers and a producer; ../../hopper/kernel.py, with scales."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...hopper.channel import open_channel
from ...hopper.producer import load_tiles
from ...hopper.work import Work
from .consumer import consumer
from .scales import Columns, Scales


@gluon.jit
def producer(q, k, v, queries, keys, values, work, CONFIG: gl.constexpr, CAUSAL: gl.constexpr):
    """Load everything: K by rows, V by columns."""
    load_tiles((q, k, v), (queries, keys, values), work, work.end, 0, 0, CONFIG, CAUSAL)


# A launch makes a constant of an integer argument that is 1, as strides of descales often are; an aggregate's field, a
# tensor, takes none.
DESCALE_STRIDES = [f"{x}_{axis}" for x in ("qs", "ks", "vs") for axis in "bhn"] + ["top_b", "top_h"]


@gluon.jit(do_not_specialize=["heads", "Lq", "Lk", *DESCALE_STRIDES])
def forward_kernel(
    q, k, v, o, lse, tiles, starts,
    qs, qs_b, qs_h, qs_n, ks, ks_b, ks_h, ks_n, vs, vs_b, vs_h, vs_n, top, top_b, top_h,
    scale, heads, Lq, Lk,
    D: gl.constexpr, CONFIG: gl.constexpr, SCALE_BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr, TAIL: gl.constexpr, DIAGONALS: gl.constexpr, V_BLOCKS: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Attention over the tiles of this CTA. acc, m, l: float32.

    q, o: descriptors of (B, Hq, Lq, D) with blocks of 64 rows, o bfloat16; k: of (B, Hkv, Lk, D) with blocks of block_n
    rows; v: of (B, Hkv, D, Lk) with blocks of block_n columns. lse (B, Hq, Lq) float32 is written, in natural
    logarithm. tiles, starts: ../../hopper/schedule.py. qs … top_h: scales.Scales; vs is read if V_BLOCKS.
    scale: of q k^T, times log2(e), positive. SCALE_BLOCK: rows that share a scale. INTERLEAVED: v is in the
    order of interleaving.py. TAIL, DIAGONALS: as there.
    """
    begin = gl.load(starts + gl.program_id(0))
    end = gl.load(starts + gl.program_id(0) + 1)
    work = Work(tiles, begin, end, Lq, Lk)
    scales = Scales(qs, qs_b, qs_h, qs_n, ks, ks_b, ks_h, ks_n, vs, vs_b, vs_h, vs_n, top, top_b, top_h, scale)
    NC: gl.constexpr = CONFIG.consumers
    queries = open_channel(q.dtype, NC, CONFIG.q_stages, 64, D, 1)
    keys = open_channel(k.dtype, 1, CONFIG.kv_stages, CONFIG.block_n, D, NC)
    values = Columns(open_channel(v.dtype, 1, CONFIG.kv_stages, D, CONFIG.block_n, NC))
    buffers = gl.allocate_shared_memory(o.dtype, [NC, 64, D], gl.NVMMASharedLayout.get_default_for([64, D], o.dtype))
    fence_async_shared()
    if NC == 2:
        gl.warp_specialize(
            [
                (consumer, (o, lse, queries, keys, values, buffers.index(0), work, scales, heads,
                            0, D, CONFIG, SCALE_BLOCK, CAUSAL, TAIL, DIAGONALS, V_BLOCKS, INTERLEAVED)),
                (consumer, (o, lse, queries, keys, values, buffers.index(1), work, scales, heads,
                            1, D, CONFIG, SCALE_BLOCK, CAUSAL, TAIL, DIAGONALS, V_BLOCKS, INTERLEAVED)),
                (producer, (q, k, v, queries, keys, values, work, CONFIG, CAUSAL)),
            ],
            [4, 1],
            [CONFIG.consumer_registers, CONFIG.producer_registers],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (o, lse, queries, keys, values, buffers.index(0), work, scales, heads,
                            0, D, CONFIG, SCALE_BLOCK, CAUSAL, TAIL, DIAGONALS, V_BLOCKS, INTERLEAVED)),
                (consumer, (o, lse, queries, keys, values, buffers.index(1), work, scales, heads,
                            1, D, CONFIG, SCALE_BLOCK, CAUSAL, TAIL, DIAGONALS, V_BLOCKS, INTERLEAVED)),
                (consumer, (o, lse, queries, keys, values, buffers.index(2), work, scales, heads,
                            2, D, CONFIG, SCALE_BLOCK, CAUSAL, TAIL, DIAGONALS, V_BLOCKS, INTERLEAVED)),
                (producer, (q, k, v, queries, keys, values, work, CONFIG, CAUSAL)),
            ],
            [4, 4, 1],
            [CONFIG.consumer_registers, CONFIG.consumer_registers, CONFIG.producer_registers],
        )  # fmt: skip
