"""Equivalents for FP8: unusual, and right."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oracles.truncated import add_products

from .core_fp8 import Fp8Core, Fp8Problem
from .equivalents_registry import equivalent

SUPPORT = Fp8Core.__flashattn__

equivalent("fp8_honest")(Fp8Core)


@equivalent("fp8_p_in_bf16")
class Fp8PInBf16(Fp8Core):
    """P is rounded to bf16 and multiplied with the values as bf16, as declared."""

    __flashattn__ = replace(SUPPORT, p_dtype="bf16")
    p_scale = 1.0

    def quantised(self, p: Fp8Problem, prob: Tensor) -> Tensor:
        return prob.bfloat16().float()


@equivalent("fp8_other_tiles")
class Fp8OtherTiles(Fp8Core):
    """Tiles of 32 rows and keys within blocks of 128 that share a descale: the default of `Support`."""

    __flashattn__ = replace(SUPPORT, q_block=128, kv_block=128)
    block_q = block_k = 32
    descale_rows = 128


@equivalent("fp8_dequantise_first")
class Fp8DequantiseFirst(Fp8Core):
    """Keys and values are multiplied by their descales as they are loaded."""

    def score_factor(self, p: Fp8Problem, i: int, j: int, heads: Tensor) -> Tensor:
        return self.descale(p, "q", i, heads)

    def load_k(self, p: Fp8Problem, j: int, heads: Tensor) -> Tensor:  # type: ignore[override]
        return super().load_k(p, j, heads) * self.descale(p, "k", j, heads)

    def add_values(self, p: Fp8Problem, acc: Tensor, prob: Tensor, j: int, heads: Tensor) -> Tensor:
        return acc + prob @ (self.load_v(p, j, heads) * self.descale(p, "v", j, heads))


@equivalent("fp8_unscaled_p")
class Fp8UnscaledP(Fp8Core):
    """P is rounded as it is, as declared."""

    __flashattn__ = replace(SUPPORT, p_scale=1)
    p_scale = 1.0


@equivalent("fp8_sums_in_14_bits")
class Fp8SumsIn14Bits(Fp8Core):
    """Products are summed as Hopper's tensor cores sum them, as declared, o in one accumulator through all keys."""

    __flashattn__ = replace(SUPPORT, fp8_sums="14 bits")

    def scaled(self, p: Fp8Problem, q: Tensor, k: Tensor) -> Tensor:  # type: ignore[override]
        return add_products(torch.zeros(*q.shape[:3], k.shape[2]), q, k.mT) * p.scale

    def add_values(self, p: Fp8Problem, acc: Tensor, prob: Tensor, j: int, heads: Tensor) -> Tensor:
        unit = self.descale(p, "v", j, heads)
        return add_products(acc / unit, prob, self.load_v(p, j, heads)) * unit


@equivalent("fp8_sums_in_14_bits_a_tile")
class Fp8SumsIn14BitsATile(Fp8SumsIn14Bits):
    """Each tile of keys has a sum of its own, as declared, and the tiles are added in fp32."""

    __flashattn__ = replace(SUPPORT, fp8_sums="14 bits a tile")

    def add_values(self, p: Fp8Problem, acc: Tensor, prob: Tensor, j: int, heads: Tensor) -> Tensor:
        begun = torch.zeros_like(acc)
        return acc + add_products(begun, prob, self.load_v(p, j, heads)) * self.descale(p, "v", j, heads)
