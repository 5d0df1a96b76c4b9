"""What the stored numbers are worth: descales, and how they enter the softmax without touching O.

With q = dq Q8, k = dk_t K8, v = dv_t V8 in block t of keys, and w the largest dv_t of the head:

    scores          unit_t S8            unit_t = scale log2(e) dq dk_t, applied in the exponent
    weights of V8   P r_t                r_t = dv_t / w <= 1, applied in the exponent as well: + log2 r_t
    at the end      O = w acc / l

so that tiles of V with different scales are added up in one accumulator, which no scale is ever applied to, for no
instruction an element more. l must not see r_t: a block's row sums, four numbers a row, are divided by it.

A unit of 0 (tiny inputs: a product of two descales below 2^-126) would turn hidden scores, -inf, into NaN. It is kept
at 2^-100, with which scores are as good as 0.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against these types.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...hopper.channel import Channel
from ...hopper.gluon_compat import aggregate, tma_load

LEAST_UNIT = gl.constexpr(2.0**-100)
LEAST_RATIO = gl.constexpr(2.0**-60)
"""Of r_t. P is at most 2^8 where E4M3 sees it, and what is below 2^-10 there is 0: so is all of such a block."""


@aggregate
class Scales:
    """Descales as pointers with strides, any of them 0: q, k, v (B, H, blocks), top (B, Hkv), v's largest."""

    q: gl.tensor
    q_b: gl.tensor
    q_h: gl.tensor
    q_n: gl.tensor
    k: gl.tensor
    k_b: gl.tensor
    k_h: gl.tensor
    k_n: gl.tensor
    v: gl.tensor
    v_b: gl.tensor
    v_h: gl.tensor
    v_n: gl.tensor
    top: gl.tensor
    top_b: gl.tensor
    top_h: gl.tensor
    scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, q_b, q_h, q_n, k, k_b, k_h, k_n, v, v_b, v_h, v_n, top, top_b, top_h, scale):
        self.q, self.q_b, self.q_h, self.q_n = q, q_b, q_h, q_n
        self.k, self.k_b, self.k_h, self.k_n = k, k_b, k_h, k_n
        self.v, self.v_b, self.v_h, self.v_n = v, v_b, v_h, v_n
        self.top, self.top_b, self.top_h = top, top_b, top_h
        self.scale = scale

    @gluon.jit
    def of_rows(self, batch, head, kv_head, row, SCALE_BLOCK: gl.constexpr):
        """scale log2(e) dq for the rows from `row` on, and w for their keys."""
        dq = gl.load(self.q + batch * self.q_b + head * self.q_h + row // SCALE_BLOCK * self.q_n)
        return self.scale * dq, gl.load(self.top + batch * self.top_b + kv_head * self.top_h)

    @gluon.jit
    def of_keys(self, batch, kv_head, key, SCALE_BLOCK: gl.constexpr, V_BLOCKS: gl.constexpr):
        """dk and dv of the block of keys that `key` lies in: loads, to be asked for long before they are needed.

        Without V_BLOCKS dv is not looked at.
        """
        block = key // SCALE_BLOCK
        dk = gl.load(self.k + batch * self.k_b + kv_head * self.k_h + block * self.k_n)
        dv = dk
        if V_BLOCKS:
            dv = gl.load(self.v + batch * self.v_b + kv_head * self.v_h + block * self.v_n)
        return dk, dv


@gluon.jit
def unit_and_ratio(unit, w, dk, dv, V_BLOCKS: gl.constexpr):
    """unit_t and r_t of a block, from what of_rows and of_keys returned."""
    r = 1.0
    if V_BLOCKS:
        r = gl.maximum(dv / w, LEAST_RATIO)
    return gl.maximum(unit * dk, LEAST_UNIT), r


@aggregate
class Columns:
    """A channel (channel.py) for V as FP8 products read it: tiles (D, BLOCK_N) of (B, H, D, L), side by side in L."""

    ring: Channel

    @gluon.constexpr_function
    def __init__(self, ring):
        self.ring = ring

    @gluon.jit
    def fill(self, descriptor, batch, head, column, count):
        """Producer: tile number `count` from `column` of one head. Columns beyond the tensor arrive as zeros."""
        slot = count % self.ring.stages
        mbarrier.wait(self.ring.empty.index(slot), ((count // self.ring.stages) & 1) ^ 1)
        mbarrier.expect(self.ring.full.index(slot), descriptor.block_type.nbytes)
        tma_load(descriptor, [batch, head, 0, column], self.ring.full.index(slot), self.ring.tiles.index(slot))

    @gluon.jit
    def take(self, count):
        """Consumer: wait for tile number `count`, return it as (BLOCK_N, D)."""
        return self.ring.take(count).permute((1, 0))

    @gluon.jit
    def release(self, count):
        """Consumer: tile number `count` has been read."""
        self.ring.release(count)
