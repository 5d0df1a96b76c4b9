"""The backward on Hopper: which kernels for which problem, their descriptors and grids. No measuring, no autotuning.

    D            deterministic, two passes            otherwise
    64, 128      backward_dkv, then backward_dq       one pass (backward_onepass): faster at all lengths measured
    256          backward_dkv_wide, then backward_dq  the same

The mathematics is in ../backward.py. Before the kernels, prepare_kernel computes delta and turns lse to base 2; after
the one pass, finish_kernel scales and rounds dQ (backward_ends.py). Lengths are arbitrary: the TMA reads zeros beyond
the end of a head and writes nothing there, rows that do not exist have lse2 = +inf, and keys that do not exist are
masked in the one tile that has them (a causal mask does that by itself).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch import tma_refusal
from .backward_dkv import dkv_kernel
from .backward_dkv_wide import wide_dkv_kernel
from .backward_dq import dq_kernel
from .backward_ends import finish_kernel, prepare_kernel
from .backward_onepass import onepass_kernel
from .cases import HopperCase, descriptor_type, sampled
from .launch import descriptor

ROWS = 64
HEAD_DIMS = (64, 128, 256)

CHUNK_BYTES = 24 << 20
"""What the streamed tensors of heads that run at the same time may take: half of the L2 cache of an H100 or H200."""

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_NAMED = {"fp16": torch.float16, "bf16": torch.bfloat16}
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}


class Tiles(NamedTuple):
    """keys: that a CTA for dK and dV owns. rows: that a CTA for dQ owns. block: keys that it streams at a time, through
    two slots for K and v_slots for V."""

    keys: int
    rows: int
    block: int
    v_slots: int


TILES = {64: Tiles(128, 128, 128, 2), 128: Tiles(128, 128, 128, 2), 256: Tiles(64, 128, 64, 1)}


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """None where these kernels can run, otherwise one sentence that says why not.

    q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D), Hq a multiple of Hkv.
    """
    if not q.is_cuda:
        return f"the Hopper kernels need a GPU of compute capability 9.0; q is on {q.device.type}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability != (9, 0):
        return f"the Hopper kernels need a GPU of compute capability 9.0; this one has {capability[0]}.{capability[1]}"
    return _problem(q, k, v)


def _problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """What of `supports` does not depend on the device."""
    what = "the Hopper kernels take"
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"{what} q, k and v all in float16 or all in bfloat16; got {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[3] not in HEAD_DIMS or not q.shape[3] == k.shape[3] == v.shape[3]:
        got = f"{q.shape[3]}, {k.shape[3]}, {v.shape[3]}"
        return f"{what} head dimensions 64, 128 and 256, the same for q, k and v; got {got}"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"{what} query heads that are a multiple of the key heads; got {q.shape[1]}, {k.shape[1]}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.numel() and (said := tma_refusal(name, x)):
            return f"{what} tensors that the TMA can read: {said}"
    rows = q.shape[0] * q.shape[1] * _blocks(q.shape[2]) * ROWS
    if rows >= 2**31 or max(q.shape[2], k.shape[2]) > 65535 * 64:
        return f"{what} up to 2^31 query rows and lengths up to {65535 * 64}; got {tuple(q.shape)}, {tuple(k.shape)}"
    return None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of sum(o do) + sum(lse dlse), contiguous, in the dtype of q.

    q, o, do (B, Hq, Lq, D), k, v (B, Hkv, Lk, D); lse, dlse (B, Hq, Lq) float32, natural logarithm, any strides. Causal
    is bottom-right. deterministic: the same bits from every call; without it the last bits of dq may differ. A do that
    the TMA cannot read is copied. The current device must be that of q. ValueError with the sentence of `supports`
    where that is not None.
    """
    if (reason := supports(q, k, v)) is not None:
        raise ValueError(reason)
    (batch, heads, lq, d), (kv_heads, lk) = q.shape, k.shape[1:3]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    do = do.contiguous() if tma_refusal("do", do) else do
    one_pass = d < 256 and not deterministic
    blocks = _blocks(lq)
    lse2, delta = torch.empty((2, batch * heads * blocks * ROWS), dtype=torch.float32, device=q.device)
    sums = torch.empty((lse2.numel() * d // 256, 256), dtype=torch.float32, device=q.device) if one_pass else None
    prepare_kernel[(batch * heads * blocks,)](
        o, *o.stride(), do, *do.stride(), lse, *lse.stride(), dlse, *((0, 0, 0) if dlse is None else dlse.stride()),
        lse2, delta, sums, heads, lq, blocks, D=d, ROWS=ROWS, **_OPTIONS,
    )  # fmt: skip

    tiles = TILES[d]
    group = heads // kv_heads
    masks = _masks(lq, lk, causal, tiles)
    streamed = (
        descriptor(q, ROWS), descriptor(do, ROWS), descriptor(k, tiles.keys), descriptor(v, tiles.keys),
        _rows(lse2), _rows(delta), _stacked(dk), _stacked(dv),
    )  # fmt: skip
    numbers = (scale, kv_heads, group, lq, lk)
    grid = _grid(-(-lk // tiles.keys), batch * kv_heads, group * lq * d * (8 if one_pass else 4), causal)
    if sums is not None:
        onepass_kernel[grid](
            *streamed, _sums(sums), *numbers, **_onepass_constants(d, causal, masks, group), **_OPTIONS
        )
        finish_kernel[(batch * heads * (blocks - 1),)](
            sums, dq, *dq.stride(), heads, lq, blocks, scale, D=d, ROWS=ROWS, **_OPTIONS
        )
        return dq, dk, dv
    dkv = wide_dkv_kernel if d == 256 else dkv_kernel
    dkv[grid](*streamed, *numbers, **_dkv_constants(d, causal, masks, group), **_OPTIONS)
    dq_kernel[_grid(-(-lq // tiles.rows), batch * heads, lk * d * 4, causal)](
        descriptor(q, tiles.rows), descriptor(do, tiles.rows), descriptor(k, tiles.block), descriptor(v, tiles.block),
        _stacked(dq), lse2, delta, scale, heads, group, lq, lk, **_dq_constants(d, causal, masks), **_OPTIONS,
    )  # fmt: skip
    return dq, dk, dv


class Masks(NamedTuple):
    """Which masks a problem needs. any: dK and dV need some; rolled: for more than the first two row blocks of a tile.
    q_any: dQ needs some; q_rolled: for more than one block of keys of a tile."""

    any: bool
    rolled: bool
    q_any: bool
    q_rolled: bool


def _masks(lq: int, lk: int, causal: bool, tiles: Tiles) -> Masks:
    if causal:
        return Masks(True, (lk - lq) % ROWS != 0, True, (lk - lq) % tiles.block != 0)
    tail = lk % tiles.keys != 0
    return Masks(tail, tail, lk % tiles.block != 0, False)


def _onepass_constants(d: int, causal: bool, masks: Masks, group: int) -> dict[str, object]:
    rolled = masks.rolled or (masks.any and group > 1)
    return {"D": d, "CAUSAL": causal, "MASKS": masks.any, "ROLLED": rolled, "GROUPED": group > 1}


def _dkv_constants(d: int, causal: bool, masks: Masks, group: int) -> dict[str, object]:
    """Of wide_dkv_kernel for D = 256, otherwise of dkv_kernel."""
    common: dict[str, object] = {"D": d, "CAUSAL": causal, "GROUPED": group > 1}
    if d == 256:
        return common | {"MASKS": masks.any}
    peeled = masks.any and not masks.rolled and group == 1
    return common | {"KEYS": TILES[d].keys, "PEELED": 2 if peeled else 0, "ROLLED": masks.any and not peeled}


def _dq_constants(d: int, causal: bool, masks: Masks) -> dict[str, object]:
    tiles = TILES[d]
    peeled = _peeled_keys(tiles, causal, masks)
    slots = {"BLOCK": tiles.block, "V_SLOTS": tiles.v_slots}
    return {"D": d, **slots, "CAUSAL": causal, "PEELED": peeled, "ROLLED": masks.q_rolled}


def _peeled_keys(tiles: Tiles, causal: bool, masks: Masks) -> int:
    """How many blocks of keys the diagonal of a tile of rows crosses, if it begins one, or the end of the keys."""
    return tiles.rows // tiles.block if causal else int(masks.q_any)


def _blocks(lq: int) -> int:
    """Blocks of rows of a head in the workspace: one more than it has, read where a kernel needs an even number."""
    return -(-lq // ROWS) + 1


@functools.lru_cache(maxsize=1024)
def _chunk(heads: int, bytes_each: int, causal: bool) -> int:
    """How many heads (a divisor of `heads`) run side by side: as many as fit the cache; dense, where all tiles are
    equally long, one after the other."""
    least = -(-heads // 65535)
    most = max(least, CHUNK_BYTES // bytes_each if causal else 1)
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and n >= least]
    return max((n for n in divisors if n <= most), default=divisors[0])


def _grid(tiles: int, heads: int, bytes_each: int, causal: bool) -> tuple[int, int, int]:
    """The grid that backward_stream.place reads."""
    chunk = _chunk(heads, bytes_each, causal)
    return chunk, tiles, heads // chunk


@functools.lru_cache(maxsize=256)
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(shape), _DTYPES[dtype])


_PLAIN = {rank: gl.NVMMASharedLayout(0, 32, rank=rank) for rank in (1, 2)}


def _stacked(x: Tensor) -> TensorDescriptor:
    """Tiles of 64 rows of x, contiguous (B, H, L, D), as (B H, L, D); rows beyond L are not written."""
    length, d = x.shape[2:]
    block = (1, 64, d)
    return TensorDescriptor(
        x, [x.shape[0] * x.shape[1], length, d], [length * d, d, 1], list(block), _layout(block, x.dtype)
    )


def _rows(x: Tensor) -> TensorDescriptor:
    """Blocks of ROWS numbers of x, contiguous."""
    return TensorDescriptor(x, [x.numel()], [1], [ROWS], _PLAIN[1])


def _sums(x: Tensor) -> TensorDescriptor:
    """Blocks of 64 rows by 64 columns of dQ, flattened (wgmma.py), of x (rows, 256), contiguous."""
    return TensorDescriptor(x, list(x.shape), [256, 1], [16, 256], _PLAIN[2])


def _described(dtype: str, *block: int) -> str:
    """The Triton type of the descriptor that _stacked, _rows or _sums would make."""
    layout = _PLAIN[len(block)] if dtype == "fp32" else _layout(block, _NAMED[dtype])
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}],{layout!r}>"


def compile_case(
    kernel: str, dtype: str, d: int, *, causal: bool = False, ragged: bool = False, group: int = 1
) -> HopperCase:
    """kernel: "onepass", "dkv" or "dq", as `backward` launches it. ragged: lengths that are multiples of nothing."""
    tiles = TILES[d]
    masks = _masks(8192, 8191 if ragged else 8192, causal, tiles)
    out, stat = _described(dtype, 1, 64, d), _described("fp32", ROWS)
    rows, keys = (tiles.rows, tiles.block) if kernel == "dq" else (ROWS, tiles.keys)
    types = dict.fromkeys(("qd", "dod"), descriptor_type(dtype, rows, d)) | {"scale": "fp32"}
    types |= dict.fromkeys(("kd", "vd"), descriptor_type(dtype, keys, d))
    types |= dict.fromkeys(("dqd", "dkd", "dvd"), out) | dict.fromkeys(("ld", "dd"), stat)
    types |= {"sumd": _described("fp32", 16, 256)} | dict.fromkeys(("lse2", "delta"), "*fp32")
    function, constants = {
        "onepass": (onepass_kernel, _onepass_constants(d, causal, masks, group)),
        "dkv": (wide_dkv_kernel if d == 256 else dkv_kernel, _dkv_constants(d, causal, masks, group)),
        "dq": (dq_kernel, _dq_constants(d, causal, masks)),
    }[kernel]
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in function.arg_names}
    said = [word for word, on in (("causal", causal), ("ragged", ragged), ("grouped", group > 1)) if on]
    name = "-".join(["hopper", kernel, dtype, f"d{d}", *said])
    return HopperCase(name, function, signature, constants, num_warps=4, num_stages=1)


# Each kernel and head dimension, most of them with a mask, once; at D = 256 also what spills most.
ALWAYS = {
    "hopper-onepass-fp16-d64-ragged",
    "hopper-dq-bf16-d64-causal",
    "hopper-onepass-bf16-d128-causal",
    "hopper-dkv-bf16-d128-causal-ragged-grouped",
    "hopper-dq-fp16-d128-ragged",
    "hopper-dkv-fp16-d256-ragged",
    "hopper-dq-bf16-d256-causal",
    "hopper-dkv-bf16-d256-causal-ragged-grouped",
    "hopper-dq-bf16-d256-causal-ragged-grouped",
}


def compile_cases(capability: int) -> list[HopperCase]:
    """Every kernel and head dimension: plain, causal, ragged, and both of these with groups. Hopper only."""
    if capability != 90:
        return []
    kernels = [(kernel, d) for d in HEAD_DIMS for kernel in ("onepass", "dkv", "dq") if kernel != "onepass" or d < 256]
    cases = [compile_case(kernel, "bf16", d) for kernel, d in kernels]
    cases += [compile_case(kernel, "bf16", d, causal=True) for kernel, d in kernels]
    cases += [compile_case(kernel, "fp16", d, ragged=True) for kernel, d in kernels]
    cases += [compile_case(kernel, "bf16", d, causal=True, ragged=True, group=8) for kernel, d in kernels]
    return sampled(cases, ALWAYS)
