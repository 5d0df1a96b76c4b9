"""What the stored numbers are worth: descales, and how they enter the softmax without touching O.

With q = dq Q8, k = dk_t K8, v = dv_t V8 in block t of keys, and w the largest dv_t of the head:

    scores          unit_t S8            unit_t = scale log2(e) dq dk_t, applied in the exponent
    sums            acc_t = acc_(t-1) r_(t-1) / r_t + P_t V8_t       r_t = dv_t / w <= 1
    at the end      O = w r_t acc_t / l  for the last t

so that tiles of V with different scales are added up in one accumulator, held in units of the latest of them. It has a
factor for the running maximum in any case: another one in it costs a product a row. P and l see no scale of V, and
so P = 1, the largest of a row, is a number of E4M3 and is rounded to itself.

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
LEAST_WEIGHT = gl.constexpr(2.0**-100)
"""Of w, where it is inverted."""
LEAST_RATIO = gl.constexpr(2.0**-60)
"""Of r_t, or a change of units could be more than float32 holds. A block that is lighter still weighs as much as this:
nothing, next to one of r_t = 1."""


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
        """scale log2(e) dq for the rows from `row` on, w for their keys, and 1 / w."""
        dq = gl.load(self.q + batch * self.q_b + head * self.q_h + row // SCALE_BLOCK * self.q_n)
        w = gl.load(self.top + batch * self.top_b + kv_head * self.top_h)
        return self.scale * dq, w, reciprocal(gl.maximum(w, LEAST_WEIGHT))

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
def reciprocal(x):
    """1 / x for a normal number, in one instruction; a division would see to the others as well."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def unit_and_ratio(unit, inverse, dk, dv):
    """unit_t and r_t of a block, from what of_rows and of_keys returned; inverse: 1 / w."""
    return gl.maximum(unit * dk, LEAST_UNIT), gl.maximum(dv * inverse, LEAST_RATIO)


@gluon.jit
def next_units(unit, inverse, dk, dv, before, V_BLOCKS: gl.constexpr):
    """unit_and_ratio, and what acc is multiplied by from a block of r_t = `before` to this one."""
    unit, after = unit_and_ratio(unit, inverse, dk, dv)
    change = 1.0
    if V_BLOCKS:
        change = before * reciprocal(after)
    return unit, after, change


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
