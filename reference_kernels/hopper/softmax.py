"""The softmax of one block of keys, in registers: masks, row maximum, exponentials, row sums.

S is a (64, BLOCK_N) block of scores q k^T, not yet scaled, in the layout in which wgmma leaves its result: a thread
holds 2 rows, and of each of them 2 of every 8 columns; the four threads of a quad share a row. m is in the units of S
(the scale is applied in the exponent), and l is kept as one partial sum for each thread, (64, 4), which only the end
of the tile adds up: a sum over the quad in each block would cost shuffles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .ptx import known_here

NEG_INF = gl.constexpr(float("-inf"))


@gluon.jit
def rows_like(x, ref):
    """x (64,), one value a row, as a column in the layout of ref, to be broadcast over it."""
    return gl.convert_layout(x, gl.SliceLayout(1, ref.type.layout))[:, None]


@gluon.jit
def hide_after(s, last, DIAGONAL: gl.constexpr):
    """-inf beyond column `last` of the first row of s (64, N), and of each further row one column later if DIAGONAL.

    The columns of a wgmma result are numbered 8 a + 2 b + c, where a counts registers and b the threads of a quad.
    Compared as 8 a with what is left of `last`, the one side is a constant in the instruction; whole column numbers
    would be N / 4 registers, which LLVM computes once, before all loops, and keeps.
    """
    x = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    X: gl.constexpr = x.type.layout
    a = gl.arange(0, s.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    b = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, X))))
    c = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, X))))
    left = last - 2 * b[None, None, :, None] - c[None, None, None, :]
    if DIAGONAL:
        r = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, X))))
        left = left + r[:, None, None, None]
    x = gl.where(8 * a[None, :, None, None] <= left, x, NEG_INF)
    return gl.convert_layout(gl.reshape(x, s.shape), s.type.layout)


@gluon.jit
def hide_before(s, first):
    """-inf before column `first` of s (64, N), as in hide_after."""
    x = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    X: gl.constexpr = x.type.layout
    a = gl.arange(0, s.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    b = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, X))))
    c = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, X))))
    left = known_here(first) - 2 * b[None, None, :, None] - c[None, None, None, :]
    x = gl.where(8 * a[None, :, None, None] >= left, x, NEG_INF)
    return gl.convert_layout(gl.reshape(x, s.shape), s.type.layout)


@gluon.jit
def probabilities(s, m, scale, HIDDEN: gl.constexpr):
    """exp2((s - m) scale), in one multiply-add and one exponential each. HIDDEN: a row may have seen no key yet."""
    shift = m * scale
    if HIDDEN:
        shift = gl.where(m == NEG_INF, 0.0, shift)  # exp2(-inf + inf) would be NaN
    return gl.exp2(s * scale - rows_like(shift, s))


@gluon.jit
def partial_sums(p):
    """The sum of each thread's own columns, (64, 4): the columns of a wgmma result are numbered 8 a + 2 thread + b."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def raised_maximum(s, m, scale, HIDDEN: gl.constexpr):
    """The reference for the exponentials after block s, and the factor for what was summed before it.

    The old one is kept until the maximum is more than 2^8 above it: any reference gives the same softmax, fp32 sums and
    16-bit P have the range for 2^8, and most blocks then rescale nothing.
    """
    top = gl.maximum(m, gl.convert_layout(gl.max(s, 1), m.type.layout))
    top = gl.where((top - m) * scale <= 8.0, m, top)
    factor = gl.exp2((m - top) * scale)
    if HIDDEN:
        factor = gl.where(top == NEG_INF, 1.0, factor)
    return top, factor
