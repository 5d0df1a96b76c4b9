"""The source of the Hopper FP8 forward, run on torch tensors, against the oracles: all that it says about numbers."""

from __future__ import annotations

import functools
import itertools
import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gluon_on_torch import Int, Language, Pointer, on_torch, pointer, quad_exchange

import oracles
from oracles.quantise import Quantised, dequantise, quantise
from reference_kernels.fp8.forward import by_block
from reference_kernels.fp8.hopper import consumer, operand, scales
from reference_kernels.fp8.hopper.configs import TABLE, Fp8Config
from reference_kernels.fp8.hopper.launch import fixed
from reference_kernels.hopper import producer, softmax
from reference_kernels.hopper.schedule import Problem, assign
from reference_kernels.hopper.work import Work

NARROW = Fp8Config(2, 64, 3, 1, True, False, False, 240, 24)
CONFIGS = {
    64: (TABLE[64], NARROW, Fp8Config(2, 128, 3, 1, True, False, False, 240, 24, promote=False)),
    128: (TABLE[128],),
    256: (TABLE[256], Fp8Config(2, 64, 3, 1, True, False, False, 240, 24, promote=False)),
}


PERS = (
    ("block", "block", "block"),
    ("tensor", "head", "block"),
    ("head", "block", "tensor"),
    ("block", "tensor", "head"),
)
"""What shares a descale, of q, k and v."""


class Channel:
    """Tiles by their number; how often each was released."""

    def __init__(self) -> None:
        self.tiles: dict[tuple[int, int], Tensor] = {}
        self.released: dict[tuple[int, int], int] = {}

    def fill(self, read: Any, batch: int, head: int, at: int, count: int, first: int = 0) -> None:
        self.tiles[count, first] = read(batch, head, at)

    def take(self, count: int, first: int = 0) -> Tensor:
        return self.tiles[count, first]

    def release(self, count: int, first: int = 0) -> None:
        self.released[count, first] = self.released.get((count, first), 0) + 1


def _reader(x: Tensor, rows: int) -> Any:
    """Tiles of x (B, H, L, D) as the TMA reads them, zeros beyond its end."""

    def read(batch: int, head: int, at: int) -> Tensor:
        tile = x[batch, head, at : at + rows].float()
        return torch.nn.functional.pad(tile, (0, 0, 0, rows - len(tile)))

    return read


def _multiply(a: Tensor, b: Tensor, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    return a @ b + acc if use_acc else a @ b


def _hide_after(s: Tensor, last: int, diagonal: bool) -> Tensor:
    row = torch.arange(s.shape[0])[:, None] if diagonal else 0
    return torch.where(torch.arange(s.shape[1]) <= last + row, s, -math.inf)


REPLACED: dict[str, Any] = {
    "warpgroup_mma": _multiply,
    "warpgroup_mma_wait": lambda outstanding, deps: deps[0],
    "named_barrier": lambda *words: None,
    "before_next_wait": lambda x: x,
    "scale_rows": lambda acc, factor: acc * factor,
    "hide_after": _hide_after,
    "rows_like": lambda x, like: x[:, None],
    "partial_sums": on_torch(softmax.partial_sums),
    "packed": lambda p: p.clamp(max=448).to(torch.float8_e4m3fn).float(),
    "unpacked": lambda p, layout: p,
    "unit_and_ratio": on_torch(scales.unit_and_ratio),
    "fence_async_shared": lambda: None,
    "tma": types.SimpleNamespace(store_wait=lambda outstanding: None),
}
for _name in ("softmax", "step", "masked_step"):
    REPLACED[_name] = on_torch(getattr(consumer, _name), **REPLACED)


def _scales(q: Quantised, k: Quantised, v: Quantised, scale: float) -> Any:
    """A scales.Scales of pointers."""
    top = v.descale.amax(-1) if v.descale.dim() == 3 else v.descale
    held = {"scale": scale * math.log2(math.e)}
    for name, x, like in (("q", q.descale, q), ("k", k.descale, k), ("v", v.descale, v), ("top", top, v)):
        address, *strides = by_block(x, like.values)
        held |= {name: pointer(address)} | dict(zip((f"{name}_b", f"{name}_h", f"{name}_n"), strides, strict=True))
    made = types.SimpleNamespace(**held)
    for name in ("of_rows", "of_keys"):
        setattr(made, name, functools.partial(on_torch(getattr(scales.Scales, name)), made))
    return made


def _work(tiles: list[int], lq: int, lk: int, block_m: int) -> Any:
    """A work.Work of these tiles."""
    made = types.SimpleNamespace(begin=0, end=len(tiles), Lq=lq, Lk=lk)
    for name in ("key_blocks", "full_blocks"):
        setattr(made, name, functools.partial(on_torch(getattr(Work, name)), made))

    def tile(t: int, rows: int) -> tuple[int, ...]:
        code = tiles[t]
        return (code & 0xFFFFF) * rows, Int(code >> 44), Int(code >> 32 & 0xFFF), Int(code >> 20 & 0xFFF)

    made.tile = tile
    return made


def _attend(
    q: Quantised, k: Quantised, v: Quantised, scale: float, causal: bool, config: Fp8Config
) -> dict[str, Tensor]:
    """o and lse, as launch.forward has them from the kernel; three CTAs."""
    (batch, heads, lq, d), (kv_heads, lk) = q.values.shape, k.values.shape[1:3]
    causal = causal and lq > 1
    o = torch.full((batch, heads, lq, d), math.nan)
    lse = torch.full((batch, heads, lq), math.nan)
    if causal and lq > lk:
        o[:, :, : lq - lk], lse[:, :, : lq - lk] = 0, -math.inf
    code = fixed(d, config, causal=causal, lq=lq, lk=lk, by_blocks=v.descale.dim() == 3)
    problem = Problem(batch, heads, heads // kv_heads, lq, lk, d // 2, config.block_m, config.block_n, causal)
    descriptors = (_reader(q.values, 64), _reader(k.values, config.block_n), _reader(v.values, config.block_n))
    for tiles in assign(problem, 3):
        work = _work(tiles, lq, lk, config.block_m)
        queries, keys, values = Channel(), Channel(), Channel()
        on_torch(producer.load_tiles)(*descriptors, queries, keys, values, work, work.end, 0, 0, config, causal)
        for index in (0, 1):
            held: list[Tensor] = []
            buffer = types.SimpleNamespace(store=held.append)

            def store(out: Any, at: list[int], buffer: Any, held: list[Tensor] = held) -> None:
                b, h, row, _ = at
                o[b, h, row : row + 64] = held[-1][: lq - row]

            run = on_torch(consumer.consumer, **REPLACED, tma_store=store)
            run(
                types.SimpleNamespace(dtype=torch.bfloat16), Pointer(lse.view(-1)), queries, keys, values, buffer, work,
                _scales(q, k, v, scale), heads, index, d, config, code["SCALE_BLOCK"], code["CAUSAL"], code["TAIL"],
                code["DIAGONALS"], code["V_BLOCKS"],
            )  # fmt: skip
        for channel, readers in ((queries, 1), (keys, 2), (values, 2)):
            assert channel.released == dict.fromkeys(channel.tiles, readers), "every tile is released by all readers"
    return {"o": o, "lse": lse}


def _drawn(per: str, *shape: int) -> Quantised:
    """Heads and blocks of rows of different sizes: descales that cannot be mixed up unnoticed."""
    x = torch.randn(shape) * (0.5 + torch.arange(shape[1])[:, None, None])
    return quantise((x * (1 + torch.arange(shape[2])[:, None] // 128 * 0.5)).bfloat16(), per=per)


@pytest.mark.parametrize(
    ("lq", "lk", "heads", "kv_heads", "d"),
    [(300, 300, 2, 1, 64), (256, 256, 2, 2, 64), (130, 517, 2, 1, 64), (517, 130, 1, 1, 64), (1, 200, 1, 1, 64),
     (200, 1, 1, 1, 64), (200, 333, 2, 1, 128), (384, 448, 1, 1, 256)],
)  # fmt: skip
def test_the_forward_is_right(lq: int, lk: int, heads: int, kv_heads: int, d: int) -> None:
    torch.manual_seed(0)
    for per, causal in itertools.product(PERS, (False, True)):
        q, k, v = (
            _drawn(p, 2, h, n, d) for p, h, n in zip(per, (heads, kv_heads, kv_heads), (lq, lk, lk), strict=True)
        )
        exact = (dequantise(*q), dequantise(*k), dequantise(*v))
        arithmetic = oracles.Arithmetic.of(torch.float8_e4m3fn, p_scale=256.0)
        truth = oracles.evaluate(*exact, oracles.AttentionSpec(causal=causal), arithmetic=arithmetic)
        for config in CONFIGS[d]:
            for name, got in _attend(q, k, v, d**-0.5, causal, config).items():
                want, limit = truth[name].value, truth[name].limit(3.0)
                wrong = (got.double() != want) & ~((got - want).abs() <= limit)
                assert not wrong.any(), (name, per, causal, config)


def test_scales_that_are_hardly_there() -> None:
    """Descales whose product is below float32, blocks of V that weigh nothing, and none at all."""
    torch.manual_seed(0)
    q, k, v = _drawn("block", 1, 1, 130, 64), _drawn("block", 1, 1, 300, 64), _drawn("block", 1, 1, 300, 64)
    tiny = [x._replace(descale=x.descale * 1e-25) for x in (q, k)]
    v.descale[..., 0] *= 1e-30
    exact = (dequantise(*tiny[0]), dequantise(*tiny[1]), dequantise(*v))
    arithmetic = oracles.Arithmetic.of(torch.float8_e4m3fn, p_scale=256.0)
    for causal in (False, True):
        truth = oracles.evaluate(*exact, oracles.AttentionSpec(causal=causal), arithmetic=arithmetic)
        got = _attend(*tiny, v, 0.125, causal, TABLE[64])
        for name in ("o", "lse"):
            assert ((got[name] - truth[name].value).abs() <= truth[name].limit(3.0)).all(), name
    nothing = v._replace(descale=torch.zeros_like(v.descale))
    assert not _attend(q, k, nothing, 0.125, False, TABLE[64])["o"].any()


def test_packing_brings_four_neighbours_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """`packed` on numbers of columns: register after register, quad after quad, by its own PTX."""

    def asm(text: str, constraints: str, arguments: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        rows, groups, _ = arguments[0].shape
        out = torch.zeros(2, rows, groups, 4, dtype=torch.int64)
        for row, u in itertools.product(range(rows), range(groups)):
            quad = [{f"${2 + i}": int(x[row, u, t]) for i, x in enumerate(arguments)} for t in range(4)]
            for t, held in enumerate(quad_exchange(text, quad)):
                for h in (0, 1):
                    out[h, row, u, t] = sum(column << 8 * i for i, column in enumerate(held[f"${h}"]))
        return out[0], out[1]

    monkeypatch.setattr(Language, "inline_asm_elementwise", staticmethod(asm), raising=False)
    columns = torch.arange(128).expand(64, 128)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "type", types.SimpleNamespace(layout=None))
        words = on_torch(operand.packed, _asm=lambda: operand._ASM)(columns)
    first = 4 * torch.arange(32)
    assert (words == sum((first + i) << 8 * i for i in range(4))).all()
