# ruff: noqa: E741  (l is the name of the denominator in the papers)
"""The online softmax: a sum of exponentials, and what it weighs, from one pass over scores that come in tiles.

What is known of a row after some of its keys is a triple of its running maximum m, its denominator and its numerator,

    m = max_j s_j        l = sum_j exp(s_j - m)        acc = sum_j exp(s_j - m) v_j,

from which o = acc / l and lse = m + log(l). Two triples over disjoint keys merge, in any order:

    m = max(m1, m2)      l = exp(m1 - m) l1 + exp(m2 - m) l2      acc likewise.

A step of the loop is a merge with one tile of keys; an attention sink is a merge with a key whose score is the sink and
whose value is 0. The neutral triple is (-inf, 0, 0), which is also the row that sees no key: o = 0, lse = -inf.

Exponentials are base 2, one instruction on the GPU: exp(x) = exp2(x log2 e). Where nothing else is added to q k^T, the
factor scale log2 e, here `unit`, is applied in the exponent, s unit - m unit: one fused multiply-add for each score.

m, l, acc: float32. No sentinel stands for -inf: a row whose finite scores lie below the sentinel would lose them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import NEG_INF


@triton.jit
def online_step(s, unit, m, l, CAN_HIDE: tl.constexpr):
    """Merge the scores s (M, N) of one tile into m, l (M,).

    unit > 0: s is in units of log2(e) / unit. CAN_HIDE: s may hold -inf, so that a row may still have seen nothing.
    Returns p (M, N), the factor alpha (M,) for what was accumulated before, and the new m and l.
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = m_new * unit
    if CAN_HIDE:
        # exp2(-inf - 0) is 0; exp2(-inf + inf) would be NaN.
        shift = tl.where(m_new == NEG_INF, 0.0, shift)
    p = tl.exp2(s * unit - shift[:, None])
    alpha = tl.exp2(m * unit - shift)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def merge(m1, l1, m2, l2):
    """Merge two triples. m1, l1, m2, l2 (M,), m in log2. Returns the factors (M,) of acc1 and acc2, and m and l."""
    m = tl.maximum(m1, m2)
    shift = tl.where(m == NEG_INF, 0.0, m)
    alpha1 = tl.exp2(m1 - shift)
    alpha2 = tl.exp2(m2 - shift)
    return alpha1, alpha2, m, l1 * alpha1 + l2 * alpha2
