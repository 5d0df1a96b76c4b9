"""The Hopper forward as far as no GPU is needed: its lists of tiles, what it refuses, and one compile."""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels import compiling
from reference_kernels.hopper import cases, supports
from reference_kernels.hopper.configs import MOST_SHARED, TABLE, Config, lookup
from reference_kernels.hopper.launch import constants, problem_of
from reference_kernels.hopper.schedule import Problem, assign, consumers_with_rows, cost, key_blocks
from reference_kernels.hopper.work import few_columns

CONFIGS = sorted({c for by_mask in TABLE.values() for rules in by_mask.values() for _, c in rules}, key=str)
LENGTHS = (1, 63, 64, 65, 128, 129, 192, 300, 512, 513)


def _decoded(code: int) -> tuple[int, int, int, int]:
    """(batch, query head, kv head, row block), as work.Work.tile reads a code."""
    return code >> 44, code >> 32 & 0xFFF, code >> 20 & 0xFFF, code & 0xFFFFF


def _problem(config: Config, batch: int, heads: int, group: int, lq: int, lk: int, causal: bool) -> Problem:
    return problem_of(batch, heads, heads // group, lq, lk, 64, config, causal=causal)


def _problems(count: int) -> list[Problem]:
    draw = random.Random(0)
    problems = []
    for _ in range(count):
        config, group = draw.choice(CONFIGS), draw.choice((1, 3))
        lq, lk = draw.choice(LENGTHS), draw.choice(LENGTHS)
        heads = group * draw.choice((1, 2))
        problems.append(_problem(config, draw.choice((1, 5)), heads, group, lq, lk, draw.random() < 0.7))
    # Without what is short, as the FP8 kernel is launched.
    return problems + [p._replace(short=0, rowless=False) for p in problems]


def _pads(p: Problem) -> tuple[int, int]:
    """Rows before the first in tile 0, keys before the first in block 0."""
    return (-p.lq % p.block_m if p.causal and p.short else 0), (-p.lk % p.block_n if p.short else 0)


@pytest.mark.parametrize("workers", [1, 7, 132])
def test_every_tile_that_sees_a_key_is_assigned_once(workers):
    for p in _problems(60):
        lists = assign(p, workers)
        found = [_decoded(code) for tiles in lists for code in tiles]
        first = max(0, p.lq - p.lk) if p.causal else 0  # the first row that sees a key
        first += _pads(p)[0]
        want = {
            (batch, head, head // p.group, block)
            for batch in range(p.batch)
            for head in range(p.heads)
            for block in range(first // p.block_m, -(-p.lq // p.block_m))
        }
        assert len(found) == len(set(found))
        assert set(found) == want
        assert all(lists)


def test_a_tile_visits_exactly_the_blocks_of_keys_that_its_rows_see():
    for p in _problems(60):
        for block in range(-(-p.lq // p.block_m)):
            rows, keys = _pads(p)
            row = min((block + 1) * p.block_m - rows, p.lq) - 1
            seen = min(p.lk, row + 1 + p.lk - p.lq) if p.causal else p.lk
            blocks = key_blocks(p, block)
            assert blocks * p.block_n - keys >= seen
            # A tile that ends beyond Lq may visit what its missing rows would have seen, up to Lk.
            beyond = 0 if rows or p.lq % p.block_m == 0 else p.block_m
            assert (blocks - 1) * p.block_n - keys < max(0, min(p.lk, seen + beyond)) or blocks == 0


@pytest.mark.parametrize("n", [2048, 2049, 4097, 8191, 8192, 8193, 8292])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_worker_waits_long_for_another(d, n):
    p = _of_tokens(d, n, causal=True)
    loads = _loads(p)
    assert len(loads) == 132
    assert max(loads) <= 1.02 * sum(loads) / len(loads)


def _of_tokens(d: int, n: int, *, causal: bool) -> Problem:
    """16k tokens of hidden size 2048 in sequences of n."""
    config = lookup(d, causal=causal, lq=n, lk=n)
    return _problem(config, round(16384 / n), 2048 // d, 1, n, n, causal)._replace(d=d)


def _loads(p: Problem) -> list[int]:
    """What `cost` says of each worker's tiles."""
    lists = [[code & 0xFFFFF for code in tiles] for tiles in assign(p, 132)]
    return [sum(cost(p, block, key_blocks(p, block)) for block in tiles) for tiles in lists]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_row_and_a_key_more_keep_the_gpu_busy_little_longer(d, causal):
    """By the estimates of `cost`; what it is on a GPU is measured (measurements/hopper.py, cells "loss")."""
    for n, most in ((2048, 1.06), (8192, 1.02)):
        even, more = (max(_loads(_of_tokens(d, m, causal=causal))) for m in (n, n + 1))
        assert more <= most * even


def test_tiles_whose_consumers_lack_rows_fill_up_and_are_visited_with_their_heads():
    p = _of_tokens(128, 2049, causal=False)
    assert [consumers_with_rows(p, block) for block in (0, 15, 16)] == [2, 2, 1]
    lists = [[_decoded(code) for code in tiles] for tiles in assign(p, 132)]
    # 2048 tiles and 128 that take 0.6 of the time each: no CTA has 16 and one of these, or 15 and three.
    lacking = [sum(block == 16 for *_, block in tiles) for tiles in lists]
    assert {(len(tiles) - few, few) for tiles, few in zip(lists, lacking, strict=True)} == {(16, 0), (15, 2)}
    for tiles in lists:
        heads = [(batch, head) for batch, head, *_ in tiles]
        assert heads == sorted(heads)
    for lq, consumers in ((2048, 2), (2047, 2), (1985, 2), (1984, 1), (1921, 1)):
        assert consumers_with_rows(p._replace(lq=lq), 15) == consumers


def _code(config: Config, lq: int, lk: int, *, causal: bool) -> tuple[bool, int, bool, bool]:
    code = constants(128, config, causal=causal, freeze=True, lq=lq, lk=lk)
    return code["DIAGONALS"], code["SHORT"], code["ROWLESS"], code["TAIL"]


def test_what_is_ragged_decides_the_code():
    square, wide = lookup(128, causal=True, lq=1024, lk=1024), lookup(64, causal=True, lq=8192, lk=8192)
    low = lookup(256, causal=True, lq=1024, lk=1024)
    # Rows end with the last row where that spares the diagonal a second block, or where few keys are left over.
    for lengths, short in (
        ((1024, 1024), 0), ((1000, 1000), 0), ((1000, 1024), 128), ((1000, 1056), 32), ((1000, 1040), 16),
        ((1000, 1057), 128), ((1057, 1057), 0), ((1025, 1025), 16), ((100, 28), 128), ((28, 28), 0),
    ):  # fmt: skip
        assert _code(square, *lengths, causal=True) == (False, short, False, False)
    assert _code(wide, 8192, 8192, causal=True) == (True, 0, False, False)
    assert _code(wide, 8191, 8193, causal=True) == (True, 0, False, False), "they never meet"
    assert _code(low, 1000, 1040, causal=True) == (True, 16, False, False)
    assert _code(low, 1000, 1041, causal=True) == (True, 0, False, False)
    assert _code(square, 1024, 1024, causal=False) == (False, 0, False, False)
    assert _code(square, 1025, 1024, causal=False) == (False, 0, True, False)
    assert _code(square, 1000, 1024, causal=False) == (False, 0, False, False)
    assert _code(square, 1024, 1025, causal=False) == (False, 16, True, False)
    assert _code(square, 1024, 1041, causal=False) == (False, 32, True, False)
    assert _code(square, 1024, 1, causal=False) == (False, 0, False, True), "no block beside them"
    assert _code(square, 1024, 1057, causal=False) == (False, 0, False, True)
    assert _code(square, 1025, 1057, causal=False) == (False, 0, True, True)
    assert _code(wide, 2048, 2048, causal=False) == (False, 0, False, False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_tiles_fit_into_shared_memory(d: int, causal: bool) -> None:
    """At D 128 a few keys beside whole blocks take the place of O's buffers."""
    assert compiling.ARCHITECTURES[90].shared_limit - 1024 == MOST_SHARED
    for n in (1024, 1025, 1041, 2049, 8193):
        config = lookup(d, causal=causal, lq=n, lk=n)
        code = constants(d, config, causal=causal, freeze=True, lq=n, lk=n)
        few = few_columns(code["SHORT"], config.block_n)
        assert code["CONFIG"].shared_bytes(d, few) <= MOST_SHARED
        assert code["CONFIG"] == (replace(config, o_in_q=True) if d == 128 and few else config)


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "options", "reason"),
    [
        (_tensor(1, 2, 8, 64, dtype=torch.float32), {}, "float32"),
        (_tensor(1, 2, 8, 80), {}, "D 80"),
        (_tensor(1, 2, 8, 64), {"scale": -1.0}, "scale -1.0"),
        (_tensor(1, 2, 8, 64), {"scale": 0.0}, "scale 0.0"),
        (_tensor(1, 2, 8, 64, dtype=torch.float16), {"form": "freeze"}, "float16"),
        (_tensor(1, 2, 0, 64), {}, "empty"),
        (_tensor(1, 2, 64, 8).transpose(2, 3), {}, "not contiguous"),
        (_tensor(1, 2, 8, 65)[..., 1:], {}, "16 bytes"),
        (_tensor(1, 2, 1, 64).expand(1, 2, 8, 64), {}, "strides"),
        (_tensor(1, 5000, 1, 64), {}, "heads"),
        (_tensor(1, 2, 8, 64), {}, "compute capability"),
        (_tensor(1, 1, 1, 72)[..., :64], {}, "compute capability"),
    ],
)
def test_what_it_cannot_serve_is_said_with_its_reason(q, options, reason):
    said = supports(q, q, q, **options)
    assert said is not None
    assert reason in said


def test_a_kernel_compiles_to_wgmma_and_tma_without_spills():
    case = cases.forward_case("fp16", 64, lookup(64, causal=False, lq=512, lk=512))
    result = compiling.compile_case(case, 90)
    assert compiling.violations(result) == []
    assert result.counts["wgmma"] > 0
    assert result.counts["tma"] > 0


def test_the_lane_misses_an_instruction_that_a_case_names():
    case = cases.HopperCase("named", None, {}, {}, 4, 1)
    result = compiling.Compiled("named", 90, 4, instructions=case.instructions, counts={"wgmma": 1})
    assert compiling.violations(result) == ["named for sm_90 has no tma instruction."]
