"""The kernel of the quantiser: a block of rows in registers, its largest magnitude, its bytes.

Nothing of a block can be written before all of it was read. So what bounds the kernel is how many blocks are on their
way at once, that is, their registers: 16-bit numbers wait for the magnitude as they are, not widened. A block by
columns (V for Hopper) is packed, four rows to a word, before it changes its order on the way through shared memory:
half the bytes of 16-bit numbers, and no halves to be sorted on the other side.

Rotated, its numbers are the sums of matrix products, a register each, and few blocks fit. Programs that walk over the
blocks make the matrices once, and copy the blocks ahead of them into shared memory meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import INTERPRETED, lanes, widened
from .formats import rounded8
from .hadamard import rotated, signed_matrix

_WORD_E4M3, _WORD_E5M2 = (
    tl.constexpr(
        "{ .reg .b16 low, high;"
        f" cvt.rn.satfinite.{kind}x2.f32 low, $2, $1; cvt.rn.satfinite.{kind}x2.f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }"
    )
    for kind in ("e4m3", "e5m2")
)


@triton.jit
def _key(lane, INTERLEAVED: tl.constexpr):
    """The row of a block that lies at position `lane` of its column: see `quantise`."""
    if INTERLEAVED:
        lane = (lane // 16 * 16) + (lane // 2 % 2 * 8) + (lane // 4 % 4 * 2) + lane % 2
    return lane


@triton.jit
def _load(x, x_l, x_d, lane_m, rows, FIRST: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Columns FIRST … FIRST + PART - 1 of the rows lane_m (M, 1) of a block of so many `rows`, (M, PART)."""
    lane_d = FIRST + lanes(PART, WIDE)[None, :]  # (1, PART)
    return tl.load(x + lane_m * x_l + lane_d * x_d, mask=(lane_m < rows) & (lane_d < D), other=0.0)


@triton.jit
def _finite(z):
    """Magnitudes; what is not finite becomes NaN, which a maximum passes over, in one instruction."""
    if INTERPRETED:  # the maximum of Triton 3.6's interpreter passes over nothing
        size = tl.abs(z)
        size = tl.where(size < float("inf"), size, 0.0)
    else:
        size = tl.abs(z * 0.0 + z)
    return size


@triton.jit
def _held(t):
    """t itself, of which the compiler does not know that: it keeps the 16-bit numbers, not what it made of them."""
    if not INTERPRETED:
        t = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [t], dtype=t.dtype, is_pure=False, pack=2)
    return t


@triton.jit
def _factor(most, largest):
    """The scale of a block whose largest magnitude is `most`; of nothing but zeros it is 1."""
    return tl.where(most > 0.0, tl.maximum(tl.div_rn(most, largest), 1.1754943508222875e-38), 1.0)


@triton.jit
def _word(z0, z1, z2, z3, DTYPE: tl.constexpr):
    """Four float32, rounded to DTYPE, as the bytes of a uint32, the first the lowest."""
    if INTERPRETED:
        w = rounded8(z0, DTYPE).to(tl.uint8, bitcast=True).to(tl.uint32)
        w |= rounded8(z1, DTYPE).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        w |= rounded8(z2, DTYPE).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
        w |= rounded8(z3, DTYPE).to(tl.uint8, bitcast=True).to(tl.uint32) << 24
    else:
        # As an elementwise conversion would do it, but for the pairs, which would be those of a row.
        ASM: tl.constexpr = _WORD_E4M3 if tl.float8e4nv == DTYPE else _WORD_E5M2
        w = tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [z0, z1, z2, z3], dtype=tl.uint32, is_pure=True, pack=1)
    return w


@triton.jit
def _store(
    y, y_l, y_d, z, factor, lane_m, ok, FIRST: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """z (ROWS, PART) times factor, rounded, as columns FIRST … FIRST + PART - 1 of a tile."""
    lane_d = FIRST + lanes(PART, WIDE)[None, :]  # (1, PART)
    z = rounded8(z * factor, y.dtype.element_ty)
    tl.store(y + lane_m * y_l + lane_d * y_d, z, mask=ok & (lane_d < D))


@triton.jit
def _place(at, heads, L, count, ROWS: tl.constexpr):
    """Batch, head, number in the head, and rows of block `at` of all; no rows if there is no such block."""
    blocks = tl.cdiv(L, ROWS)
    block = at % blocks
    b = (at // (blocks * heads)).to(tl.int64)
    h = (at // blocks % heads).to(tl.int64)
    return b, h, block, tl.where((at >= 0) & (at < count), L - block * ROWS, 0)


@triton.jit
def _read(
    at, x, x_b, x_h, x_l, x_d, heads, L, count,
    D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The tiles of block `at`, one, two or four; in place of the others the first. All are on their way at once.

    WORDS: every fourth row (ROWS / 4, D), from the first, second, third and fourth: what is one above the other in
    memory is then the same element of four tiles, and a thread packs it. Otherwise parts of the columns (ROWS, PART).
    """
    b, h, block, rows = _place(at, heads, L, count, ROWS)
    x += b * x_b + h * x_h + block.to(tl.int64) * ROWS * x_l
    if WORDS:
        lane_m = 4 * lanes(ROWS // 4, WIDE)[:, None]  # (ROWS / 4, 1)
        t0 = _load(x, x_l, x_d, _key(lane_m, INTERLEAVED), rows, 0, PART, D, WIDE)
        t1 = _load(x, x_l, x_d, _key(lane_m + 1, INTERLEAVED), rows, 0, PART, D, WIDE)
        t2 = _load(x, x_l, x_d, _key(lane_m + 2, INTERLEAVED), rows, 0, PART, D, WIDE)
        t3 = _load(x, x_l, x_d, _key(lane_m + 3, INTERLEAVED), rows, 0, PART, D, WIDE)
    else:
        key = _key(lanes(ROWS, WIDE)[:, None], INTERLEAVED)  # (ROWS, 1)
        t0 = _load(x, x_l, x_d, key, rows, 0, PART, D, WIDE)
        t1 = t0
        t2 = t0
        t3 = t0
        if D > PART:
            t1 = _load(x, x_l, x_d, key, rows, PART, PART, D, WIDE)
        if D > 2 * PART:
            t2 = _load(x, x_l, x_d, key, rows, 2 * PART, PART, D, WIDE)
            t3 = _load(x, x_l, x_d, key, rows, 3 * PART, PART, D, WIDE)
    return t0, t1, t2, t3


@triton.jit
def _finish(
    z0, z1, z2, z3, t0, t1, t2, t3, at, y, y_b, y_h, y_l, y_d, descale, descale_b, descale_h, descale_n, amax, heads, L,
    count, largest, unit,
    D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """What `quantise_kernel` writes for block `at`, whose tiles are z0 … z3 times unit.

    t0 … t3: the same in 16 bits, or None where they are something else.
    """
    b, h, block, rows = _place(at, heads, L, count, ROWS)
    place = b * descale_b + h * descale_h
    if y is None or descale_n is not None:
        size = _finite(z0)
        if WORDS or D > PART:
            size = tl.maximum(size, _finite(z1))
        if WORDS or D > 2 * PART:
            size = tl.maximum(size, tl.maximum(_finite(z2), _finite(z3)))
        most = tl.max(size)
        most = tl.where(most > 0.0, most * unit, 0.0)  # of no finite numbers at all it is NaN
    else:
        most = tl.load(amax + place, mask=rows > 0, other=0.0)
    if y is None:
        tl.store(amax + at, most, mask=rows > 0)
    else:
        factor = _factor(most, largest)
        if descale_n is None:
            tl.store(descale + place, factor, mask=(block == 0) & (rows > 0))
        else:
            tl.store(descale + place + block * descale_n, factor, mask=rows > 0)
        scale = tl.div_rn(1.0, factor) * unit
        y += b * y_b + h * y_h + block.to(tl.int64) * ROWS * y_l
        if t0 is not None:
            z0 = widened(_held(t0))
        if WORDS:
            z1 = widened(_held(t1))
            z2 = widened(_held(t2))
            z3 = widened(_held(t3))
            lane_w = lanes(ROWS // 4, WIDE)[:, None]  # (ROWS / 4, 1)
            lane_d = lanes(PART, WIDE)[None, :]  # (1, PART)
            word = _word(z0 * scale, z1 * scale, z2 * scale, z3 * scale, y.dtype.element_ty)
            words = y.to(tl.pointer_type(tl.uint32), bitcast=True)
            ok = (lane_w < (rows + 15) // 16 * 4) & (lane_d < D)
            tl.store(words + lane_w + lane_d * (y_d // 4), word, mask=ok)
        else:
            lane_m = lanes(ROWS, WIDE)[:, None]  # (ROWS, 1)
            ok = lane_m < ((rows + 15) // 16 * 16 if PADDED else rows)
            _store(y, y_l, y_d, z0, scale, lane_m, ok, 0, PART, D, WIDE)
            if D > PART:
                _store(y, y_l, y_d, z1, scale, lane_m, ok, PART, PART, D, WIDE)
            if D > 2 * PART:
                _store(y, y_l, y_d, z2, scale, lane_m, ok, 2 * PART, PART, D, WIDE)
                _store(y, y_l, y_d, z3, scale, lane_m, ok, 3 * PART, PART, D, WIDE)


@triton.jit(do_not_specialize=["heads", "L", "count"])
def quantise_kernel(
    x, x_b, x_h, x_l, x_d,
    y, y_b, y_h, y_l, y_d,
    descale, descale_b, descale_h, descale_n, amax, signs, heads, L, count, largest,
    D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr,
    AHEAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Blocks of ROWS rows of one head, `count` in all.

    Strides are in elements, but for those of descale, which may be 0. y is None: their largest magnitude is written to
    amax, (B, H, blocks), and nothing else. Otherwise y and descale are written; descale_n is None: for the magnitudes
    in amax, which has the strides of descale. signs: None does not rotate. PADDED: y is stored by columns, with room
    for its rows up to a multiple of 16, which are written too: a thread then stores 16 rows at once. AHEAD: 0 has a
    program for each block; otherwise programs walk over the blocks, rotated ones, the loads of so many blocks ahead of
    their turn. WIDE: offsets within a tile need 64 bits.
    """
    WORDS: tl.constexpr = PADDED and signs is None
    unit = 1.0 if signs is None else D**-0.5  # what the rotation leaves to be multiplied by
    at = tl.program_id(0)
    if AHEAD == 0:
        t0, t1, t2, t3 = _read(
            at, x, x_b, x_h, x_l, x_d, heads, L, count, D, PART, ROWS, WORDS, INTERLEAVED, WIDE
        )  # fmt: skip
        if signs is None:
            _finish(
                widened(t0), widened(t1), widened(t2), widened(t3), t0, t1, t2, t3, at, y, y_b, y_h, y_l, y_d,
                descale, descale_b, descale_h, descale_n, amax, heads, L, count, largest, unit,
                D, PART, ROWS, PADDED, WORDS, WIDE,
            )  # fmt: skip
        else:
            z0, z1, z2, z3 = rotated(t0, t1, t2, t3, signs, None, None, None, None, D, PART)
            _finish(
                z0, z1, z2, z3, None, None, None, None, at, y, y_b, y_h, y_l, y_d,
                descale, descale_b, descale_h, descale_n, amax, heads, L, count, largest, unit,
                D, PART, ROWS, PADDED, WORDS, WIDE,
            )  # fmt: skip
    else:
        m0 = signed_matrix(signs, PART, x.dtype.element_ty)
        m1 = signed_matrix(signs + PART, PART, x.dtype.element_ty) if D > PART else None
        m2 = signed_matrix(signs + 2 * PART, PART, x.dtype.element_ty) if D > 2 * PART else None
        m3 = signed_matrix(signs + 3 * PART, PART, x.dtype.element_ty) if D > 2 * PART else None
        # A turn finishes the block of the turn before, and only then waits for its own. The compiler puts the loads
        # that are ahead at the end of a turn: so they have that time.
        programs = tl.num_programs(0)
        z0 = tl.zeros((ROWS, PART), tl.float32)
        z1 = z0
        z2 = z0
        z3 = z0
        for turn in tl.range(at, count + programs, programs, num_stages=AHEAD + 1):
            _finish(
                z0, z1, z2, z3, None, None, None, None, turn - programs, y, y_b, y_h, y_l, y_d,
                descale, descale_b, descale_h, descale_n, amax, heads, L, count, largest, unit,
                D, PART, ROWS, PADDED, WORDS, WIDE,
            )  # fmt: skip
            t0, t1, t2, t3 = _read(
                turn, x, x_b, x_h, x_l, x_d, heads, L, count, D, PART, ROWS, WORDS, INTERLEAVED, WIDE
            )  # fmt: skip
            n0, n1, n2, n3 = rotated(t0, t1, t2, t3, signs, m0, m1, m2, m3, D, PART)
            z0 = n0
            if D > PART:
                z1 = n1
            if D > 2 * PART:
                z2 = n2
                z3 = n3
