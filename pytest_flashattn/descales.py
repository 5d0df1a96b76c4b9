"""FP8 inputs of a case: numbers whose sizes differ between tensors, heads and blocks of rows, quantised.

N(0, 1) everywhere would give nearly the same descale everywhere, and a kernel that takes another one would go
unnoticed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oracles.quantise import Quantised, quantise

from .cases import Case

SIZES: dict[str, tuple[float, float, float]] = {"q": (1.25, 1.0, 0.5), "k": (0.75, 1.0, 0.5), "v": (3.0, 2.0, 2.0)}
"""Size of a tensor, and by how many powers of two at most its heads, and its runs of rows, are larger or smaller.

Scores stay near N(0, 1), for a row that sees one key alone says nothing of descales; v may differ more."""

RUN = 64
"""Rows of one size: divides the usual blocks."""


class Blocks(NamedTuple):
    """Rows that share a descale where there is one a block: `Support.q_block`, `Support.kv_block`."""

    q: int = 128
    kv: int = 128


def sized(name: str, x: Tensor, generator: torch.Generator) -> Tensor:
    """x (B, H, L, D) with the sizes of SIZES[name]."""
    size, heads, rows = SIZES[name]
    batch, h, length, _ = x.shape

    def powers(most: float, *shape: int) -> Tensor:
        return torch.exp2((2 * torch.rand(shape, generator=generator) - 1) * most)

    runs = powers(rows, batch, h, -(-length // RUN) or 1).repeat_interleave(RUN, 2)[:, :, :length, None]
    return x * (size * powers(heads, batch, h, 1, 1) * runs)


def quantised(name: str, x: Tensor, case: Case, dtype: torch.dtype, blocks: Blocks) -> Quantised:
    """x (B, H, L, D), named "q", "k" or "v", with the descales that the case asks for."""
    assert case.descale is not None
    group = case.heads // case.kv_heads if name == "q" else 1
    block = blocks.q if name == "q" else blocks.kv
    return quantise(x, dtype, per=case.descale, block=block, group=group)
