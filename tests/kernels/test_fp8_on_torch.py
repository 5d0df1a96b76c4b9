"""The source of the Hopper FP8 forward, run on torch tensors, against the oracles: all that it says about numbers."""

from __future__ import annotations

import functools
import itertools
import math
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gluon_on_torch import Language, Pointer, on_torch, pointer, quad_exchange
from hopper_machine import Channel, UnderWay, reader, work

import oracles
from oracles.quantise import Quantised, dequantise, quantise
from reference_kernels.fp8.forward import by_block
from reference_kernels.fp8.hopper import consumer, operand, scales
from reference_kernels.fp8.hopper.configs import TABLE, Fp8Config
from reference_kernels.fp8.hopper.interleaving import as_stored, interleave_keys, padding_refusal
from reference_kernels.fp8.hopper.launch import fixed
from reference_kernels.hopper import producer, softmax
from reference_kernels.hopper.schedule import Problem, assign

# Two consumers in half as many keys; scores one block ahead, with every number of blocks and every mask.
NARROW = Fp8Config(2, 64, 3, 1, True, False, False, 240, 24)
AHEAD = TABLE[128][False]
CONFIGS = {
    64: {*TABLE[64].values(), NARROW, AHEAD, replace(AHEAD, block_n=64)},
    128: set(TABLE[128].values()),
    256: {*TABLE[256].values(), NARROW},
}
assert AHEAD.ahead

PERS = (
    ("block", "block", "block"),
    ("tensor", "head", "block"),
    ("head", "block", "tensor"),
    ("block", "tensor", "head"),
)
"""What shares a descale, of q, k and v."""


UNDER_WAY = UnderWay()


def _hide_after(s: Tensor, last: int, diagonal: bool) -> Tensor:
    row = torch.arange(s.shape[0])[:, None] if diagonal else 0
    return torch.where(torch.arange(s.shape[1]) <= last + row, s, -math.inf)


def stored_order(n: int) -> list[int]:
    """The key at each position of n interleaved ones."""
    return [16 * u + 8 * h + 2 * j + b for u in range(n // 16) for j in range(4) for h in (0, 1) for b in (0, 1)]


BARRIERS: list[tuple[str, int]] = []

REPLACED: dict[str, Any] = {
    "warpgroup_mma": UNDER_WAY.multiply,
    "warpgroup_mma_wait": UNDER_WAY.wait,
    "named_barrier": lambda op, ident, x: BARRIERS.append((op, ident)),
    "before_next_wait": lambda x: x,
    "scale_rows": lambda acc, factor: acc * factor,
    "hide_after": _hide_after,
    "row_maximum": lambda s: s.amax(1),
    "rows_like": lambda x, like: x[:, None],
    "partial_sums": on_torch(softmax.partial_sums),
    "packed": lambda p: p.clamp(max=448).to(torch.float8_e4m3fn).float(),
    "packed_in_place": lambda p: p.clamp(max=448).to(torch.float8_e4m3fn).float()[:, stored_order(p.shape[1])],
    "unpacked": lambda p, layout: p,
    "reciprocal": lambda x: 1 / x,
    "fence_async_shared": lambda: None,
    "tma": types.SimpleNamespace(store_wait=UNDER_WAY.wait_stores),
}
# Each after those that it calls.
for _function in (
    scales.unit_and_ratio, scales.next_units, consumer.softmax, consumer.in_words, consumer.scores,
    consumer.add_product, consumer.step, consumer.step_ahead, consumer.step_in_turn, consumer.turn_ahead,
    consumer.blocks_ahead,
):  # fmt: skip
    REPLACED[_function.__name__] = on_torch(_function, **REPLACED)


def _scales(q: Quantised, k: Quantised, v: Quantised, scale: float) -> Any:
    """A scales.Scales of pointers."""
    top = v.descale.amax(-1) if v.descale.dim() == 3 else v.descale
    held = {"scale": scale * math.log2(math.e)}
    for name, x, like in (("q", q.descale, q), ("k", k.descale, k), ("v", v.descale, v), ("top", top, v)):
        address, *strides = by_block(x, like.values)
        held |= {name: pointer(address)} | dict(zip((f"{name}_b", f"{name}_h", f"{name}_n"), strides, strict=True))
    made = types.SimpleNamespace(**held)
    for name in ("of_rows", "of_keys"):
        setattr(made, name, functools.partial(on_torch(getattr(scales.Scales, name), reciprocal=lambda x: 1 / x), made))
    return made


def _attend(
    q: Quantised, k: Quantised, v: Quantised, scale: float, causal: bool, config: Fp8Config, interleaved: bool = False
) -> dict[str, Tensor]:
    """o and lse, as launch.forward has them from the kernel; three CTAs. interleaved: V is, before the TMA reads it."""
    (batch, heads, lq, d), (kv_heads, lk) = q.values.shape, k.values.shape[1:3]
    causal = causal and lq > 1
    o = torch.full((batch, heads, lq, d), math.nan)
    lse = torch.full((batch, heads, lq), math.nan)
    if causal and lq > lk:
        o[:, :, : lq - lk], lse[:, :, : lq - lk] = 0, -math.inf
    code = fixed(d, config, causal=causal, lq=lq, lk=lk, by_blocks=v.descale.dim() == 3, interleaved=interleaved)
    stored = as_stored(interleave_keys(v.values), interleaved=True).mT if interleaved else v.values
    problem = Problem(batch, heads, heads // kv_heads, lq, lk, d // 2, config.block_m, config.block_n, causal)
    descriptors = (reader(q.values, 64), reader(k.values, config.block_n), reader(stored, config.block_n))
    for tiles in assign(problem, 3):
        its = work(tiles, lq, lk)
        queries, keys, values = Channel(UNDER_WAY), Channel(UNDER_WAY), Channel(UNDER_WAY)
        turns = set()
        on_torch(producer.load_tiles)(descriptors, (queries, keys, values), its, its.end, 0, 0, config, causal)
        for index in range(config.consumers):
            BARRIERS.clear()

            def store(out: Any, at: list[int], buffer: Any) -> None:
                b, h, row, _ = at
                o[b, h, row : row + 64] = UNDER_WAY.leave(buffer)[: lq - row]

            run = on_torch(consumer.consumer, **REPLACED, tma_store=store)
            run(
                types.SimpleNamespace(dtype=torch.bfloat16), Pointer(lse.view(-1)), queries, keys, values,
                UNDER_WAY.buffer(torch.empty(64, d)), its, _scales(q, k, v, scale), heads, index, d, config,
                code["SCALE_BLOCK"], code["CAUSAL"], code["TAIL"], code["DIAGONALS"], code["V_BLOCKS"],
                code["INTERLEAVED"],
            )  # fmt: skip
            last = index == config.consumers - 1
            first = [("arrive", 8)] * (config.ping_pong and last)
            turn = [("sync", 8 + index), ("arrive", 8 if last else 9 + index)]
            turns.add((len(BARRIERS) - len(first)) // 2)
            assert first + turn * max(turns) == BARRIERS, "a turn is waited for, then given to the next consumer"
        assert len(turns) == 1, "consumers have the same number of turns"
        for channel, readers in ((queries, 1), (keys, config.consumers), (values, config.consumers)):
            assert channel.released == channel.taken == dict.fromkeys(channel.tiles, readers), (
                "every tile is released by all readers"
            )
        assert config.ping_pong or turns == {0}
    return {"o": o, "lse": lse}


def _drawn(per: str, *shape: int) -> Quantised:
    """Heads and blocks of rows of different sizes: descales that cannot be mixed up unnoticed."""
    x = torch.randn(shape) * (0.5 + torch.arange(shape[1])[:, None, None])
    return quantise((x * (1 + torch.arange(shape[2])[:, None] // 128 * 0.5)).bfloat16(), per=per)


@pytest.mark.parametrize(
    ("lq", "lk", "heads", "kv_heads", "d"),
    [(300, 300, 2, 1, 64), (256, 256, 2, 2, 64), (130, 517, 2, 1, 64), (517, 130, 1, 1, 64), (1, 200, 1, 1, 64),
     (200, 1, 1, 1, 64), (391, 517, 2, 1, 64), (200, 333, 2, 1, 128), (384, 448, 1, 1, 256)],
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
        for config, interleaved in zip(CONFIGS[d], itertools.cycle((True, False))):
            for name, got in _attend(q, k, v, d**-0.5, causal, config, interleaved ^ causal).items():
                want, limit = truth[name].value, truth[name].limit(3.0)
                wrong = (got.double() != want) & ~((got - want).abs() <= limit)
                assert not wrong.any(), (name, per, causal, config, interleaved)


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
        for config in CONFIGS[64]:
            got = _attend(*tiny, v, 0.125, causal, config)
            for name in ("o", "lse"):
                assert ((got[name] - truth[name].value).abs() <= truth[name].limit(3.0)).all(), (name, config)
    nothing = v._replace(descale=torch.zeros_like(v.descale))
    assert not any(_attend(q, k, nothing, 0.125, False, config)["o"].any() for config in CONFIGS[64])


def test_a_row_that_sees_one_key_returns_it() -> None:
    """P = 1 is a number of E4M3, whatever the scales of the blocks of V are."""
    torch.manual_seed(0)
    q, k, v = (_drawn("block", 1, 1, 384, 64) for _ in range(3))
    q.values[:, :, 128], k.values[:, :, 5] = 448.0, 448.0  # of 129 keys it sees the fifth alone
    for config in CONFIGS[64]:
        o = _attend(q, k, v, 8.0, True, config)["o"]
        assert (o[0, 0, 0] == dequantise(*v)[0, 0, 0].bfloat16()).all(), config
        assert (o[0, 0, 128] == dequantise(*v)[0, 0, 5].bfloat16()).all(), config


@pytest.mark.parametrize("length", [1, 15, 16, 37])
def test_interleaved_keys_are_in_the_order_that_is_agreed(length: int) -> None:
    v = torch.randn(2, 3, length, 64).to(torch.float8_e4m3fn)
    found = interleave_keys(v)
    assert found.shape == v.shape
    assert padding_refusal(found) is None
    memory = as_stored(found, interleaved=True).float()
    whole = torch.nn.functional.pad(v.float(), (0, 0, 0, -length % 16))
    assert (memory == whole[:, :, stored_order(whole.shape[2])].mT).all()


def test_interleaved_keys_need_room_for_the_last_16() -> None:
    v = torch.zeros(1, 2, 64, 48).to(torch.float8_e4m3fn).mT[:, :, :40]
    assert padding_refusal(v) is None
    assert padding_refusal(v[:, :1, 16:]) is None
    said = padding_refusal(torch.zeros(1, 2, 64, 40).to(torch.float8_e4m3fn).mT)
    assert said is not None
    assert "not stored up to a multiple of 16" in said


def _quads(
    text: str, constraints: str, arguments: list[Tensor], dtype: Any, is_pure: bool, pack: int
) -> Tensor | tuple[Tensor, ...]:
    """Inline PTX on numbers of columns (rows, groups, threads), quad after quad: what each register names."""
    outputs = constraints.count("=")
    rows, groups, _ = arguments[0].shape
    out = torch.zeros(outputs, rows, groups, 4, dtype=torch.int64)
    for row, u in itertools.product(range(rows), range(groups)):
        quad = [{f"${outputs + i}": int(x[row, u, t]) for i, x in enumerate(arguments)} for t in range(4)]
        for t, held in enumerate(quad_exchange(text, quad)):
            for h in range(outputs):
                out[h, row, u, t] = sum(column << 8 * i for i, column in enumerate(held[f"${h}"]))
    return tuple(out) if outputs > 1 else out[0]


def _packed_columns(monkeypatch: pytest.MonkeyPatch, function: Any) -> Tensor:
    monkeypatch.setattr(Language, "inline_asm_elementwise", staticmethod(_quads), raising=False)
    columns = torch.arange(128).expand(64, 128)
    asm = {"_asm": lambda: operand._ASM, "_asm_in_place": lambda: operand._ASM_IN_PLACE}
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "type", types.SimpleNamespace(layout=None))
        return on_torch(function, **asm)(columns)


def test_packing_brings_four_neighbours_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """`packed` on numbers of columns: register after register, quad after quad, by its own PTX."""
    first = 4 * torch.arange(32)
    assert (_packed_columns(monkeypatch, operand.packed) == sum((first + i) << 8 * i for i in range(4))).all()


def test_packing_in_place_follows_the_order_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    order = torch.tensor(stored_order(128)).view(32, 4)
    assert (_packed_columns(monkeypatch, operand.packed_in_place) == sum(order[:, i] << 8 * i for i in range(4))).all()
