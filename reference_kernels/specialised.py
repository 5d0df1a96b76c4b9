# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""The forward pass in plain Triton, with warp specialisation left to the compiler: tl.range(..., warp_specialize=True).

In the kernel of forward.py every warp loads, multiplies and computes the softmax in turn. Here the compiler divides the
warps of a program: one group asks the TMA for the next tiles of K and V, the others work on those that have come, each
on its share of the rows. hopper/stage2 says by hand what is done here by one keyword.

The keyword is a wish. Whether it was granted is seen only in the compiled kernel (`ttg.warp_specialize` in its TTGIR),
and the compile lane looks: a kernel that lost it is right, and slow. What Triton 3.6 and 3.9 grant:

    sm_90     a single loop over the keys, four warps, tiles of two dimensions, whose descriptors the kernel makes
              itself (`device_kernel`). With eight warps nothing is specialised, and nothing says so. Two loops, one for
              tiles that need a mask and one for those that need none (forward.py), end the compiler. Descriptors made
              on the host gave wrong results in 3.6.
    sm_100    descriptors made on the host too (`host_kernel`), which saves the kernel making them.

Specialised is not yet right: on sm_90 the compiler cuts the rows of a program in two, after the frontend. Three traps:

    1  The offset of a copy by the TMA is moved on by 64 rows for the second group of warps, and with it whatever tensor
       that scalar was added to, whose rows had moved already: masks and stores hit 64 rows too far (3.6 and 3.9; the
       mapping of `coordVal` in Triton's WSDataPartition.cpp). So rows are counted from the block's first, and that
       first row is a term of other scalars only.
    2  64 rows cannot be cut, for wgmma multiplies no fewer. Both groups then compute all of them: right, and twice the
       work, with as many partitions as ever. So a block has 128 rows (3.6 and 3.9).
    3  With three buffers (num_stages 3) and D 64, Triton 3.6 gave NaN on an H200 in most calls with more than two
       tiles of keys. The cause is not known: its TTGIR waits where it should. So there are two buffers.

The first two are read from the TTGIR by tests/kernels/partition_rows.py; the third is seen on a GPU only.

So there is one loop, and a mask is applied in all of its tiles or in none. The rest is forward.py's: the same online
softmax, the keys from first to last. Nothing is written where no row is: the TMA ends at the end of a head.

bfloat16 or float16, D = Dv of 64 or 128, causal (bottom-right) or not, grouped heads, any lengths. No backward of its
own. Accumulators: acc, m, l and S float32; P is rounded to the dtype of V for its product.
"""

from __future__ import annotations

import contextvars
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .cases import CompileCase
from .configs import Config
from .launch import as_grid, options, tma_refusal, tma_strides
from .online import online_step
from .tiles import INTERPRETED, LN2, LOG2E, NEG_INF, dot, rounded

Form = Literal["device", "host"]
"""Where the descriptors of the TMA are made."""

# (form, D): the tile; the warps are those of one kind of work. What compiles to specialised warps without spills (for
# sm_100, D 128, not with four warps), on sm_90 within traps 2 and 3; not timed on either architecture.
TABLE: dict[tuple[Form, int], Config] = {
    ("device", 64): Config(128, 128, 4, 2),
    ("device", 128): Config(128, 128, 4, 2),
    ("host", 64): Config(128, 128, 4, 3),
    ("host", 128): Config(128, 128, 8, 2),
}
_INTERPRETER = Config(64, 32, 4, 1)

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
HEAD_DIMS = (64, 128)


@triton.jit
def rows_from(x, batch, head, row, ROWS: tl.constexpr, D: tl.constexpr, HOST: tl.constexpr):
    """ROWS rows of one head, (ROWS, D), zeros beyond its end. x: of (B, H, L, D) if from the HOST, else of (L, D)."""
    if HOST:  # noqa: SIM108  (constexpr: one of the two is compiled)
        tile = x.load([batch, head, row, 0]).reshape([ROWS, D])
    else:
        tile = x.load([row, 0])
    return tile


@triton.jit
def attend(
    q, k, v, o, lse, unit, batch, head, kv_head, heads, start, Lq, Lk,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr,
    HOST: tl.constexpr,
):  # fmt: skip
    """The rows start … start + BLOCK_M - 1 of one head, from first to last. q, k, v, o: descriptors.

    unit: scale times log2(e). TAIL: Lk is not a multiple of BLOCK_N.

    start is not added to a tensor, but to other scalars (trap 1).
    """
    rows = tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    keys = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    diagonal = start + Lk - Lq  # the last key that row 0 sees
    # (BLOCK_M, D)
    qt = rows_from(q, batch, head, start, BLOCK_M, D, HOST)
    # (BLOCK_M, D), (BLOCK_M,), (BLOCK_M,)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    hi = Lk
    if CAUSAL:
        hi = tl.minimum(tl.maximum(diagonal + BLOCK_M, 0), Lk)
    for n in tl.range(0, hi, BLOCK_N, warp_specialize=True):
        # (BLOCK_N, D)
        kt = rows_from(k, batch, kv_head, n, BLOCK_N, D, HOST)
        # (BLOCK_M, BLOCK_N)
        s = dot(qt, tl.trans(kt), None, "ieee")
        if CAUSAL:
            # No row sees a key beyond Lk, but for rows beyond Lq.
            s = tl.where(n + keys <= rows[:, None] + diagonal, s, NEG_INF)
        elif TAIL:
            s = tl.where(n + keys < Lk, s, NEG_INF)
        p, alpha, m, l = online_step(s, unit, m, l, CAUSAL)
        # (BLOCK_N, D)
        vt = rows_from(v, batch, kv_head, n, BLOCK_N, D, HOST)
        # (BLOCK_M, D)
        acc = dot(rounded(p, vt.dtype), vt, acc * alpha[:, None], "ieee")
    # A row that saw nothing has acc = 0, l = 0, m = -inf: o = 0, lse = -inf.
    l = tl.where(l == 0.0, 1.0, l)
    tile = rounded(acc / l[:, None], qt.dtype)
    if HOST:
        o.store([batch, head, start, 0], tile.reshape([1, 1, BLOCK_M, D]))
    else:
        o.store([start, 0], tile)
    lse += (batch * heads + head).to(tl.int64) * Lq + start
    tl.store(lse + rows, (m * unit + tl.log2(l)) * LN2, mask=rows < Lq - start)


@triton.jit
def my_block(heads, Lq, BLOCK_M: tl.constexpr):
    """Batch, query head and first row of this program; the last rows of a head, which see most, go first."""
    blocks = tl.cdiv(Lq, BLOCK_M)
    head = tl.program_id(0) // blocks
    return head // heads, head % heads, (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M


@triton.jit
def head_of(x, x_b, x_h, x_l, batch, head, length, ROWS: tl.constexpr, D: tl.constexpr):
    """A descriptor of one head, (length, D), in blocks of ROWS rows."""
    x += batch.to(tl.int64) * x_b + head.to(tl.int64) * x_h
    return tl.make_tensor_descriptor(x, [length, D], [x_l, 1], [ROWS, D])


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def device_kernel(
    q, q_b, q_h, q_l, k, k_b, k_h, k_l, v, v_b, v_h, v_l, o, o_b, o_h, o_l, lse, unit, heads, group, Lq, Lk,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK_M query rows of one head; its program makes the descriptors.

    Strides are in elements, that of D is 1. o and lse (contiguous (B, Hq, Lq)) are written; lse in natural logarithm.
    """
    batch, head, start = my_block(heads, Lq, BLOCK_M)
    attend(
        head_of(q, q_b, q_h, q_l, batch, head, Lq, BLOCK_M, D),
        head_of(k, k_b, k_h, k_l, batch, head // group, Lk, BLOCK_N, D),
        head_of(v, v_b, v_h, v_l, batch, head // group, Lk, BLOCK_N, D),
        head_of(o, o_b, o_h, o_l, batch, head, Lq, BLOCK_M, D),
        lse, unit, batch, head, head // group, heads, start, Lq, Lk, D, BLOCK_M, BLOCK_N, CAUSAL, TAIL, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def host_kernel(
    q, k, v, o, lse, unit, heads, group, Lq, Lk,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """The same with descriptors from the host: q, o of (B, Hq, Lq, D), k, v of (B, Hkv, Lk, D)."""
    batch, head, start = my_block(heads, Lq, BLOCK_M)
    attend(
        q, k, v, o, lse, unit, batch, head, head // group, heads, start, Lq, Lk,
        D, BLOCK_M, BLOCK_N, CAUSAL, TAIL, True,
    )  # fmt: skip


def form_for(device: torch.device) -> Form | None:
    """The form that is specialised on this device, None if neither is; in the interpreter, which has no warps, both are
    right."""
    if INTERPRETED.value:
        return "device"
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return "device" if (major, minor) == (9, 0) else "host" if major == 10 else None


def supports(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> str | None:
    """Why these kernels cannot run on q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D); None if they can.

    The tensors fit together as api.py checks; all must be as the TMA reads them (launch.tma_refusal).
    """
    what = "the specialised kernels"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype}: {what} multiply float16 and bfloat16"
    if q.shape[3] not in HEAD_DIMS or v.shape[3] != q.shape[3]:
        return f"head dims D {q.shape[3]}, Dv {v.shape[3]}: {what} have equal ones of 64 and 128"
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        return f"scale {scale}: {what} fold a positive one into the exponent"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if said := tma_refusal(name, x):
            return said
    if form_for(q.device) is None:
        return "q is not on a GPU of compute capability 9.0 or 10"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    form: Form | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """o (B, Hq, Lq, D) in q's dtype and lse (B, Hq, Lq) float32, natural log; rows without keys: 0 and -inf.

    q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D); query head h reads kv head h // (Hq // Hkv); causal is bottom-right.
    scale: None takes D ** -0.5. form, config: None takes the device's and the table's.
    Raises NotImplementedError with the reason of `supports`.
    """
    if reason := supports(q, k, v, scale=scale):
        raise NotImplementedError(reason)
    (batch, heads, lq, d), lk = q.shape, k.shape[2]
    form = form or form_for(q.device)
    assert form is not None
    c = config or (_INTERPRETER if INTERPRETED.value else TABLE[form, d])
    o = torch.empty((batch, heads, lq, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, lq), dtype=torch.float32, device=q.device)
    numbers = (lse, (d**-0.5 if scale is None else scale) * LOG2E.value, heads, heads // k.shape[1], lq, lk)
    constants: dict[str, Any] = {"D": d, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "CAUSAL": causal and lq > 1}
    constants["TAIL"] = lk % c.block_n != 0
    grid = as_grid(batch * heads * triton.cdiv(lq, c.block_m))
    tensors = ((q, c.block_m), (k, c.block_n), (v, c.block_n), (o, c.block_m))

    def launch() -> None:
        if form == "host":
            given: list[Any] = [
                TensorDescriptor(x, list(x.shape), [*tma_strides(x), 1], [1, 1, rows, d]) for x, rows in tensors
            ]
            host_kernel[grid](*given, *numbers, **constants, **options(c))
        else:
            # What a kernel writes its descriptors to.
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=q.device))
            given = [argument for x, _ in tensors for argument in (x, *tma_strides(x))]
            device_kernel[grid](*given, *numbers, **constants, **options(c))

    contextvars.copy_context().run(launch)  # the allocator is this launch's alone
    return o, lse


@dataclass(frozen=True)
class SpecialisedCase(CompileCase):
    """A case whose warps must be specialised. capabilities: for no other is that known to happen."""

    specialised: bool = True
    instructions: tuple[str, ...] = ("tma",)
    capabilities: tuple[int, ...] = (90,)


def compile_case(form: Form, dtype: str, d: int, *, causal: bool = False, tail: bool = False) -> SpecialisedCase:
    """One form for one dtype ("bf16") and head dimension, in the table's tile. tail: any lengths."""
    c = TABLE[form, d]
    signature: dict[str, str] = {}
    for name, rows in (("q", c.block_m), ("k", c.block_n), ("v", c.block_n), ("o", c.block_m)):
        if form == "host":
            signature[name] = f"tensordesc<{dtype}[1, 1, {rows}, {d}]>"
        else:
            signature |= {name: f"*{dtype}"} | {f"{name}_{axis}": "i32:16" for axis in "bhl"}
    signature |= {"lse": "*fp32", "unit": "fp32"} | dict.fromkeys(("heads", "group", "Lq", "Lk"), "i32")
    constants = {"D": d, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "CAUSAL": causal, "TAIL": tail}
    said = [word for word, on in (("causal", causal), ("tail", tail)) if on]
    return SpecialisedCase(
        "-".join(["specialised", form, dtype, f"d{d}", *said]),
        device_kernel if form == "device" else host_kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        constants,
        c.num_warps,
        c.num_stages,
        capabilities=(90,) if form == "device" else (100,),
    )


def compile_cases() -> list[SpecialisedCase]:
    """Both forms, each on its architecture: both head dimensions, dense and causal, with and without a tail."""
    return [
        compile_case(form, dtype, d, causal=causal, tail=tail)
        for form in ("device", "host")
        for dtype, d, causal, tail in (
            ("bf16", 64, True, False),
            ("fp16", 64, False, True),
            ("fp16", 128, False, False),
            ("bf16", 128, True, True),
        )
    ]
