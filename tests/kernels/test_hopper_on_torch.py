"""The source of the Hopper forward, run on torch tensors, against the oracles: all that it says about numbers."""

from __future__ import annotations

import collections
import itertools
import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gluon_on_torch import Pointer, on_torch
from hopper_machine import Channel, UnderWay, reader, work

import oracles
from reference_kernels.hopper import consumer, producer, softmax
from reference_kernels.hopper.configs import TABLE, Config
from reference_kernels.hopper.launch import LOG2E, constants, problem_of
from reference_kernels.hopper.schedule import assign

NARROW, WIDE = (TABLE[64][False][i][1] for i in (1, 0))
CONFIGS = {64: (NARROW, WIDE), 128: (TABLE[128][True][0][1],), 256: (TABLE[256][True][0][1],)}


UNDER_WAY = UnderWay()

REPLACED: dict[str, Any] = {
    "warpgroup_mma": UNDER_WAY.multiply,
    "warpgroup_mma_wait": UNDER_WAY.wait,
    "before_next_wait": lambda x: x,
    "known_here": lambda x: x,
    "rounded_pairs": lambda p, dtype: p.bfloat16().float(),
    "scale_rows": lambda acc, factor: acc * factor,
    "product": lambda x, y: x * y,
    "fence_async_shared": lambda: None,
    "tma": types.SimpleNamespace(store_wait=UNDER_WAY.wait_stores),
}
for _name in ("rows_like", "hide_after", "hide_before", "partial_sums", "probabilities", "raised_maximum"):
    REPLACED[_name] = on_torch(getattr(softmax, _name), **REPLACED)
for _name in ("last_product", "has_outgrown", "store_present"):
    REPLACED[_name] = on_torch(getattr(consumer, _name), **REPLACED)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, config: Config, freeze: bool
) -> tuple[dict[str, Tensor], collections.Counter[str]]:
    """o and lse, as launch.forward has them from the kernel, with three CTAs; and how many steps of a consumer were
    taken ("step") and passed over ("pass over"), and how many products had how many columns of S ("32 columns")."""
    (batch, heads, lq, d), (kv_heads, lk) = q.shape, k.shape[1:3]
    causal = causal and lq > 1
    o, lse = torch.full(q.shape, math.nan), torch.full(q.shape[:3], math.nan)
    if causal and lq > lk:
        o[:, :, : lq - lk], lse[:, :, : lq - lk] = 0, -math.inf
    code = constants(d, config, causal=causal, freeze=freeze, lq=lq, lk=lk)
    problem = problem_of(batch, heads, kv_heads, lq, lk, d, config, causal=causal)
    did: collections.Counter[str] = collections.Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            did[name] += 1
            return function(*arguments)

        return call

    def multiply(a: Tensor, b: Tensor, acc: Tensor, **rest: Any) -> Any:
        if b.stride(0) == 1:  # K^T, not V
            did[f"{b.shape[1]} columns"] += 1
        return UNDER_WAY.multiply(a, b, acc, **rest)

    def store(out: Any, at: list[int], buffer: Any) -> None:
        b, h, first, _ = at
        assert first >= 0, "an H200 takes a store from before the first row for an illegal instruction"
        o[b, h, first : first + 64] = UNDER_WAY.leave(buffer)[: lq - first].float()

    def read_rows(batch: int, head: int, at: int) -> Tensor:
        return UNDER_WAY.buffer(reader(q, 64)(batch, head, at))

    lists = assign(problem, 3)
    for tiles in lists:
        its = work(tiles, lq, lk)
        channels = [Channel(UNDER_WAY) for _ in range(5)]
        handed: collections.Counter[tuple[str, int]] = collections.Counter()
        names = REPLACED | {"named_barrier": lambda op, ident, x, handed=handed: handed.update([(op, ident)])}
        names["warpgroup_mma"] = multiply
        names["step"] = counted("step", on_torch(consumer.step, **names))
        names["pass_over"] = counted("pass over", on_torch(consumer.pass_over, **names))
        names["tma_store"] = store
        run = on_torch(consumer.attend_tiles, **names)

        def walk(
            end: int, tiles_before: int, blocks_before: int, freeze: bool,
            its: Any = its, channels: Any = channels, run: Any = run,
        ) -> tuple[int, bool]:  # fmt: skip
            rows = [read_rows] + [reader(x, n) for n in (config.block_n, code["SHORT"]) for x in (k, v)]
            loaded = on_torch(producer.load_tiles)(
                rows, channels, its, end, tiles_before, blocks_before, code["CONFIG"], causal, code["SHORT"]
            )
            outgrown = False
            for index in range(config.consumers):
                outputs = (types.SimpleNamespace(dtype=torch.bfloat16), Pointer(o.view(-1)))
                count, found = run(
                    outputs, Pointer(lse.view(-1)), channels,
                    UNDER_WAY.buffer(torch.empty(64, d)), its, end, tiles_before, blocks_before,
                    d**-0.5 * LOG2E, heads, index, d, code["CONFIG"], causal, code["TAIL"], code["DIAGONALS"],
                    code["SHORT"], code["ROWLESS"], freeze,
                )  # fmt: skip
                UNDER_WAY.wait_stores(0)
                assert count == loaded, "producer and consumers count the same blocks"
                outgrown = outgrown or bool(found)
            return loaded, outgrown

        blocks, again = walk(its.end, 0, 0, freeze)
        if freeze and again:
            did["repeated"] += 1
            walk(its.end, its.end, blocks, False)
        for channel in channels:
            readers = 1 if channel is channels[0] else config.consumers
            assert channel.released == channel.taken == dict.fromkeys(channel.tiles, readers)
        if config.ping_pong:
            turns = [(handed["sync", 8 + i], handed["arrive", 8 + i]) for i in range(config.consumers)]
            assert len({n for pair in turns for n in pair}) == 1, "each consumer's turns are those of the others"
    return {"o": o, "lse": lse}, did


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Gluon's tensors have and torch's have not."""
    monkeypatch.setattr(Tensor, "type", types.SimpleNamespace(layout=None))


def _wrong(got: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[str]:
    """What is beyond the suite's bound, at three times the error that is expected of bf16."""
    truth = oracles.evaluate(
        q, k, v, oracles.AttentionSpec(causal=causal), arithmetic=oracles.Arithmetic.of(torch.bfloat16)
    )
    return [
        name
        for name, x in got.items()
        if ((x.double() != truth[name].value) & ~((x - truth[name].value).abs() <= truth[name].limit(3.0))).any()
    ]


def _drawn(batch: int, heads: int, kv_heads: int, lq: int, lk: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(batch, h, n, d).bfloat16() for h, n in ((heads, lq), (kv_heads, lk), (kv_heads, lk)))


# (lq, lk): even; a key or a row beside; a quarter of a block of keys and one more; few; rows without keys, and more
# keys than rows; rows that leave one or two consumers without any.
LENGTHS = [
    (256, 256), (257, 257), (255, 255), (129, 129), (127, 127), (65, 65), (64, 64), (63, 63), (1, 1), (1, 300),
    (300, 1), (17, 417), (160, 416), (161, 417), (200, 330), (333, 700), (256, 320), (191, 384), (385, 384), (513, 17),
    (391, 130), (640, 384), (300, 33), (449, 449),
]  # fmt: skip


@pytest.mark.parametrize(("lq", "lk"), LENGTHS)
@pytest.mark.parametrize("d", CONFIGS)
def test_the_forward_is_right(d: int, lq: int, lk: int) -> None:
    q, k, v = _drawn(1, 2, 1, lq, lk, d)
    for config, causal, freeze in itertools.product(CONFIGS[d], (False, True), (False, True)):
        got, _ = _attend(q, k, v, causal, config, freeze)
        assert not _wrong(got, q, k, v, causal), (config, causal, freeze)


@pytest.mark.parametrize(
    ("lk", "products"),
    [(256, {128: 2}), (257, {128: 2, 16: 1}), (272, {128: 2, 16: 1}), (273, {128: 2, 32: 1}), (288, {128: 2, 32: 1}),
     (289, {128: 3}), (383, {128: 3}), (128, {128: 1}), (31, {128: 1})],
)  # fmt: skip
def test_a_few_keys_are_multiplied_as_a_few(lk: int, products: dict[int, int]) -> None:
    """Once for each of three consumers."""
    q, k, v = _drawn(1, 1, 1, 192, lk, 64)
    _, did = _attend(q, k, v, False, WIDE, False)
    assert {name: n for name, n in did.items() if "columns" in name} == {
        f"{columns} columns": 3 * n for columns, n in products.items()
    }


def test_every_causal_tile_multiplies_the_few_keys_once() -> None:
    """Two consumers; of three tiles the first sees no other keys, and has a block that stands in."""
    q, k, v = _drawn(1, 1, 1, 257, 257, 256)
    _, did = _attend(q, k, v, True, CONFIGS[256][0], True)
    products = {"64 columns": 2 * (1 + 2 + 4), "16 columns": 2 * 3}
    assert {name: n for name, n in did.items() if "columns" in name} == products


@pytest.mark.parametrize(("lq", "empty"), [(128, 0), (129, 1), (192, 1), (193, 0), (1, 1)])
def test_a_consumer_without_rows_multiplies_once_a_tile(lq: int, empty: int) -> None:
    for lk, d in itertools.product((384, 385), (64, 128)):
        q, k, v = _drawn(1, 1, 1, lq, lk, d)
        _, did = _attend(q, k, v, False, NARROW if d == 64 else CONFIGS[d][0], True)
        steps, consumers = lk // 128 - 1, 2 * -(-lq // 128)
        assert (did["step"], did["pass over"]) == (steps * (consumers - empty), steps * empty)


@pytest.mark.parametrize("lk", [385, 417])
@pytest.mark.parametrize("d", CONFIGS)
def test_a_reference_that_is_outgrown_is_given_up(d: int, lk: int) -> None:
    """Scores of an early key are far above those that the frozen maximum is taken of."""
    q, k, v = _drawn(1, 1, 1, 300, lk, d)
    k[:, :, 5] *= 60
    for config, causal in itertools.product(CONFIGS[d], (False, True)):
        got, did = _attend(q, k, v, causal, config, True)
        assert did["repeated"]
        assert not _wrong(got, q, k, v, causal), (config, causal)


@pytest.mark.parametrize("d", CONFIGS)
def test_a_few_keys_at_the_beginning_are_in_the_frozen_maximum(d: int) -> None:
    q, k, v = _drawn(1, 1, 1, 300, 385, d)
    k[:, :, 0] *= 60
    for config, causal in itertools.product(CONFIGS[d], (False, True)):
        got, did = _attend(q, k, v, causal, config, True)
        short = constants(d, config, causal=causal, freeze=True, lq=300, lk=385)["SHORT"]
        assert short in (0, 16)
        assert bool(did["repeated"]) == (short == 0)
        assert not _wrong(got, q, k, v, causal), (config, causal)
