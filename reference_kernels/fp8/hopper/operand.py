"""P, from the registers in which wgmma leaves a result to those in which it takes an FP8 operand, rounded on the way.

Both deal the 32 bits of a register, and the columns of a row, to the four threads t of a quad. Of every 16 columns

    a result     gives thread t two pairs of neighbours, 2 t + (0, 1) and 8 + 2 t + (0, 1), as float32
    an operand   wants from it the four neighbours 4 t + (0 … 3), as 8 bits

`packed` makes operands of keys in their own order. The two pairs that a thread wants come from threads s and s + 1,
s = 2 t mod 4: the lower ones if t < 2, else the upper ones. A shuffle hands on one register a thread. So each first
packs the same pair of two groups of 16 columns into one register; in one shuffle the even threads then hand on their
lower pairs and the odd ones their upper pairs, in a second one the reverse, and two byte permutations sort what has
come. Per thread and 32 columns of a row: 4 conversions, 2 shuffles. convert_layout would do the same byte by byte, in
three times the instructions.

`packed_in_place` makes operands of keys in the order of interleaving.py, in which a thread's four values of a result
are the four that it is to hold: the conversions are all there is.

Between turns of the loop P is kept as int32, four numbers each: a loop would carry 8-bit numbers in a register each.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_ASM = """{
.reg .b16 lo, hi; .reg .b32 low, high, first, second; .reg .pred odd;
cvt.rn.satfinite.e4m3x2.f32 lo, $3, $2;
cvt.rn.satfinite.e4m3x2.f32 hi, $7, $6;
mov.b32 low, {lo, hi};
cvt.rn.satfinite.e4m3x2.f32 lo, $5, $4;
cvt.rn.satfinite.e4m3x2.f32 hi, $9, $8;
mov.b32 high, {lo, hi};
setp.ne.s32 odd, $10, 0;
selp.b32 first, high, low, odd;
selp.b32 second, low, high, odd;
shfl.sync.idx.b32 first, first, $11, 0x1c1f, 0xffffffff;
shfl.sync.idx.b32 second, second, $12, 0x1c1f, 0xffffffff;
prmt.b32 $0, first, second, $13;
prmt.b32 $1, first, second, $14;
}"""


_ASM_IN_PLACE = """{
.reg .b16 lo, hi;
cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
mov.b32 $0, {lo, hi};
}"""


@triton.constexpr_function
def _asm():
    return _ASM


@triton.constexpr_function
def _asm_in_place():
    return _ASM_IN_PLACE


@gluon.jit
def packed(p):
    """p (64, N) float32, a result of wgmma with N columns in E4M3: (64, N / 4) int32, four neighbours of a row each."""
    N: gl.constexpr = p.shape[1]
    # Columns are numbered 32 u + 16 h + 8 a + 2 t + b.
    x = gl.permute(gl.reshape(p, [64, N // 32, 2, 2, 4, 2]), (0, 1, 4, 2, 3, 5))  # row, u, t, h, a, b
    b0, b1 = gl.split(x)
    b0a0, b0a1 = gl.split(b0)
    b1a0, b1a1 = gl.split(b1)
    x00, y00 = gl.split(b0a0)  # x of h = 0, y of h = 1; then a, b
    x10, y10 = gl.split(b0a1)
    x01, y01 = gl.split(b1a0)
    x11, y11 = gl.split(b1a1)
    L: gl.constexpr = x00.type.layout
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    t = t + gl.zeros([64, N // 32, 4], gl.int32, layout=L)
    source = (t & 1) * 2 + t // 2
    ASM: gl.constexpr = _asm()
    w0, w1 = gl.inline_asm_elementwise(
        ASM,
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [x00, x01, x10, x11, y00, y01, y10, y11, t & 1, source, source ^ 1,
         gl.where(t < 2, 0x5410, 0x1054), gl.where(t < 2, 0x7632, 0x3276)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    return gl.reshape(gl.permute(gl.join(w0, w1), (0, 1, 3, 2)), [64, N // 4])


@gluon.jit
def packed_in_place(p):
    """p (64, N) as `packed` returns it, but with the columns of each 16 in the order of interleaving.py."""
    N: gl.constexpr = p.shape[1]
    # Columns are numbered 16 u + 8 h + 2 t + b.
    x = gl.permute(gl.reshape(p, [64, N // 16, 2, 4, 2]), (0, 1, 3, 2, 4))  # row, u, t, h, b
    b0, b1 = gl.split(x)
    x0, y0 = gl.split(b0)  # x of h = 0, y of h = 1
    x1, y1 = gl.split(b1)
    ASM: gl.constexpr = _asm_in_place()
    w = gl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [x0, x1, y0, y1], dtype=gl.int32, is_pure=True, pack=1)
    return gl.reshape(w, [64, N // 4])


@gluon.jit
def unpacked(w, LAYOUT: gl.constexpr):
    """What one of these returned as an operand: (64, N) E4M3 in LAYOUT."""
    x = gl.join(w, w)
    x = gl.reshape(gl.join(x, x), [64, w.shape[1] * 4])  # each register four times, to be taken for its four bytes
    x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)
