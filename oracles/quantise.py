"""FP8 inputs of attention: quantised values with descales, value = stored * descale, and the rotation of outliers.

    scale = amax / largest number of the format      one a tensor, a head, or a block of rows
    stored = round(x / scale), saturated             descale = scale

A kernel for FP8 takes `stored` and `descale` as given, and so do the oracles. Only the finite values of x count in
amax: an infinity becomes the largest number of its sign (as with cvt.satfinite), NaN stays NaN, and neither spoils what
shares its scale. Where all is zero the scale is 1, and it is never below 2^-126, where GPUs flush.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

PER: tuple[str, ...] = ("tensor", "group", "head", "block")
"""What shares a descale. "group": a kv head; for q, all the query heads that read it (FlashAttention-3)."""

DIMS: tuple[int, ...] = (64, 128, 256)
"""Head dims that are rotated."""

_SMALLEST = 2.0**-126


class Quantised(NamedTuple):
    """values (B, H, L, D) in an FP8 format; descale float32: (), (B, H) or (B, H, ceil(L / block))."""

    values: Tensor
    descale: Tensor


def quantise(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, per: str = "tensor", block: int = 128, group: int = 1
) -> Quantised:
    """x (B, H, L, D), any floating dtype, in `dtype` (float8_e4m3fn or float8_e5m2), with one descale `per`:

    "tensor": (); "head": (B, H); "group": (B, H // group), shared by `group` heads in a row; "block": (B, H,
    ceil(L / block)), one for each `block` rows of a head, the last of them perhaps fewer.
    Raises ValueError for another format, shape or word.
    """
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}")
    if per not in PER:
        raise ValueError(f"per must be one of {', '.join(PER)}, got {per!r}")
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"x must be floating point (B, H, L, D), got {x.dtype} {tuple(x.shape)}")
    if block < 1 or group < 1 or x.shape[1] % group:
        raise ValueError(f"block and group must be positive, and group divide {x.shape[1]} heads; got {block}, {group}")
    x = x.float()
    largest = torch.finfo(dtype).max
    size = x.abs().masked_fill(~x.isfinite(), 0)
    b, h, length, d = x.shape
    if per == "tensor":
        amax = size.amax() if size.numel() else size.new_zeros(())
    elif per == "block":
        blocks = -(-length // block)
        padded = torch.nn.functional.pad(size, (0, 0, 0, blocks * block - length))
        amax = _amax(padded.reshape(b, h, blocks, block * d))
    else:
        shared = group if per == "group" else 1
        amax = _amax(size.reshape(b, h // shared, shared * length * d))
    # By a tensor: a number PyTorch turns into its reciprocal on a GPU, and multiplies, which rounds twice.
    scale = torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, largest)).clamp_min(_SMALLEST))
    whole = (x / spread(scale, x, block)).clamp(-largest, largest)
    return Quantised(whole.to(dtype), scale)


def spread(descale: Tensor, x: Tensor, block: int = 128) -> Tensor:
    """descale, as `quantise` gives it, broadcastable to its tensor x (B, H, L, D).

    Raises ValueError for a shape that is none of (), (B, H), (B, H divided), (B, H, ceil(L / block)).
    """
    b, h, length, _ = x.shape
    shape = tuple(descale.shape)
    if not shape:
        return descale
    if len(shape) == 2 and shape[0] == b and shape[1] and h % shape[1] == 0:
        return descale.repeat_interleave(h // shape[1], 1)[:, :, None, None]
    if shape == (b, h, -(-length // block)):
        return descale.repeat_interleave(block, 2)[:, :, :length, None]
    raise ValueError(
        f"descale {shape} fits no tensor of {b} batches, {h} heads and {length} rows in blocks of {block}: "
        f"expected (), ({b}, {h}) or ({b}, {h}, {-(-length // block)})"
    )


def dequantise(values: Tensor, descale: Tensor, *, block: int = 128) -> Tensor:
    """stored * descale in float64, where the product is exact; the shape of `values`. Raises ValueError as `spread`."""
    return values.double() * spread(descale.double(), values, block)


def random_signs(d: int, seed: int = 0) -> Tensor:
    """(d,) of +1 and -1, the same for the same seed: the random signs of `rotate`."""
    return torch.randint(0, 2, (d,), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """x (..., D) times diag(signs) H / sqrt(D), H the Hadamard matrix in Sylvester's order; in x's dtype.

    The matrix is orthogonal, so q and k rotated alike have the same products, and an outlier in one channel is spread
    over all of them (QuaRot, arXiv:2404.00456; FlashAttention-3, arXiv:2407.08608). signs: (D,) of +1 and -1.
    Raises ValueError for a D other than 64, 128 and 256, and for signs of another length.
    """
    d = x.shape[-1]
    if d not in DIMS:
        raise ValueError(f"the rotation is for head dims {', '.join(map(str, DIMS))}, got {d}: pad, or leave it out")
    if tuple(signs.shape) != (d,):
        raise ValueError(f"signs must be ({d},), one a channel, got {tuple(signs.shape)}")
    wide = x if x.dtype == torch.float64 else x.float()
    out = wide * signs.to(wide)
    for half in (2**n for n in range(int(math.log2(d)))):
        pairs = out.reshape(*x.shape[:-1], d // (2 * half), 2, half)
        a, b = pairs.unbind(-2)
        out = torch.stack((a + b, a - b), -2).reshape(x.shape)
    turned: Tensor = (out * d**-0.5).to(x.dtype)
    return turned


def relative_rms(got: Tensor, want: Tensor) -> float:
    """RMS of got - want as a share of the RMS of want: what quantisation costs. 0 where both are zero."""
    off, size = (float(x.double().square().sum()) for x in (got.double() - want.double(), want))
    return math.sqrt(off / (size or 1.0))


def _amax(x: Tensor) -> Tensor:
    largest: Tensor = x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    return largest
