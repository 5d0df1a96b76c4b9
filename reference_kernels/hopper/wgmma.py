"""Products of a warp group (wgmma), and how it holds what goes into them and comes out, in registers.

Of a result (64, n) a thread holds 2 rows, and of each of them 2 of every 8 columns. With a row as 16 w + 8 x + y and a
column as 8 a + 2 b + c, the thread 4 y + b of warp w holds all a, x and c.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.constexpr_function
def result_layout(n):
    """The layout of a wgmma result (64, n)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.jit
def as_operand(x, N: gl.constexpr):
    """x (64, k), 16 bits an element, laid out as a result, as the left operand of a product (64, N)."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, result_layout(N), 2)
    return gl.convert_layout(x, LAYOUT)


@gluon.jit
def start_product(a, b):
    """Start a b (64, n), float32: a (64, k) and b (k, n) in shared memory."""
    N: gl.constexpr = b.shape[1]
    zero = gl.zeros([64, N], gl.float32, result_layout(N))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def flattened(x):
    """x (64, 64) as (4096,) in the order a, w, y, b, x, c: each thread has 4 neighbours, each warp 128.

    No data moves between threads, and stores are of 16 bytes a thread.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    flat = x.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([4096])
    return gl.convert_layout(flat, LAYOUT, assert_trivial=True)


@gluon.jit
def load_flattened(tile):
    """(64, 64) from a tile (4096,) of shared memory that holds it flattened."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    x = tile.load(LAYOUT).reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, 64])
    return gl.convert_layout(x, result_layout(64), assert_trivial=True)
