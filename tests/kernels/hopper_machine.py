"""What the Hopper forwards run on where their source runs on torch tensors (gluon_on_torch.py): rings of tiles, the
tensor cores, the TMA's stores, the list of tiles. Each complains of what on a GPU would be a race.
"""

from __future__ import annotations

import collections
import functools
import types
from typing import Any

import torch
from gluon_on_torch import Int, on_torch
from torch import Tensor

from reference_kernels.hopper.work import Work

Place = tuple[int, int]
"""The number of a tile, and where its ring begins."""


class UnderWay:
    """Products, oldest first, none of which may be read before a wait covers it, and tiles that the TMA stores.

    What they read may not be written or released before.
    """

    def __init__(self) -> None:
        self.products: list[tuple[Tensor, set[int]]] = []
        self.leaving: list[Tensor] = []

    def multiply(self, a: Tensor, b: Tensor, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
        product = a @ b + acc if use_acc else a @ b
        self.products.append((product, {x.untyped_storage().data_ptr() for x in (a, b)}))
        return product

    def wait(self, outstanding: int, deps: tuple[Tensor]) -> Tensor:
        del self.products[: max(len(self.products) - outstanding, 0)]
        under_way = any(product is x for product, _ in self.products for x in deps)
        assert not under_way, "a product is read that is under way"
        return deps[0] if len(deps) == 1 else deps

    def buffer(self, tile: Tensor) -> Any:
        """The tile, with what Gluon's shared memory has: `store`, after which `written` is what it holds."""

        def store(x: Tensor) -> None:
            assert not self.reads(tile), "a tile is written that something reads"
            made.written = x

        made: Any = tile
        made.store = store
        return made

    def leave(self, tile: Any) -> Tensor:
        """What was written, which the TMA now stores."""
        self.leaving.append(tile)
        return tile.written

    def wait_stores(self, outstanding: int) -> None:
        del self.leaving[: max(len(self.leaving) - outstanding, 0)]

    def reads(self, tile: Tensor) -> bool:
        by_product = any(tile.untyped_storage().data_ptr() in memory for _, memory in self.products)
        return by_product or any(tile is x for x in self.leaving)


class Channel:
    """Tiles by their number; which are held, and how often each was taken and released."""

    def __init__(self, under_way: UnderWay) -> None:
        self.under_way = under_way
        self.tiles: dict[Place, Tensor] = {}
        self.held: set[Place] = set()
        self.taken: collections.Counter[Place] = collections.Counter()
        self.released: collections.Counter[Place] = collections.Counter()

    def fill(self, read: Any, batch: int, head: int, at: int, count: int, first: int = 0) -> None:
        self.tiles[count, first] = read(batch, head, at)

    def take(self, count: int, first: int = 0, HERE: bool = False) -> Tensor:
        self.held.add((count, first))
        self.taken[count, first] += 1
        return self.tiles[count, first]

    def release(self, count: int, first: int = 0) -> None:
        assert not self.under_way.reads(self.tiles[count, first]), "a tile is released that something reads"
        self.held.remove((count, first))
        self.released[count, first] += 1


def reader(x: Tensor, rows: int) -> Any:
    """(batch, head, first row) -> a tile of x (B, H, L, D) as the TMA reads it, zeros where no row is."""

    def read(batch: int, head: int, at: int) -> Tensor:
        row = torch.arange(at, at + rows)
        there = (row >= 0) & (row < x.shape[2])
        return torch.where(there[:, None], x[batch, head, row.clamp(0, x.shape[2] - 1)].float(), 0.0)

    return read


def work(tiles: list[int], lq: int, lk: int) -> Any:
    """A work.Work of these tiles."""
    made = types.SimpleNamespace(begin=0, end=len(tiles), Lq=lq, Lk=lk)
    for name in ("pads", "key_blocks", "blocks_to_visit", "full_blocks"):
        setattr(made, name, functools.partial(on_torch(getattr(Work, name)), made))

    def tile(t: int, rows: int) -> tuple[int, ...]:
        code = tiles[t]
        return (code & 0xFFFFF) * rows, Int(code >> 44), Int(code >> 32 & 0xFFF), Int(code >> 20 & 0xFFF)

    made.tile = tile
    return made
