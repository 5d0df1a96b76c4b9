"""Mutants of memory layouts: strides, offsets, what lies behind the last row, sizes of offsets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .core import INF, Core, Problem
from .registry import misread, mutant


@mutant(63, "layout")
class AssumeContigQ(Core):
    """q is read as contiguous."""

    def prepare(self, p: Problem) -> Problem:
        self.reached |= not p.q.is_contiguous()
        return replace(p, q=misread(p.q))


@mutant(64, "layout")
class AssumeContigKv(Core):
    """k and v are read as contiguous."""

    def prepare(self, p: Problem) -> Problem:
        self.reached |= not p.k.is_contiguous()
        return replace(p, k=misread(p.k), v=misread(p.v))


@mutant(65, "layout")
class VUsesKStrides(Core):
    """V is read with the strides of K."""

    def prepare(self, p: Problem) -> Problem:
        if p.v.shape != p.k.shape or p.v.stride() == p.k.stride() or not p.v.numel():
            return p
        self.reached = True
        return replace(p, v=p.v.as_strided(p.v.shape, p.k.stride()))


@mutant(68, "layout")
class Stride0Expand(Core):
    """K and V expanded over the batch are misread in the tail tile."""

    def prepare(self, p: Problem) -> Problem:
        if p.k.stride(0) or len(p.k) < 2 or not p.lk % self.block_k:
            return p
        self.reached = True
        v = p.v.clone()
        v[1:, :, p.lk // self.block_k * self.block_k :] = 0
        return replace(p, v=v)


@mutant(0, "layout")
class Stride0Heads(Core):
    """K expanded over the heads is read as if its heads lay one after the other."""

    def prepare(self, p: Problem) -> Problem:
        if p.k.stride(1) or p.k.shape[1] < 2:
            return p
        self.reached = True
        return replace(p, k=misread(p.k))


@mutant(0, "metamorphic.split_and_merge")
class HeadPitchFromLength(Core):
    """Heads of (B, H, L, D) memory are taken to lie L rows apart."""

    def prepare(self, p: Problem) -> Problem:
        pitch = p.lk * p.k.stride(2)
        if p.k.shape[1] == 1 or p.k.stride(1) <= p.k.stride(2) or p.k.stride(1) == pitch or p.k.stride(3) != 1:
            return p
        self.reached = True
        return replace(p, k=p.k.as_strided(p.k.shape, (p.k.stride(0), pitch, p.k.stride(2), 1)))


@mutant(72, "layout")
class BaseRoundedDown(Core):
    """Vector loads round the base address of k down to 16 bytes."""

    def prepare(self, p: Problem) -> Problem:
        odd = p.k.storage_offset() % 8
        self.reached |= odd > 0
        return replace(p, k=p.k.as_strided(p.k.shape, p.k.stride(), p.k.storage_offset() - odd))


@mutant(73, "features.bias")
class BiasRowpitchAlign(Core):
    """The rows of a bias are taken to lie a multiple of 8 elements apart."""

    def prepare(self, p: Problem) -> Problem:
        if p.bias is None or not p.bias.shape[-1] % 8 or p.bias.shape[-1] == 1:
            return p
        self.reached = True
        rows, pitch = p.bias.numel() // p.bias.shape[-1], -(-p.bias.shape[-1] // 8) * 8
        at = (torch.arange(rows)[:, None] * pitch + torch.arange(p.bias.shape[-1])) % p.bias.numel()
        return replace(p, bias=p.bias.flatten()[at].view(p.bias.shape))


@mutant(80, "layout")
class PadPoison(Core):
    """Tiles reach past D into the padding of a row and multiply it by zero: NaN there is NaN here."""

    def prepare(self, p: Problem) -> Problem:
        if p.k.stride(3) != 1 or p.k.stride(2) != p.k.shape[3] + 8:
            return p
        self.reached = True
        shape = (*p.k.shape[:3], 1)
        return replace(p, k=p.k + 0 * p.k.as_strided(shape, p.k.stride(), p.k.storage_offset() + p.k.shape[3]))


@mutant(77, "forward")
class Int32Offset(Core):
    """Element offsets of K wrap; at 2**19 instead of 2**31, so that small cases reach it."""

    wrap = 2**19

    def prepare(self, p: Problem) -> Problem:
        self.reached |= p.k.numel() > self.wrap
        return replace(p, k=p.k.flatten()[torch.arange(p.k.numel()) % self.wrap].view(p.k.shape))


@mutant(77, "layout")
class Int32BatchOffset(Core):
    """The offset of a batch element of K is computed in 31 bits, and wraps at its real limit."""

    def prepare(self, p: Problem) -> Problem:
        starts = [b * p.k.stride(0) for b in range(len(p.k))]
        if not starts or starts[-1] < 2**31:
            return p
        self.reached = True
        read = [p.k[0].as_strided(p.k.shape[1:], p.k.stride()[1:], p.k.storage_offset() + s % 2**31) for s in starts]
        return replace(p, k=torch.stack(read))


@mutant(77, "backward")
class Int32OffsetBackward(Core):
    """Element offsets of dK wrap, at 2**15: what lies beyond is written over the front."""

    wrap = 2**15

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> dict[str, Tensor]:
        found = super().backward(p, o, lse, do, dlse)
        flat = found["k"].flatten()
        if flat.numel() > self.wrap:
            self.reached = True
            wrapped = torch.zeros_like(flat)
            for part in flat.split(self.wrap):  # in turn: in one copy with repeated indices, threads race
                wrapped[: len(part)] = part
            found["k"] = wrapped.view(found["k"].shape)
        return found


@mutant(77, "features.mask")
class Int32OffsetMask(Core):
    """Element offsets of a mask or bias wrap, at 2**15."""

    wrap = 2**15

    def prepare(self, p: Problem) -> Problem:
        if p.bias is None or p.bias.numel() <= self.wrap:
            return p
        self.reached = True
        return replace(p, bias=p.bias.flatten()[torch.arange(p.bias.numel()) % self.wrap].view(p.bias.shape))


@mutant(69, "layout")
class Size1StrideInferredLayout(Core):
    """With one kv head, whose stride means nothing, that stride is taken for the distance of the rows of K."""

    def prepare(self, p: Problem) -> Problem:
        if p.k.shape[1] > 1 or p.k.stride(1) >= p.k.stride(2) or p.lk < 2:
            return p
        self.reached = True
        b, _, _, d = p.k.stride()
        return replace(p, k=p.k.as_strided(p.k.shape, (b, p.k.stride(1), p.k.stride(1), d)))


# -- behind the last row ----------------------------------------------------------------------------------------------


def read_on(x: Tensor, start: int, rows: int) -> Tensor:
    """float32 rows start … start + rows of every head as memory has them, whatever lies there behind the last one.

    What lies behind the storage as well counts as 0.
    """
    flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    if not flat.numel():
        return torch.zeros(*x.shape[:2], rows, x.shape[3])
    at = torch.tensor(x.storage_offset())
    for first, size, stride in zip((0, 0, start, 0), (*x.shape[:2], rows, x.shape[3]), x.stride(), strict=True):
        at = at[..., None] + torch.arange(first, first + size) * stride
    return flat[at.clamp_max(flat.numel() - 1)].float().masked_fill(at >= flat.numel(), 0)


@mutant(2, "shapes")
class OobRead(Core):
    """The last tile has no mask, and reads on behind the end of K and V."""

    def load_k(self, p: Problem, j: int, heads: Tensor) -> Tensor:
        return read_on(p.k, j, self.block_k)[:, heads]

    def load_v(self, p: Problem, j: int, heads: Tensor) -> Tensor:
        return read_on(p.v, j, self.block_k)[:, heads]

    def inside(self, p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
        self.reached |= int(keys[-1]) >= p.lk
        return (rows < p.lq).expand(-1, len(keys))


@mutant(80, "layout")
class CachePoison(Core):
    """The last tile of V reads on behind the end; P is 0 there, and 0 times NaN is NaN."""

    def load_v(self, p: Problem, j: int, heads: Tensor) -> Tensor:
        self.reached |= j + self.block_k > p.lk
        return read_on(p.v, j, self.block_k)[:, heads]


@mutant(81, "layout")
class AdditiveMaskNan(Core):
    """The last tile of K reads on behind the end; its scores are masked by adding -inf, and a NaN stays one."""

    def load_k(self, p: Problem, j: int, heads: Tensor) -> Tensor:
        return read_on(p.k, j, self.block_k)[:, heads]

    def masked(self, p: Problem, s: Tensor, seen: Tensor) -> Tensor:
        self.reached |= bool(s.isnan().any())
        return s + torch.where(seen, 0.0, -INF)
