"""The Hopper backward as far as no GPU is needed: which blocks a tile meets and masks, its launches, its ends.

The walks over blocks are repeated here from the kernels, which no interpreter runs, and held against brute force;
`rows_of` and the launcher are the kernels' own.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import check

pytest.importorskip("triton")

from reference_kernels.hopper import backward, backward_tile

ROWS = 64
LENGTHS = (1, 2, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 257, 320, 449)
PROBLEMS = list(itertools.product(LENGTHS, LENGTHS, (False, True)))


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """backward_tile.rows_of as a Python function of ints."""
    plain = SimpleNamespace(maximum=max, where=lambda condition, a, b: a if condition else b)
    monkeypatch.setattr(backward_tile, "gl", plain)
    monkeypatch.setattr(backward_tile, "ROWS", ROWS)
    return backward_tile.rows_of.fn


def sees(row: int, key: int, lq: int, lk: int, causal: bool) -> bool:
    return row < lq and key < lk and (not causal or key <= row + lk - lq)


def onepass_walk(rows_of: Any, start: int, lq: int, lk: int, causal: bool, d: int) -> tuple[int, int, int]:
    """(first block, blocks, masked blocks) of a tile of keys: backward_onepass.onepass_kernel and consumer."""
    masks = backward._masks(lq, lk, causal, backward.TILES[d])
    first, n, masked = rows_of(start, lq, lk, 128, causal)
    n = max(n, 2)
    if d == 64:
        n, masked = (n + 1) // 2 * 2, (masked + 1) // 2 * 2
    return first, n, (max(2, min(masked, n)) if masks.rolled else 2) if masks.any else 0


def dkv_walk(rows_of: Any, start: int, lq: int, lk: int, causal: bool, d: int) -> tuple[int, int, int]:
    """The same of dkv_kernel and consumer in backward_dkv, wide_dkv_kernel and dv_consumer in backward_dkv_wide."""
    tiles = backward.TILES[d]
    masks = backward._masks(lq, lk, causal, tiles)
    peeled = 2 if d < 256 and masks.any and not masks.rolled else 0
    first, n, masked = rows_of(start, lq, lk, tiles.keys, causal)
    n = max(n, peeled)
    return first, n, peeled or (max(1, min(masked, n)) if masks.any else 0)


@pytest.mark.parametrize(
    ("walk", "d"), [(onepass_walk, 64), (onepass_walk, 128), (dkv_walk, 64), (dkv_walk, 128), (dkv_walk, 256)]
)
def test_a_tile_of_keys_meets_all_rows_that_see_it_and_masks_what_they_do_not_see(
    rows_of: Any, walk: Any, d: int
) -> None:
    keys = backward.TILES[d].keys
    for lq, lk, causal in PROBLEMS:
        blocks = backward._blocks(lq)
        for start in range(0, lk, keys):
            first, n, masked = walk(rows_of, start, lq, lk, causal, d)
            assert n > 0
            assert first + n <= blocks, "beyond the workspace of a head"
            for block in range(blocks):
                low, high = block * ROWS, min(block * ROWS + ROWS, lq) - 1
                if low > high:  # the block without rows
                    continue
                met = first <= block < first + n
                assert met or not sees(high, start, lq, lk, causal), (lq, lk, causal, start, block)
                if met and block - first >= masked:
                    assert sees(low, start + keys - 1, lq, lk, causal), (lq, lk, causal, start, block)


def dq_walk(start: int, lq: int, lk: int, causal: bool, d: int) -> tuple[list[int], int]:
    """(blocks of keys in order, how many of the first are masked): dq_kernel, load_keys and consumer in backward_dq."""
    tiles = backward.TILES[d]
    block = tiles.block
    masks = backward._masks(lq, lk, causal, tiles)
    peeled = backward._peeled_keys(tiles, causal, masks)
    n, masked = -(-lk // block), max(peeled, 1)
    if causal:
        n = max((min(start + 128 + lk - lq, lk) + block - 1) // block, masked)
        if masks.q_rolled:
            masked = max(n - max(start + lk - lq + 1, 0) // block, masked)
    order = [j + n - masked if j < masked else j - masked for j in range(n)]
    return order, max(masked if masks.q_rolled else 0, peeled)


@pytest.mark.parametrize("d", backward.HEAD_DIMS)
def test_a_tile_of_rows_meets_all_keys_it_sees_once_and_masks_what_it_does_not_see(d: int) -> None:
    rows, block = backward.TILES[d].rows, backward.TILES[d].block
    for lq, lk, causal in PROBLEMS:
        for start in range(0, lq, rows):
            order, masked = dq_walk(start, lq, lk, causal, d)
            assert sorted(order) == list(range(len(order)))
            last_row = min(start + rows, lq) - 1
            for key_block in range(-(-lk // block)):
                met = key_block in order
                assert met or not sees(last_row, key_block * block, lq, lk, causal), (lq, lk, causal, start)
                if met and order.index(key_block) >= masked:
                    assert sees(start, key_block * block + block - 1, lq, lk, causal), (lq, lk, causal, start)


@pytest.mark.parametrize(
    ("heads", "causal"), [(1, True), (6, True), (7, True), (48, False), (70000, True), (140000, False)]
)
def test_the_grid_has_every_tile_of_every_head_once(heads: int, causal: bool) -> None:
    chunk, tiles, chunks = backward._grid(5, heads, 10 << 20, causal)
    # backward_tile.place
    assert sorted(z * chunk + x for z in range(chunks) for x in range(chunk)) == list(range(heads))
    assert tiles == 5
    assert max(tiles, chunks) <= 65535, "CUDA's limit for the second and third axis of a grid"


class Recorded:
    """Stands in for a kernel: what it was launched with, by name."""

    def __init__(self, name: str, kernel: Any, launches: list[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.arg_names, self.launches = name, kernel.arg_names, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            given = {k: v for k, v in named.items() if k not in ("num_warps", "enable_fp_fusion")}
            names = self.arg_names
            assert sorted([*names[: len(arguments)], *given]) == sorted(names), "an argument is missing or given twice"
            self.launches.append((self.name, dict(zip(names, arguments, strict=False)) | given | {"grid": grid}))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for name in ("prepare", "finish", "onepass", "dkv", "wide_dkv", "dq"):
        monkeypatch.setattr(backward, f"{name}_kernel", Recorded(name, getattr(backward, f"{name}_kernel"), found))
    monkeypatch.setattr(backward, "supports", backward._problem)
    return found


def run(d: int, lq: int, lk: int, heads: int = 2, kv_heads: int = 2, **options: Any) -> tuple[torch.Tensor, ...]:
    q, o, do = (torch.zeros(2, heads, lq, d, dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.zeros(2, kv_heads, lk, d, dtype=torch.bfloat16) for _ in range(2))
    return backward.backward(q, k, v, o, torch.zeros(2, heads, lq), do, scale=0.1, **options)


@pytest.mark.parametrize(
    ("d", "lq", "causal", "deterministic", "kernels"),
    [
        (64, 1024, False, False, ["prepare", "onepass", "finish"]),
        (64, 1024, False, True, ["prepare", "dkv", "dq"]),
        (128, 1024, True, False, ["prepare", "onepass", "finish"]),
        (128, 1, True, True, ["prepare", "dkv", "dq"]),
        (256, 1024, True, False, ["prepare", "wide_dkv", "dq"]),
        (256, 1024, True, True, ["prepare", "wide_dkv", "dq"]),
    ],
)
def test_which_kernels_run(
    launches: Any, d: int, lq: int, causal: bool, deterministic: bool, kernels: list[str]
) -> None:
    run(d, lq, lq, causal=causal, deterministic=deterministic)
    assert [name for name, _ in launches] == kernels


@pytest.mark.parametrize("d", backward.HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (333, 700), (700, 333), (1024, 1024)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_launches_are_those_that_the_compile_lane_compiles(
    launches: Any, d: int, causal: bool, lengths: tuple[int, int], deterministic: bool
) -> None:
    """Every descriptor has the type of the compile cases, and every constant a value that one of them may have."""
    lq, lk = lengths
    run(d, lq, lk, heads=8, kv_heads=2, causal=causal, deterministic=deterministic)
    for name, given in launches:
        if name in ("prepare", "finish"):
            continue
        case = backward.compile_case(name.removeprefix("wide_"), "bf16", d, causal=causal, group=4)
        for argument, kind in case.signature.items():
            if kind.startswith("tensordesc"):
                x = given[argument]
                element = {torch.bfloat16: "bf16", torch.float32: "fp32"}[x.base.dtype]
                assert kind == f"tensordesc<{element}[{', '.join(map(str, x.block_shape))}],{x.layout!r}>", argument
        assert set(case.constexprs) <= given.keys()


def test_empty_problems_launch_nothing_and_give_zeros(launches: Any) -> None:
    dq, dk, dv = run(64, 0, 5, causal=False)
    assert (dq.shape, dk.shape) == ((2, 2, 0, 64), (2, 2, 5, 64))
    assert not dk.any()
    assert not dv.any()
    assert launches == []


@pytest.mark.parametrize(
    ("q", "reason"),
    [
        (torch.zeros(1, 2, 8, 64), "float32"),
        (torch.zeros(1, 2, 8, 80).half(), "80"),
        (torch.zeros(1, 2, 8, 65).half()[..., 1:], "16 bytes"),
        (torch.zeros(1, 2, 1, 64).half().expand(1, 2, 8, 64), "16 bytes"),
        (torch.zeros(1, 2, 8, 64).half(), "compute capability 9.0"),
    ],
)
def test_what_it_cannot_serve_is_said_with_its_reason(q: torch.Tensor, reason: str) -> None:
    said = backward._problem(q, q, q) or backward.supports(q, q, q) or ""
    assert reason in said
    with pytest.raises(ValueError, match="Hopper kernels"):
        backward.backward(q, q, q, q, torch.zeros(q.shape[:3]), q, scale=0.1, causal=False)


def test_what_surrounds_the_passes() -> None:
    check(
        """
import torch
from reference_kernels.hopper.backward_ends import finish_kernel, prepare_kernel

torch.manual_seed(0)
B, H, L, D = 2, 3, 100, 64
o, do = (torch.randn(B, L, H, D).half().transpose(1, 2) for _ in range(2))
lse, dlse = torch.randn(B, H, L), torch.randn(B, H, L)
lse[0, 1, 5] = -torch.inf
blocks = -(-L // 64) + 1
lse2, delta = torch.full((2, B * H * blocks * 64), torch.nan)
sums = torch.full((B * H * blocks * 64 * D // 256, 256), torch.nan)
prepare_kernel[(B * H * blocks,)](
    o, *o.stride(), do, *do.stride(), lse, *lse.stride(), dlse, *dlse.stride(), lse2, delta, sums, H, L, blocks,
    D=D, ROWS=64,
)
lse2, delta = (x.view(B, H, blocks * 64) for x in (lse2, delta))
want = lse * 1.4426950408889634
want[0, 1, 5] = torch.inf  # a row without keys
assert torch.allclose(lse2[..., :L], want)
assert (lse2[..., L:] == torch.inf).all() and (delta[..., L:] == 0).all() and (sums == 0).all()
assert torch.allclose(delta[..., :L], (o.float() * do.float()).sum(-1) - dlse, atol=1e-4)

for D in (64, 128):
    x = torch.randn(B * H, blocks * 64, D)
    # As backward_onepass.Share.add leaves it: 64 columns at a time, in the order of wgmma.flattened.
    tiles = x.view(B * H, blocks, 64, D // 64, 64).permute(0, 1, 3, 2, 4).reshape(-1, 4, 2, 8, 8, 4, 2)
    sums = tiles.permute(0, 4, 1, 3, 5, 2, 6).reshape(-1, 256).contiguous()
    dq = torch.full((B, L, H, D), torch.nan).half().transpose(1, 2)
    finish_kernel[(B * H * (blocks - 1),)](sums, dq, *dq.stride(), H, L, blocks, 0.5, D=D, ROWS=64)
    assert torch.equal(dq, (x.view(B, H, -1, D)[:, :, :L] * 0.5).half())
"""
    )
