"""dK and dV of two passes, deterministic, without atomics. Two passes take seven products for one pass's five.

The two consumer warp groups have 64 keys each, share nothing but the stream that a producer warp loads, and march on at
their own pace. A step, for block t of rows:

    dK += dS^T(t-1) Q(t-1)         started; its operand is all that was carried over
    S^T = K Q(t)^T                 started; wait for dK, release slot t-1
    dP^T = V dO(t)^T               started; wait for S
    P^T = exp2(S^T scale - lse2)   while dP is formed
    dV += P^T dO(t)                started; wait for dP
    dS^T = P^T o (dP^T - delta)    while dV is formed; wait for dV

No product is in flight across the edge of the loop: ptxas answers that by running all of them one after the other.

Grouped heads: the group's rows follow each other in one stream, and dK and dV are summed in their accumulators.

dK, dV, S, dP: float32. P and dS are rounded to the input dtype for their products; each gradient is rounded once.
"""

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
    Half,
    barriers,
    grad_scores,
    load_stream,
    open_stream,
    start_dp,
    start_scores,
)
from .backward_tile import LN2, ROWS, Route, place, rows_of, tile_of
from .gluon_compat import tma_store
from .wgmma import as_operand, result_layout


@gluon.jit
def rest(t, diagonal, st, dv, half, MASKED: gl.constexpr):
    """From the scores of block t in flight to dS^T, as an operand, and dV."""
    dpt = start_dp(t, half.v, half.stream)
    ds, dvt = grad_scores(t, diagonal, st, dpt, dv, half, MASKED)
    return as_operand(ds, half.k.shape[1]), warpgroup_mma_wait(0, deps=(dvt,))


@gluon.jit
def step(t, j, ds, dk, dv, half, MASKED: gl.constexpr):
    """dK of block t - 1, dS and dV of block t, which is block j of its head."""
    diagonal = half.tile.diagonal + j * ROWS
    dkt = warpgroup_mma(ds, half.stream.q.index((t - 1) % STAGES), dk, is_async=True)
    st = start_scores(t, half.k, half.stream)
    dk = warpgroup_mma_wait(1, deps=(dkt,))
    half.stream.release(t - 1)
    ds, dv = rest(t, diagonal, st, dv, half, MASKED)
    return ds, dk, dv


@gluon.jit
def one_head(t, begin, ds, dk, dv, half, ROLLED: gl.constexpr):
    """The row blocks begin … n - 1 of a head whose block 0 is block t of the stream."""
    if ROLLED:
        for j in range(begin, half.tile.masked):
            ds, dk, dv = step(t + j, j, ds, dk, dv, half, True)
        begin = gl.maximum(begin, half.tile.masked)
    for j in range(begin, half.tile.n):
        ds, dk, dv = step(t + j, j, ds, dk, dv, half, False)
    return ds, dk, dv


@gluon.jit
def consumer(
    k_s, v_s, stream, resident, dkd, dvd, tile, OFFSET: gl.constexpr, PEELED: gl.constexpr, ROLLED: gl.constexpr
):  # fmt: skip
    """dK and dV of keys OFFSET … OFFSET + 63 of the tile. PEELED, ROLLED: see dkv_kernel."""
    D: gl.constexpr = k_s.shape[1]
    BEGIN: gl.constexpr = max(PEELED, 1)
    half = Half(k_s.slice(OFFSET, 64), v_s.slice(OFFSET, 64), tile, stream, OFFSET)
    dk = gl.zeros([64, D], gl.float32, result_layout(D))
    dv = gl.zeros([64, D], gl.float32, result_layout(D))
    mbarrier.wait(resident, 0)
    st = start_scores(0, half.k, stream)
    ds, dv = rest(0, tile.diagonal, st, dv, half, PEELED > 0 or ROLLED)
    for j in gl.static_range(1, PEELED):
        ds, dk, dv = step(j, j, ds, dk, dv, half, True)
    if tile.grouped:
        for member in range(tile.group):
            begin = gl.where(member == 0, BEGIN, 0)
            ds, dk, dv = one_head(member * tile.n, begin, ds, dk, dv, half, ROLLED)
        last = tile.group * tile.n - 1
    else:
        ds, dk, dv = one_head(0, BEGIN, ds, dk, dv, half, ROLLED)
        last = tile.n - 1
    dk = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, stream.q.index(last % STAGES), dk, is_async=True),))
    half.k.store((dk * (tile.scale * LN2)).to(half.k.dtype))
    half.v.store(dv.to(half.v.dtype))
    fence_async_shared()
    tma_store(dkd, [tile.index, tile.start + OFFSET, 0], half.k)
    tma_store(dvd, [tile.index, tile.start + OFFSET, 0], half.v)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "group", "Lq", "Lk"])
def dkv_kernel(
    qd, dod, kd, vd, ld, dd, dkd, dvd, scale, kv_heads, group, Lq, Lk,
    D: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr,
    PEELED: gl.constexpr, ROLLED: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """dK and dV of KEYS keys of one kv head. The grid: see place.

    PEELED: only the first so many row blocks of a tile may hold hidden pairs; ROLLED: others may as well.
    """
    blocks = (Lq + ROWS - 1) // ROWS + 1
    number, index = place()
    start = number * KEYS
    first, n, masked = rows_of(start, Lq, Lk, KEYS, CAUSAL)
    n = gl.maximum(n, PEELED)
    masked = gl.minimum(masked, n)
    diagonal = first * ROWS + Lk - Lq - start
    row = (index * group * blocks + first) * ROWS
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], kd.dtype)
    k_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], LAYOUT)
    v_s = gl.allocate_shared_memory(kd.dtype, [KEYS, D], LAYOUT)
    stream = open_stream(qd, ld, D)
    resident = barriers(1, 1).index(0)
    fence_async_shared()
    members = group if GROUPED else 1
    route = Route(index, kv_heads, group, members, blocks, start, first, n)
    tile = tile_of(route, masked, diagonal, row, scale, Lk, CAUSAL, GROUPED)
    gl.warp_specialize([
        (consumer, (k_s, v_s, stream, resident, dkd, dvd, tile, 0, PEELED, ROLLED)),
        (consumer, (k_s, v_s, stream, resident, dkd, dvd, tile, 64, PEELED, ROLLED)),
        (load_stream, (qd, dod, kd, vd, ld, dd, stream, k_s, v_s, resident, route)),
    ], [4, 1], [240, 24])  # fmt: skip
