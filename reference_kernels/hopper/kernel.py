"""The kernel: one CTA per SM, its roles, and what they share.

    consumer 0 … NC - 1     a warp group of 128 threads each, 64 query rows of every tile     consumer.py
    producer                one warp                                                          producer.py

Registers are given to those who need them: the producer keeps few, the consumers get up to 240 a thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .channel import open_channel
from .consumer import consumer
from .producer import producer
from .work import Work, few_columns


@gluon.jit(do_not_specialize=["heads", "Lq", "Lk"])
def forward_kernel(
    q, k, v, k_few, v_few, o, lse, outgrown, tiles, starts, scale, heads, Lq, Lk, o_rows,
    D: gl.constexpr, CONFIG: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr, DIAGONALS: gl.constexpr,
    SHORT: gl.constexpr, ROWLESS: gl.constexpr, FREEZE: gl.constexpr,
):  # fmt: skip
    """Attention over the tiles of this CTA. acc, m, l: float32.

    q, o: descriptors of (B, Hq, Lq, D) with blocks of 64 rows; k, v: of (B, Hkv, Lk, D) with blocks of block_n rows;
    k_few, v_few: the same with blocks of SHORT rows, if that is less; or None.
    lse (B, Hq, Lq) float32 is written, in natural logarithm. outgrown: one int32 for each consumer (FREEZE).
    tiles, starts: schedule.py. scale: of q k^T, times log2(e), positive.
    o_rows: pointer to o, contiguous (B, Hq, Lq, D), for what the TMA cannot store (CAUSAL with SHORT).
    TAIL: the last block of keys is not full. DIAGONALS: a tile may have more than one block that the diagonal crosses.
    SHORT: 0, or how many columns of block 0, which then is the one that is not full (work.py), are multiplied.
    ROWLESS: of a head's last tile a consumer may have no rows.
    """
    NC: gl.constexpr = CONFIG.consumers
    KV_STAGES: gl.constexpr = CONFIG.kv_stages
    begin = gl.load(starts + gl.program_id(0))
    end = gl.load(starts + gl.program_id(0) + 1)
    work = Work(tiles, begin, end, Lq, Lk)
    queries = open_channel(q.dtype, NC, CONFIG.q_stages, 64, D, 1)
    keys = open_channel(q.dtype, 1, KV_STAGES, CONFIG.block_n, D, NC)
    values = open_channel(q.dtype, 1, KV_STAGES, CONFIG.block_n, D, NC)
    FEW: gl.constexpr = few_columns(SHORT, CONFIG.block_n)
    rows = (q, k, v, k_few, v_few) if FEW else (q, k, v)
    channels = (
        (queries, keys, values, open_channel(q.dtype, 1, 1, FEW, D, NC), open_channel(q.dtype, 1, 1, FEW, D, NC))
        if FEW
        else (queries, keys, values)
    )
    # Without buffers of its own O leaves through Q's, and one small tile stands in for the argument.
    BUFFERS: gl.constexpr = 1 if CONFIG.o_in_q else NC
    WIDTH: gl.constexpr = 64 if CONFIG.o_in_q else D
    buffers = gl.allocate_shared_memory(
        q.dtype, [BUFFERS, 64, WIDTH], gl.NVMMASharedLayout.get_default_for([64, WIDTH], q.dtype)
    )
    decided = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(decided, count=NC)
    fence_async_shared()
    outputs = (o, o_rows) if CAUSAL and SHORT else (o,)
    if NC == 2:
        gl.warp_specialize(
            [
                (consumer, (outputs, lse, outgrown, decided, channels, buffers.index(0), work, scale, heads,
                            0, D, CONFIG, CAUSAL, TAIL, DIAGONALS, SHORT, ROWLESS, FREEZE)),
                (consumer, (outputs, lse, outgrown, decided, channels, buffers.index(BUFFERS - 1), work, scale, heads,
                            1, D, CONFIG, CAUSAL, TAIL, DIAGONALS, SHORT, ROWLESS, FREEZE)),
                (producer, (rows, outgrown, decided, channels, work, CONFIG, CAUSAL, SHORT, FREEZE)),
            ],
            [4, 1],
            [CONFIG.consumer_registers, CONFIG.producer_registers],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (outputs, lse, outgrown, decided, channels, buffers.index(0), work, scale, heads,
                            0, D, CONFIG, CAUSAL, TAIL, DIAGONALS, SHORT, ROWLESS, FREEZE)),
                (consumer, (outputs, lse, outgrown, decided, channels, buffers.index(1), work, scale, heads,
                            1, D, CONFIG, CAUSAL, TAIL, DIAGONALS, SHORT, ROWLESS, FREEZE)),
                (consumer, (outputs, lse, outgrown, decided, channels, buffers.index(2), work, scale, heads,
                            2, D, CONFIG, CAUSAL, TAIL, DIAGONALS, SHORT, ROWLESS, FREEZE)),
                (producer, (rows, outgrown, decided, channels, work, CONFIG, CAUSAL, SHORT, FREEZE)),
            ],
            [4, 4, 1],
            [CONFIG.consumer_registers, CONFIG.consumer_registers, CONFIG.producer_registers],
        )  # fmt: skip
