"""What is to be computed: the options of one attention problem, and which key each query row may see.

Everything positional hangs on one idea. Query row i stands on a key, its diagonal: i + Lk - Lq when the two sequences
end together (bottom-right), i when they begin together (top-left); in packed batches the same, inside each segment.
Causal masks, windows and ALiBi are measured from there and nowhere else.

Shapes, everywhere in this package: q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv); query head h reads key and
value head h // (Hq // Hkv).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Alignment = Literal["bottom-right", "top-left"]


@dataclass(frozen=True)
class Segments:
    """Sequences of different lengths packed one after another along L; a row sees keys of its own segment only.

    cu_q, cu_k: cumulative lengths, e.g. (0, 5, 5, 12) for segments of 5, 0 and 7. Zero-length segments are allowed.
    Query rows from cu_q[-1] on see nothing, keys from cu_k[-1] on are seen by nobody.

    Raises ValueError when the two do not describe the same number of segments, do not begin with 0, or decrease.
    """

    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, cumulative in (("cu_q", self.cu_q), ("cu_k", self.cu_k)):
            if not cumulative or cumulative[0] != 0:
                raise ValueError(
                    f"{name} must begin with 0, got {cumulative}: pass cumulative lengths, (0, n1, n1 + n2, ...)"
                )
            if any(b < a for a, b in pairwise(cumulative)):
                raise ValueError(f"{name} must not decrease, got {cumulative}: pass cumulative lengths, not lengths")
        if len(self.cu_q) != len(self.cu_k):
            raise ValueError(
                f"cu_q and cu_k describe {len(self.cu_q) - 1} and {len(self.cu_k) - 1} segments: "
                "give an empty segment the same cumulative length twice"
            )


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """The options of one attention problem. Scores are built in this order: scale, softcap, ALiBi, bias, masks.

    causal: row i sees key j when j <= diagonal(i).
    alignment: where diagonals lie when Lq != Lk; see the module docstring.
    scale: None means D ** -0.5. Negative and zero are allowed.
    window: (left, right), inclusive: diagonal - left <= j <= diagonal + right; None is unbounded.
    softcap: s becomes softcap * tanh(s / softcap).
    alibi_slopes: (Hq,) or (B, Hq); -slope * |diagonal - j| is added.
    bias: additive, floating point, broadcastable to (B, Hq, Lq, Lk). -inf hides a key; NaN and +inf are not meaningful.
    mask: boolean, True = visible, broadcastable to (B, Hq, Lq, Lk).
    sinks: (Hq,); one more logit per head, not scaled, capped or masked, in the denominator only.
    segments: packed sequences.

    Raises ValueError, naming the argument and the remedy; shapes are checked by check().
    """

    causal: bool = False
    alignment: Alignment = "bottom-right"
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    segments: Segments | None = None

    def __post_init__(self) -> None:
        if self.alignment not in ("bottom-right", "top-left"):
            raise ValueError(f"alignment must be 'bottom-right' or 'top-left', got {self.alignment!r}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite, got {self.scale}: pass None for D ** -0.5")
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise ValueError(f"softcap must be positive and finite, got {self.softcap}: pass None for no cap")
        if self.window is not None:
            if len(self.window) != 2:
                raise ValueError(f"window must be (left, right), got {self.window}")
            if any(side is not None and side < 0 for side in self.window):
                raise ValueError(
                    f"window must not be negative, got {self.window}: None means unbounded, 0 the diagonal only"
                )
        if self.mask is not None and self.mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be boolean (True = visible), got {self.mask.dtype}: pass additive values as bias"
            )
        if self.bias is not None and not self.bias.is_floating_point():
            raise ValueError(f"bias must be floating point, got {self.bias.dtype}: pass a boolean one as mask")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raises ValueError unless q, k, v and the tensors of this spec fit together; says which does not and why."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4 or not x.is_floating_point():
                raise ValueError(f"{name} must be floating point (B, H, L, D), got {x.dtype} {tuple(x.shape)}")
        (b, hq, lq, d), (_, hkv, lk, _) = q.shape, k.shape
        if k.shape[0] != b or k.shape[3] != d:
            raise ValueError(f"k must share q's batch and head dimension: q {tuple(q.shape)}, k {tuple(k.shape)}")
        if v.shape[:3] != k.shape[:3]:
            raise ValueError(f"v must share k's batch, heads and length: k {tuple(k.shape)}, v {tuple(v.shape)}")
        if hkv == 0 or hq == 0 or hq % hkv:
            raise ValueError(f"q's heads must be a positive multiple of k's: {hq} query heads, {hkv} key heads")
        if d == 0 or v.shape[3] == 0:
            raise ValueError(f"head dimensions must be positive, got D {d}, Dv {v.shape[3]}")
        for name, extra in (("bias", self.bias), ("mask", self.mask)):
            if extra is not None and not _broadcastable(tuple(extra.shape), (b, hq, lq, lk)):
                raise ValueError(
                    f"{name} {tuple(extra.shape)} does not broadcast to (B, Hq, Lq, Lk) = {(b, hq, lq, lk)}"
                )
        if self.alibi_slopes is not None and tuple(self.alibi_slopes.shape) not in ((hq,), (b, hq)):
            raise ValueError(f"alibi_slopes must be ({hq},) or ({b}, {hq}), got {tuple(self.alibi_slopes.shape)}")
        if self.sinks is not None and tuple(self.sinks.shape) != (hq,):
            raise ValueError(f"sinks must be ({hq},), one logit per query head, got {tuple(self.sinks.shape)}")
        if self.segments is not None and (self.segments.cu_q[-1] > lq or self.segments.cu_k[-1] > lk):
            ends = (self.segments.cu_q[-1], self.segments.cu_k[-1])
            raise ValueError(
                f"segments end at {ends}, beyond (Lq, Lk) = {(lq, lk)}: cumulative lengths end at most there"
            )

    def scale_for(self, d: int) -> float:
        """The factor of the scores for head dimension d."""
        return d**-0.5 if self.scale is None else float(self.scale)

    def diagonal(self, rows: Tensor, lq: int, lk: int) -> Tensor:
        """The key (n,) on which each of the query rows (n,) stands; outside 0..Lk-1 there is no such key.

        Rows beyond the last segment stand on nothing meaningful; visible() hides everything from them.
        """
        if self.segments is None:
            return rows + (lk - lq if self.alignment == "bottom-right" else 0)
        cu_q, cu_k = (torch.tensor(cu, device=rows.device) for cu in (self.segments.cu_q, self.segments.cu_k))
        segment = torch.bucketize(rows, cu_q, right=True)  # 1-based; len(cu_q) beyond the last
        end = segment.clamp(max=len(cu_q) - 1)
        if self.alignment == "bottom-right":
            return rows - cu_q[end] + cu_k[end]  # the ends of query and key segment meet
        return rows - cu_q[end - 1] + cu_k[end - 1] if len(cu_q) > 1 else rows

    def visible(self, rows: Tensor, keys: Tensor, lq: int, lk: int) -> Tensor | None:
        """Which keys (m,) each query row (n,) sees: boolean, broadcastable to (B, Hq, n, m); None: all of them."""
        parts: list[Tensor] = []
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        if left is not None or right is not None:
            offset = keys - self.diagonal(rows, lq, lk)[:, None]
            parts += [] if right is None else [offset <= right]
            parts += [] if left is None else [offset >= -left]
        if self.segments is not None:
            cu_q, cu_k = (torch.tensor(cu, device=rows.device) for cu in (self.segments.cu_q, self.segments.cu_k))
            row_segment = torch.bucketize(rows, cu_q, right=True)
            key_segment = torch.bucketize(keys, cu_k, right=True)
            parts += [row_segment[:, None] == key_segment, (rows < self.segments.cu_q[-1])[:, None]]
        if self.mask is not None:
            parts.append(take(self.mask, rows, keys))
        seen = None
        for part in parts:
            seen = part if seen is None else seen & part
        return seen

    def slopes(self) -> Tensor | None:
        """ALiBi slopes in float64, (1 or B, Hq, 1, 1)."""
        if self.alibi_slopes is None:
            return None
        slopes = self.alibi_slopes.detach().double()
        return (slopes[None] if slopes.dim() == 1 else slopes)[:, :, None, None]

    def narrow(self, batch: slice, heads: slice) -> AttentionSpec:
        """The same problem for some of the batch and of the query heads; tensors are views."""
        slopes = self.alibi_slopes
        if slopes is not None:
            slopes = slopes[heads] if slopes.dim() == 1 else slopes[batch, heads]
        return dataclasses.replace(
            self,
            alibi_slopes=slopes,
            bias=None if self.bias is None else as4d(self.bias)[region(as4d(self.bias), batch, heads)],
            mask=None if self.mask is None else as4d(self.mask)[region(as4d(self.mask), batch, heads)],
            sinks=None if self.sinks is None else self.sinks[heads],
        )


def as4d(x: Tensor) -> Tensor:
    """x with leading dimensions of size 1 up to four."""
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def region(x: Tensor, *slices: slice) -> tuple[slice, ...]:
    """The slices to take from x, whose dimensions of size 1 stand for all."""
    return tuple(slice(None) if size == 1 else part for size, part in zip(x.shape, slices, strict=False))


def take(x: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The rows (n,) and keys (m,) of x, which is broadcastable to (B, Hq, Lq, Lk); dimensions of size 1 stay."""
    x = as4d(x)
    x = x if x.shape[2] == 1 else x.index_select(2, rows)
    return x if x.shape[3] == 1 else x.index_select(3, keys)


def reduce_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x summed over the dimensions along which a tensor of this shape was broadcast: its gradient from x."""
    full = (1,) * (x.dim() - len(shape)) + tuple(shape)
    over = [axis for axis, size in enumerate(full) if size == 1 and x.shape[axis] != 1]
    return (x.sum(over, keepdim=True) if over else x).reshape(shape)


def _broadcastable(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))
