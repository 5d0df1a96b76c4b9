"""Before and after the passes of the backward: what is done once for each query row. Plain Triton, bandwidth-bound.

Before, into a workspace that holds every head's rows in blocks of 64 and one block more than it has, so that the
kernels that read it need no masks:

    delta = rowsum(O o dO) - dlse          lse2 = lse log2(e); +inf for a row without keys, and for a row that is none

With lse2 = +inf the row's P = exp2(S - lse2) is 0, and so is all that it adds to a gradient.

After the one pass: dQ = scale * (the float32 sums), in the order of memory again (wgmma.flattened).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import LOG2E


@triton.jit(do_not_specialize=["heads", "Lq", "blocks"])
def prepare_kernel(
    o, o_b, o_h, o_l, o_d, do, do_b, do_h, do_l, do_d, lse, lse_b, lse_h, lse_l, dlse, dlse_b, dlse_h, dlse_l,
    lse2, delta, sums, heads, Lq, blocks, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One block of one head. lse2, delta: float32, (B, Hq, blocks, ROWS). dlse: None is zero. sums: zeroed, or None."""
    tile = tl.program_id(0).to(tl.int64)
    b = tile // blocks // heads
    h = tile // blocks % heads
    rows = tile % blocks * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    here = rows < Lq
    # (ROWS, D)
    dims = tl.arange(0, D)[None, :]
    ot = tl.load(o + b * o_b + h * o_h + rows[:, None] * o_l + dims * o_d, mask=here[:, None], other=0.0)
    dot_ = tl.load(do + b * do_b + h * do_h + rows[:, None] * do_l + dims * do_d, mask=here[:, None], other=0.0)
    # (ROWS,)
    d = tl.sum(ot.to(tl.float32) * dot_.to(tl.float32), 1)
    if dlse is not None:
        d -= tl.load(dlse + b * dlse_b + h * dlse_h + rows * dlse_l, mask=here, other=0.0).to(tl.float32)
    shift = tl.load(lse + b * lse_b + h * lse_h + rows * lse_l, mask=here, other=float("-inf")) * LOG2E
    at = tile * ROWS + tl.arange(0, ROWS)
    tl.store(delta + at, d)
    tl.store(lse2 + at, tl.where(shift == float("-inf"), float("inf"), shift))
    if sums is not None:
        tl.store(sums + tile * (ROWS * D) + tl.arange(0, ROWS * D), tl.zeros([ROWS * D], tl.float32))


@triton.jit(do_not_specialize=["heads", "Lq", "blocks"])
def finish_kernel(sums, dq, dq_b, dq_h, dq_l, dq_d, heads, Lq, blocks, scale, D: tl.constexpr, ROWS: tl.constexpr):
    """dQ of one block of 64 rows = scale * sums, undoing the order of registers."""
    used = (Lq + ROWS - 1) // ROWS
    tile = tl.program_id(0).to(tl.int64)
    head = tile // used
    block = tile % used
    x = tl.load(sums + (head * blocks + block) * (ROWS * D) + tl.arange(0, ROWS * D)) * scale
    # Per 64 columns the order of wgmma.flattened, → (ROWS, D).
    x = x.reshape([D // 64, 8, 4, 8, 4, 2, 2]).permute((2, 5, 3, 0, 1, 4, 6)).reshape([ROWS, D])
    rows = (block * ROWS + tl.arange(0, ROWS))[:, None]  # (ROWS, 1)
    to = dq + head // heads * dq_b + head % heads * dq_h + rows * dq_l + tl.arange(0, D)[None, :] * dq_d
    tl.store(to, x.to(dq.dtype.element_ty), mask=rows < Lq)
