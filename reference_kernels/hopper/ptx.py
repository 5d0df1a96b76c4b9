"""Seven things that Gluon cannot say, in inline PTX.

A compiler moves instructions wherever the result stays the same. These are the places where the order, or the shape, of
the machine code decides the speed: each says what happened without it.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def _named_barrier_asm(op, ident):
    return f"bar.{op} {ident}, 256; mov.b32 $0, $1;"


@gluon.jit
def named_barrier(OP: gl.constexpr, ID: gl.constexpr, x):
    """A barrier between two warp groups (256 threads): one waits (OP "sync") until the other has come by ("arrive").

    Gluon has only barriers in shared memory. x: any int32; an asm block needs an operand.
    """
    ASM: gl.constexpr = _named_barrier_asm(OP, ID)
    gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def before_next_wait(x):
    """x, unchanged, computed before the next wait for a matrix product. x must not be negative.

    Without it ptxas moves that wait up, above the exponentials that were to run meanwhile. A store that never happens,
    since x >= 0, holds them in place.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 z; mov.b32 z, 0; setp.lt.f32 p, $1, 0f00000000;"
        "  @p st.shared.f32 [z], $1; mov.b32 $0, $1; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def known_here(x):
    """x, an int32, of which LLVM knows nothing before this place: what follows from it stays behind a loop's head.

    A mask that is the same for all tiles is otherwise computed before the loop over them, and its bits are kept in
    registers that the products need.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rounded_pairs(p, dtype: gl.constexpr):
    """p (float32) in fp16 or bf16. LLVM would move a plain cast over the back edge of the loop, and keep p in float32:
    twice the registers."""
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.bfloat16, True, 2)
    else:
        x = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.float16, True, 2)
    return x


@triton.constexpr_function
def _scale_rows_asm(n):
    test = (
        f"{{ .reg .pred p; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;"
        "vote.sync.any.pred p, p, 0xffffffff; @!p bra SKIP;\n"
    )
    return test + "".join(f"mul.f32 ${k}, ${k}, ${2 * n + k};\n" for k in range(n)) + "SKIP:\n}"


@triton.constexpr_function
def _scale_rows_constraints(n):
    return ",".join(["=r"] * n + [str(i) for i in range(n)] + ["r"] * n)


@gluon.jit
def scale_rows(acc, factor):
    """acc times factor (of the same shape, the same in every column), skipped by a warp whose rows all have factor 1.

    Gluon's `if` needs a scalar of the whole warp group; a warp knows its 16 rows by a vote. Of a thread's 32 elements
    the first and the third belong to its two rows.
    """
    ASM: gl.constexpr = _scale_rows_asm(32)
    CONSTRAINTS: gl.constexpr = _scale_rows_constraints(32)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, factor], dtype=gl.float32, is_pure=True, pack=32)


@gluon.jit
def finish_stores(x):
    """Wait until this thread's TMA stores have been written. (Gluon's store_wait waits until they have been read.)

    x: any int32.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def product(x, y):
    """x y, rounded. In a sum, a plain one becomes part of a multiply-add, which does not round it."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, True, 1)
