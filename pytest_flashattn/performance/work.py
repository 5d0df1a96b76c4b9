"""How much work a case is: operations and bytes, exact for causal, windows and Lq != Lk. Torch-free.

Operations are those of the matrix products over the pairs (query, key) that the case makes visible, a multiply-add
counted as two; a kernel that computes hidden pairs or recomputes scores gets no credit for it (Dao et al., 2022):

    forward    Q K^T, P V                                2 D + 2 Dv a pair
    backward   Q K^T, dO V^T, P^T dO, dS K, dS^T Q       6 D + 4 Dv a pair

Bytes are the least traffic: each tensor that must be read or written, once.
"""

from __future__ import annotations

import functools

from ..cases import Case

DIRECTIONS: tuple[str, ...] = ("forward", "backward", "forward_backward")
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}


def flops(case: Case, direction: str, alignment: str = "bottom-right") -> int:
    """Operations of one call. Raises KeyError for an unknown direction."""
    a_pair = {
        "forward": 2 * case.d + 2 * case.dv,
        "backward": 6 * case.d + 4 * case.dv,
        "forward_backward": 8 * case.d + 6 * case.dv,
    }
    return a_pair[direction] * case.batch * case.heads * visible_pairs(case, alignment)


def visible_pairs(case: Case, alignment: str = "bottom-right") -> int:
    """Pairs (query, key) of one head that causal and window leave; a mask or bias is data and hides nothing here."""
    return sum(last - first + 1 for first, last in _ranges(case, alignment))


def least_bytes(case: Case, direction: str, alignment: str = "bottom-right") -> int:
    """Bytes that one call must move: forward reads q, k, v and writes o; backward reads those four, dO and the
    log-sum-exp (float32) and writes dq, dk, dv. Keys that no row sees are not read; an additive bias is read in each
    direction.
    """
    item = ITEMSIZE[case.dtype]
    rows, keys = case.batch * case.heads * case.q, case.batch * case.kv_heads * _seen_keys(case, alignment)
    all_keys = case.batch * case.kv_heads * case.k
    lse, bias = 4 * rows, _bias_bytes(case)
    qkv = item * (rows * case.d + keys * (case.d + case.dv))
    out = item * rows * case.dv
    forward = qkv + out + bias
    backward = qkv + 2 * out + lse + bias + item * (rows * case.d + all_keys * (case.d + case.dv))
    return {"forward": forward, "backward": backward, "forward_backward": forward + lse + backward}[direction]


@functools.lru_cache(maxsize=64)
def _ranges(case: Case, alignment: str) -> tuple[tuple[int, int], ...]:
    """First and last visible key of each row that sees any."""
    shift = case.k - case.q if alignment == "bottom-right" else 0
    left, right = case.window or (None, None)
    if case.causal:
        right = 0 if right is None else min(right, 0)
    found = []
    for stand in range(shift, shift + case.q):
        first = 0 if left is None else max(0, stand - left)
        last = case.k - 1 if right is None else min(case.k - 1, stand + right)
        if first <= last:
            found.append((first, last))
    return tuple(found)


def _seen_keys(case: Case, alignment: str) -> int:
    # The diagonal moves by one key a row, so that what the rows see together has no gap.
    ranges = _ranges(case, alignment)
    return max(last for _, last in ranges) - min(first for first, _ in ranges) + 1 if ranges else 0


def _bias_bytes(case: Case) -> int:
    pattern = case.bias or case.mask
    if pattern is None:
        return 0
    size = ITEMSIZE[case.dtype] if case.bias else 1
    for letter, extent in zip(pattern, (case.batch, case.heads, case.q, case.k), strict=True):
        size *= extent if letter != "1" else 1
    return size
