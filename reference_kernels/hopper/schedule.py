"""Which CTA works on which tiles, in which order: made on the host, once for a shape, two small arrays.

A persistent kernel has one CTA per SM that walks over a list. Since the list is data, its order costs the kernel
nothing, needs no atomic counter, and is the same in every run:

- the longest tiles first, each to the CTA that will be free first: what is left for the end is short (causal);
- the tiles that have rows for some of the consumers only are given out last, and fill the CTAs evenly; each CTA walks
  over its own head by head, so that these, too, find their keys in the L2 cache (not causal);
- heads in groups whose keys and values fit into the L2 cache together, one group after the other (causal). All groups
  have the same size, give or take one head: the long tiles of a small one at the end would keep a few SMs busy alone.

Tiles without any key (causal, more queries than keys) are left out: the launcher has written their output.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from .work import few_columns

L2_BYTES = 36 << 20
"""What keys and values of a group of heads may take of the L2 cache: an H100's 50 MB and some room. No power of two:
a length just above one then still has groups as large as that one's."""

MOST_BATCHES, MOST_HEADS, MOST_BLOCKS = 1 << 19, 1 << 12, 1 << 20
"""What the code of a tile has room for."""


class Problem(NamedTuple):
    """What the schedule depends on. heads: query heads of a batch; group: those of one kv head.

    short, rowless: as of the kernel (kernel.py), which may multiply fewer columns of block 0 and fewer rows of the last
    tile.
    """

    batch: int
    heads: int
    group: int
    lq: int
    lk: int
    d: int
    block_m: int
    block_n: int
    causal: bool
    short: int = 0
    rowless: bool = False


def key_blocks(p: Problem, block: int) -> int:
    """How many blocks of keys the rows of one tile see any of; work.Work.key_blocks on the host."""
    row_pad, key_pad = (-p.lq % p.block_m, -p.lk % p.block_n) if p.short else (0, 0)
    last = min(p.lk, (block + 1) * p.block_m - row_pad + p.lk - p.lq) if p.causal else p.lk
    return -(-(last + key_pad) // p.block_n) if last > 0 else 0


def consumers_with_rows(p: Problem, block: int) -> int:
    """How many of a tile's consumers multiply; a consumer has 64 rows."""
    all_of_them = p.block_m // 64
    return min(all_of_them, -(-(p.lq - block * p.block_m) // 64)) if p.rowless else all_of_them


def cost(p: Problem, block: int, n: int) -> int:
    """How long a tile of n key blocks keeps a CTA busy, as a number to compare; what is short is estimated.

    The ends of a tile count as a block of keys, a block of few columns as 0.3, and one consumer by itself as 0.6 of
    two: it has the tensor cores to itself, but no other's products to hide its softmax behind.
    """
    tenths = 10 * (n + 1) - (7 if n > 1 and few_columns(p.short, p.block_n) else 0)
    return tenths * (2 * consumers_with_rows(p, block) + 1)


def encode(p: Problem, head: int, block: int) -> int:
    """A tile as work.Work.tile reads it. head: counted through the batches."""
    batch, q_head = divmod(head, p.heads)
    return batch << 44 | q_head << 32 | q_head // p.group << 20 | block


def tiles_in_order(p: Problem) -> Iterator[tuple[int, int, int]]:
    """(head through the batches, row block, key blocks) of every tile that has any, in the order of assignment."""
    blocks = [(i, key_blocks(p, i)) for i in range(-(-p.lq // p.block_m))]
    blocks = [(i, n) for i, n in reversed(blocks) if n]
    total = p.batch * p.heads
    if not p.causal:
        lacking = {i for i, _ in blocks if consumers_with_rows(p, i) * 64 < p.block_m}
        yield from ((head, i, n) for head in range(total) for i, n in blocks if i not in lacking)
        yield from ((head, i, n) for head in range(total) for i, n in blocks if i in lacking)
        return
    kv_heads = total // p.group
    groups = -(-kv_heads // max(1, L2_BYTES // (p.lk * p.d * 4)))
    for g in range(groups):
        heads = range(kv_heads * g // groups * p.group, kv_heads * (g + 1) // groups * p.group)
        yield from ((head, i, n) for i, n in blocks for head in heads)


def assign(p: Problem, workers: int) -> list[list[int]]:
    """For each worker its tiles, encoded. At most `workers` lists, none of them empty."""
    lists: list[list[int]] = [[] for _ in range(workers)]
    free = [(0, worker) for worker in range(workers)]  # (time at which it is free, worker), a heap
    for head, block, n in tiles_in_order(p):
        busy, worker = free[0]
        lists[worker].append(encode(p, head, block))
        heapq.heapreplace(free, (busy + cost(p, block, n), worker))
    if not p.causal:
        for tiles in lists:
            tiles.sort(key=lambda code: code >> 32)  # by batch and head; within one as it is
    return [tiles for tiles in lists if tiles]


Schedule = tuple[Tensor, Tensor]
Key = tuple[Problem, int, torch.device]

MOST_KEPT = 256
_kept: dict[Key, Schedule] = {}
_in_graphs: dict[Key, Schedule] = {}
"""Those whose addresses a CUDA graph has recorded: a replay reads them, at any time."""


def is_kept(p: Problem, workers: int, device: torch.device) -> bool:
    """Whether `schedule` has what it was asked for before: then it copies nothing from the host."""
    return (p, workers, device) in _kept or (p, workers, device) in _in_graphs


def schedule(p: Problem, workers: int, device: torch.device) -> Schedule:
    """tiles (int64) and starts (int32): worker w has tiles[starts[w] : starts[w + 1]]; len(starts) - 1 workers.

    Made once and kept. While a CUDA graph is captured, ask only for what `is_kept`.
    """
    key = (p, workers, device)
    made = _in_graphs.get(key) or _kept.get(key)
    if made is None:
        if len(_kept) >= MOST_KEPT:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a kernel on some stream may still read one
            _kept.clear()
        made = _kept[key] = _copied(assign(p, workers), device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _in_graphs[key] = made
    return made


def _copied(lists: list[list[int]], device: torch.device) -> Schedule:
    starts = [0, *itertools.accumulate(map(len, lists))]

    def copy() -> Schedule:
        tiles = torch.tensor([code for tiles in lists for code in tiles], dtype=torch.int64, device=device)
        return tiles, torch.tensor(starts, dtype=torch.int32, device=device)

    # In a thread of its own: where torch.compile prepares a CUDA graph, this one allocates from that graph's memory,
    # in which nothing may stay that the graph does not know of.
    with ThreadPoolExecutor(1) as other:
        return other.submit(copy).result()
