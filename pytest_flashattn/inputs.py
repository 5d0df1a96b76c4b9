"""The tensors of a case: drawn from its id and seed on the CPU, so every machine and every order sees the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import oracles
from oracles.quantise import dequantise

from .cases import Case
from .descales import Blocks, quantised, sized
from .features import FP8
from .layouts import place, place_far, place_qkv

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}

ZERO_RUN = 128
"""Rows of a run of the family "zeroblocks": a usual block of rows that share a descale."""

MASK_VISIBLE = 0.7
"""Share of visible keys in a random boolean mask: dense enough for every tile, sparse enough to be noticed."""

USUAL = Blocks()
"""The usual blocks of rows that share a descale, for whoever does not say."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one call receives, in the axes of the contract.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) in the case's dtype and memory layout; bias additive in the
    case's dtype, or mask boolean (True = visible), broadcastable to (B, Hq, Lq, Lk); sinks (Hq,) and alibi_slopes (Hq,)
    float32; dout (B, Hq, Lq, Dv) and dlse (B, Hq, Lq) float32: the upstream gradients. FP8 cases: q_descale, k_descale,
    v_descale float32 of the shapes of `oracles.quantise`, with `blocks` rows where there is one a block; dout in bf16.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    blocks: Blocks = USUAL

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v for an oracle: as they are, or the float64 numbers that FP8 values and descales stand for."""
        return self.meant("q", self.q), self.meant("k", self.k), self.meant("v", self.v)

    def meant(self, name: str, x: Tensor) -> Tensor:
        """The numbers that x (B, H, L, D) stands for in the place of tensor `name`."""
        descale = getattr(self, f"{name}_descale")
        return x if descale is None else dequantise(x, descale, block=self.blocks.q if name == "q" else self.blocks.kv)

    def options(self) -> dict[str, Any]:
        """The canonical keywords that differ from their default."""
        case = self.case
        candidates = {
            "causal": case.causal or None,
            "scale": case.scale,
            "window": case.window,
            "softcap": case.softcap,
            "alibi_slopes": self.alibi_slopes,
            "bias": self.bias if self.mask is None else self.mask,
            "sinks": self.sinks,
            "q_descale": self.q_descale,
            "k_descale": self.k_descale,
            "v_descale": self.v_descale,
        }
        return {name: value for name, value in candidates.items() if value is not None}

    def spec(self, alignment: str = "bottom-right") -> oracles.AttentionSpec:
        """The same problem for the oracle; `alignment` is where the implementation's diagonal ends."""
        case = self.case
        return oracles.AttentionSpec(
            causal=case.causal,
            alignment=alignment,  # type: ignore[arg-type]
            scale=case.scale,
            window=case.window,
            softcap=case.softcap,
            alibi_slopes=self.alibi_slopes,
            bias=self.bias,
            mask=self.mask,
            sinks=self.sinks,
        )

    def with_(self, **changes: Any) -> Inputs:
        """A copy with some tensors replaced (metamorphic checks)."""
        return replace(self, **changes)


def output_dtype(case: Case) -> torch.dtype:
    """The dtype of the output: that of the inputs, or bf16 where these are FP8."""
    return torch.bfloat16 if case.dtype in FP8 else TORCH_DTYPES[case.dtype]


def make_inputs(
    case: Case, device: torch.device | str = "cpu", native: str = "bhsd", blocks: Blocks | None = None
) -> Inputs:
    """Draw the tensors of `case` and lay them out in memory; `native` is the order of axes the implementation takes.

    blocks: rows that share a descale, in FP8 cases with one a block.
    """
    blocks = blocks or USUAL
    device = torch.device(device)
    dtype = TORCH_DTYPES[case.dtype]
    generator = torch.Generator().manual_seed(case.rng_seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # What is expanded with stride 0 is drawn once.
    kv_batch = 1 if case.layout == "expanded" else case.batch
    kv_heads = 1 if case.layout == "headless" else case.kv_heads
    q = normal(1 if case.layout == "headless" else case.batch, case.heads, case.q, case.d)
    k = normal(kv_batch, kv_heads, case.k, case.d)
    v = normal(kv_batch, kv_heads, case.k, case.dv)
    q, k, v = _family(case, q, k, v, generator)
    dout = normal(case.batch, case.heads, case.q, case.dv)
    if case.dout == "zero":
        dout = torch.zeros_like(dout)
    elif case.dout == "expanded":
        dout = torch.ones(1, 1, 1, 1)

    descales: dict[str, Tensor] = {}
    if case.dtype in FP8:
        q, k, v, descales = _in_fp8(case, q, k, v, dtype, blocks, generator)
        descales = {name: x.to(device) for name, x in descales.items()}
    q, k, v = (x.to(device=device, dtype=dtype) for x in (q, k, v))
    dout = dout.to(device=device, dtype=output_dtype(case))
    if case.layout == "qkv":
        q, k, v = place_qkv(q, k, v)
    elif case.layout == "far":
        q, k, v = place_far((q, k, v), native)
    else:
        order = {"expanded": "plain", "headless": "plain", "mixed": "plain"}.get(case.layout, case.layout)
        q, v = place(q, "plain" if order == "cache" else order, native), place(v, order, native)
        k = place(k, "swapped" if case.layout == "mixed" else order, native)
        q = q.expand(case.batch, -1, -1, -1)
        k, v = (x.expand(case.batch, case.kv_heads, -1, -1) for x in (k, v))
    if case.dout == "expanded":
        dout = dout.expand(case.batch, case.heads, case.q, case.dv)
    else:
        dout = place(dout, "plain" if case.dout == "zero" else case.dout, native)

    return Inputs(
        case=case,
        q=q,
        k=k,
        v=v,
        dout=dout,
        dlse=normal(case.batch, case.heads, case.q).to(device),
        alibi_slopes=_slopes(case.heads).to(device) if case.alibi else None,
        bias=_bias(case, generator).to(device=device, dtype=dtype) if case.bias else None,
        mask=_visible(case.mask, case, generator).to(device) if case.mask else None,
        # Near log(Lk), the size of a row's own log-sum-exp: a sink of 0 against hundreds of keys would be invisible.
        sinks=(normal(case.heads) + math.log(max(case.k, 1))).to(device) if case.sinks else None,
        blocks=blocks,
        **descales,
    )


def _in_fp8(
    case: Case, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, blocks: Blocks, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """q, k and v in FP8 and their descales, these with all batches and heads of what was drawn once and is expanded."""
    values, descales = [], {}
    group = case.heads // case.kv_heads
    for name, x, heads in (("q", q, case.heads), ("k", k, case.kv_heads), ("v", v, case.kv_heads)):
        found = quantised(name, sized(name, x, generator), case, dtype, blocks)
        values.append(found.values)
        heads = heads // group if name == "q" and case.descale == "group" else heads
        rest = found.descale.shape[2:]
        whole = found.descale if case.descale == "tensor" else found.descale.expand(case.batch, heads, *rest)
        descales[f"{name}_descale"] = whole.contiguous()
    return *values, descales  # type: ignore[return-value]


def _family(case: Case, q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Reshape N(0, 1) draws into the case's input family (`cases.FAMILIES` says what each is)."""
    d, length = case.d, max(case.k, 1)
    match case.family:
        case "peaked":
            q = q * 6
        case "ascending" | "descending":
            # Positive q and k make the score of key j grow with the ramp, by about 12 over the whole row.
            ramp = torch.linspace(0, 1, length)[: case.k]
            ramp = ramp if case.family == "ascending" else ramp.flip(0)
            q = q.abs() * 0.5
            k = k.abs() * 0.1 + ramp[:, None] * (12 * math.sqrt(d) / (0.4 * d))
        case "outlier":
            q, k, v = (x * (1 + 19 * (torch.rand(x.shape, generator=generator) < 1e-3)) for x in (q, k, v))
        case "channel":
            k[..., d // 3] *= 50
        case "offset" | "negoffset":
            scale = abs(case.scale if case.scale is not None else d**-0.5) or 1.0
            # A power of two is exact in every dtype, so the offset is the same for all keys to the last bit.
            amplitude = 2.0 ** round(0.5 * math.log2(1e5 / scale))
            q[..., 0] = amplitude
            k[..., 0] = amplitude if case.family == "offset" else -amplitude
        case "constant":
            q = torch.full_like(q, 1.5)
            k = torch.full_like(k, 0.75)
        case "zerorows":
            q[..., ::3, :] = 0
            k[..., 1::3, :] = 0
        case "vmean":
            v = v + 5
        case "sinktoken":
            # Key 0 scores about 12 above the rest, whatever the scale: at 100 and more the others would not count, and
            # the gradient of q would be nothing but rounding. Its value is small, as in models.
            scale = abs(case.scale if case.scale is not None else d**-0.5) or 1.0
            direction = torch.ones(d) / math.sqrt(scale * d)
            q = q + 2 * direction
            k[..., :1, :] = 6 * direction
            v[..., :1, :] *= 0.1
        case "tiny":
            v = v * 2.0**-16
        case "zeroblocks":
            for x in (q, k, v):
                x.masked_fill_((torch.arange(x.shape[2]) // ZERO_RUN % 3 == 1)[:, None], 0)
            if v.shape[1] > 1:
                v[:, -1] = 0
    return q, k, v


def _slopes(heads: int) -> Tensor:
    """ALiBi slopes 2^(-8 h / H), h = 1 … H (Press et al., 2022)."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


def _pattern(pattern: str, case: Case) -> tuple[int, int, int, int]:
    sizes = (case.batch, case.heads, case.q, case.k)
    b, h, q, k = (size if letter != "1" else 1 for size, letter in zip(sizes, pattern, strict=True))
    return b, h, q, k


def _bias(case: Case, generator: torch.Generator) -> Tensor:
    assert case.bias is not None
    bias = torch.randn(_pattern(case.bias, case), generator=generator)
    return bias.masked_fill(~_visible(case.bias, case, generator), -math.inf) if case.holes else bias


def _visible(pattern: str, case: Case, generator: torch.Generator) -> Tensor:
    shape = _pattern(pattern, case)
    visible = torch.rand(shape, generator=generator) < MASK_VISIBLE
    if shape[2] > 4:
        visible[:, :, 1] = False  # a row that sees no key
        visible[:, :, 2, : case.k // 2] = False  # a row whose first tiles are all masked
    return visible
