"""The arithmetic a kernel is allowed: unit roundoffs and underflow of the formats it rounds to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Unit roundoff 2**-(mantissa bits + 1), and the most that rounding can take from a number too small for full precision:
# half the smallest subnormal; for fp32 and bf16 the smallest normal number, because GPUs flush there (ex2.approx.ftz).
_ROUNDOFF = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
_UNDERFLOW = {
    torch.float16: 2.0**-25,
    torch.bfloat16: 2.0**-126,
    torch.float32: 2.0**-126,
    torch.float64: 0.0,
    torch.float8_e4m3fn: 2.0**-10,
    torch.float8_e5m2: 2.0**-17,
}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

FP8_SUMS: tuple[str, ...] = ("fp32", "14 bits", "14 bits a tile")
"""How products of FP8 are added up: in fp32, or as in Hopper's tensor cores (oracles.truncated), through all keys or in
a tile of at most TILE keys, the tiles in fp32."""

TILE = 128


@dataclass(frozen=True)
class Arithmetic:
    """Where an implementation rounds, in unit roundoffs (relative) and underflow halves (absolute).

    u_out, tiny_out: the outputs. u_p, tiny_p: P and dS, before the products that consume them. u_acc: scores,
    exponentials, sums and accumulators. u_operand: q, k, v and do where they are rounded once more before a product
    (tf32), else 0. u_sum: of the memory in which gradients are added up, dk and dv from one block of query rows to the
    next and over the heads of a group, dq from one block of keys to the next; 0: an accumulator of u_acc.
    u_scaled: what multiplying with descales costs, else 0. u_mma: half of the last bit kept in sums of FP8 products, in
    units of the largest number there; 0: nothing is cut off but what u_chop says. mma_keys: keys that such a sum of P V
    goes through; 0: all.
    """

    u_out: float
    u_p: float
    u_acc: float
    u_operand: float = 0.0
    tiny_out: float = 0.0
    tiny_p: float = 0.0
    u_sum: float = 0.0
    u_scaled: float = 0.0
    u_mma: float = 0.0
    mma_keys: int = 0

    @property
    def u_chop(self) -> float:
        """What a sum loses per term, systematically: tensor cores cut their accumulator off instead of rounding it.

        Measured on an H200 (torch 2.11; cuDNN, FlashAttention-2, memory-efficient): n terms of one sign come out short
        by u_acc n/8 to u_acc n/18 of the sum. They are in use where products have operands shorter than u_acc.
        """
        return self.u_acc / 16 if self.u_p > self.u_acc else 0.0

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        *,
        p_dtype: torch.dtype | None = None,
        tf32: bool = False,
        sums: bool = False,
        p_scale: float = 1.0,
        fp8_sums: str = "fp32",
    ) -> Arithmetic:
        """Inputs and outputs in dtype, P and dS in p_dtype (None: dtype), all else in float32 (float64 for float64).

        FP8 inputs have descales, and outputs in bfloat16. p_scale: what P is multiplied by before it is rounded to FP8.
        fp8_sums: how products of FP8 are added up, of FP8_SUMS.

        tf32: products of float32 run on tensor cores, which see 11 bits of either operand, P and dS included, and cut
        the rest off: the unit is 2^-10, since a truncated number is wrong by up to its last bit.
        sums: gradients are added up in dtype from block to block, as PyTorch's CPU kernel does.
        Raises ValueError for a dtype that is not a float, and for tf32 where dtype is not float32.
        """
        p_dtype = p_dtype or dtype
        for name, x in (("dtype", dtype), ("p_dtype", p_dtype)):
            if x not in _ROUNDOFF:
                raise ValueError(f"{name} must be one of {', '.join(map(str, _ROUNDOFF))}, got {x}")
        if tf32 and dtype != torch.float32:
            raise ValueError(f"tf32 is a way to multiply float32, not {dtype}: leave it False")
        if fp8_sums not in FP8_SUMS or (fp8_sums != "fp32" and dtype not in _FP8):
            raise ValueError(f"fp8_sums is one of {', '.join(FP8_SUMS)}, with FP8 inputs; got {fp8_sums!r} for {dtype}")
        if not p_scale > 0:
            raise ValueError(f"p_scale must be positive, got {p_scale}")
        out = torch.bfloat16 if dtype in _FP8 else dtype
        return cls(
            u_out=_ROUNDOFF[out],
            u_p=max(_ROUNDOFF[p_dtype], 2.0**-10 if tf32 else 0.0),
            u_acc=_ROUNDOFF[torch.float64 if dtype == torch.float64 else torch.float32],
            u_operand=2.0**-10 if tf32 else 0.0,
            tiny_out=_UNDERFLOW[out],
            tiny_p=_UNDERFLOW[p_dtype] / (p_scale if p_dtype in _FP8 else 1.0),
            u_sum=_ROUNDOFF[dtype] if sums else 0.0,
            u_scaled=4 * _ROUNDOFF[torch.float32] if dtype in _FP8 else 0.0,
            u_mma=0.0 if fp8_sums == "fp32" else 2.0**-14,
            mma_keys=TILE if fp8_sums == "14 bits a tile" else 0,
        )
