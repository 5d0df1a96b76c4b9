"""Causal masks and windows: which tiles need a mask, which need none, and which need not be computed.

Row i stands on the key diag(i) = i + Lk - Lq (the two sequences end together) and sees key j when

    diag(i) - left  <=  j  <=  diag(i) + right          causal: right = 0

A block of rows meets the tiles of keys in five bands, from left to right:

    | hidden | masked | full | masked | hidden |
    0        lo    full_lo  full_hi   hi       Lk

Hidden tiles are skipped: half of the work of a causal problem. Full tiles are seen by every row of the block and need
no mask at all; of N / BLOCK_N tiles only one or two lie on either edge of the band and need one. (Triton's tutorial
calls full tiles off-band, stage 1, and masked ones on-band, stage 2.) The tile that reaches beyond the last key is
masked too.

With rows and keys exchanged the same holds: key j stands on row j + Lq - Lk and is seen by the rows from `right` before
to `left` after. So one function serves the forward, dQ (rows resident, keys streamed) and dK, dV (keys resident).

No accumulators here: integers of 32 bits.

    python -m reference_kernels.causal          tiles of each kind, error of the causal forward
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cases import CompileCase


@triton.jit
def bands(start, own, other, before, after, OWN_BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The bands of the block `start … start + OWN_BLOCK - 1` of a sequence of length own, in one of length other.

    before, after: how far from its diagonal an element sees; None: without bound.
    Returns lo, full_lo, full_hi, hi. Tiles of STEP begin at multiples of it: [lo, full_lo) masked, [full_lo, full_hi)
    full, [full_hi, hi) masked. Any of them may be empty; hi need not be a multiple of STEP.
    """
    first = start + other - own  # the diagonal of the block's first element, and of its last one
    last = tl.minimum(start + OWN_BLOCK, own) - 1 + other - own
    lo = 0
    full_lo = 0
    hi = other
    full_hi = other // STEP * STEP
    if after is not None:
        hi = tl.minimum(tl.maximum(last + after + 1, 0), other)
        full_hi = tl.minimum(tl.maximum(first + after + 1, 0) // STEP * STEP, full_hi)
    if before is not None:
        lo = tl.maximum(first - before, 0) // STEP * STEP
        full_lo = tl.minimum((tl.maximum(last - before, 0) + STEP - 1) // STEP * STEP, tl.maximum(hi, lo))
    # Where full_lo is hi, the range below it ends the streaming: the rest is empty.
    return lo, full_lo, tl.maximum(full_hi, full_lo), hi


def count_tiles(lq: int, lk: int, left: int | None, right: int | None, block_m: int, block_n: int) -> dict[str, int]:
    """How many tiles of the score matrix are full, masked and skipped: `bands` in plain Python, for people."""
    counts = {"full": 0, "masked": 0, "skipped": 0}
    for m in range(0, lq, block_m):
        rows = (m + lk - lq, min(m + block_m, lq) - 1 + lk - lq)
        for n in range(0, lk, block_n):
            end = n + block_n - 1
            none = (right is not None and n > rows[1] + right) or (left is not None and end < rows[0] - left)
            inside = (right is None or end <= rows[0] + right) and (left is None or n >= rows[1] - left)
            counts["skipped" if none else "full" if inside and end < lk else "masked"] += 1
    return counts


def compile_cases(capability: int) -> list[CompileCase]:
    """The causal variants of the forward kernel, in the tiles of `capability`."""
    from .forward import compile_case

    return [
        compile_case("bf16", 128, causal=True, capability=capability),
        compile_case("fp16", 64, causal=True, window=True, capability=capability),
    ]


def show_tiles() -> None:
    """Print how many tiles of two causal problems are masked."""
    for length in (1024, 8192):
        counts = count_tiles(length, length, None, 0, 128, 64)
        print(f"{length} x {length} causal, tiles of 128 x 64:", ", ".join(f"{n} {kind}" for kind, n in counts.items()))


if __name__ == "__main__":
    from .demo import main

    main("causal", show_tiles)
