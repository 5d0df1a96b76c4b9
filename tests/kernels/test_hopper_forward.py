"""The Hopper forward as far as no GPU is needed: its lists of tiles, what it refuses, and one compile."""

import random

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels import compiling
from reference_kernels.hopper import cases, supports
from reference_kernels.hopper.configs import TABLE, lookup
from reference_kernels.hopper.launch import constants
from reference_kernels.hopper.schedule import Problem, assign, key_blocks

CONFIGS = sorted({c for by_mask in TABLE.values() for rules in by_mask.values() for _, c in rules}, key=str)
LENGTHS = (1, 63, 64, 65, 128, 129, 192, 300, 512, 513)


def _decoded(code: int) -> tuple[int, int, int, int]:
    """(batch, query head, kv head, row block), as work.Work.tile reads a code."""
    return code >> 44, code >> 32 & 0xFFF, code >> 20 & 0xFFF, code & 0xFFFFF


def _problems(count: int) -> list[Problem]:
    draw = random.Random(0)
    problems = []
    for _ in range(count):
        config, group = draw.choice(CONFIGS), draw.choice((1, 3))
        lq, lk = draw.choice(LENGTHS), draw.choice(LENGTHS)
        heads = group * draw.choice((1, 2))
        problems.append(
            Problem(draw.choice((1, 5)), heads, group, lq, lk, 64, config.block_m, config.block_n, draw.random() < 0.7)
        )
    return problems


@pytest.mark.parametrize("workers", [1, 7, 132])
def test_every_tile_that_sees_a_key_is_assigned_once(workers):
    for p in _problems(60):
        lists = assign(p, workers)
        found = [_decoded(code) for tiles in lists for code in tiles]
        first = max(0, p.lq - p.lk) if p.causal else 0  # the first row that sees a key
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
            row = min((block + 1) * p.block_m, p.lq) - 1
            seen = min(p.lk, row + 1 + p.lk - p.lq) if p.causal else p.lk
            blocks = key_blocks(p, block)
            assert blocks * p.block_n >= seen
            # A tile that ends beyond Lq may visit what its missing rows would have seen, up to Lk.
            assert (blocks - 1) * p.block_n < max(0, min(p.lk, seen + p.block_m)) or blocks == 0


@pytest.mark.parametrize("n", [2048, 2049, 4097, 8191, 8192, 8193, 8292])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_worker_waits_long_for_another(d, n):
    config, heads = lookup(d, causal=True, lq=n, lk=n), 2048 // d
    p = Problem(round(16384 / n), heads, 1, n, n, d, config.block_m, config.block_n, True)
    loads = [sum(key_blocks(p, code & 0xFFFFF) + 1 for code in tiles) for tiles in assign(p, 132)]
    assert len(loads) == 132
    assert max(loads) <= 1.02 * sum(loads) / len(loads)


def test_one_diagonal_block_needs_no_masked_loop():
    config = lookup(128, causal=True, lq=1024, lk=1024)
    assert not constants(128, config, causal=True, freeze=True, lq=1000, lk=1000)["DIAGONALS"]
    assert constants(128, config, causal=True, freeze=True, lq=1000, lk=1001)["DIAGONALS"]
    assert not constants(128, config, causal=False, freeze=True, lq=1000, lk=1001)["DIAGONALS"]
    assert constants(128, config, causal=False, freeze=True, lq=1000, lk=1001)["TAIL"]


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
