"""A small module of mutants by the protocol of docs/power.md; a process does not survive two of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Entry:
    name: str
    make: Callable[[], Callable[..., Any]]
    about: str = "as its name says"
    number: int = 0
    killer: str = "forward"


class Honest:
    """softmax(q k^T / sqrt(D)) v in float32."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (self.scores(q.float(), k.float()).softmax(-1) @ v.float()).to(q.dtype)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5


class Unscaled(Honest):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class Unused(Honest):
    def never_called(self) -> None:
        """Makes no difference."""


class Second(Honest):
    """Right once."""

    calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(q, k, v) * (1 if self.calls == 1 else 2)


class HangsLater(Honest):
    """Right once."""

    calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(q, k, v) if self.calls == 1 else hangs(q, k, v)


def hangs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    while True:
        time.sleep(0.01)


def aborts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os.abort()


def negated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return -Honest()(q, k, v)


def _table(**made: Callable[[], Callable[..., Any]]) -> dict[str, Entry]:
    return {name: Entry(name, make) for name, make in made.items()}


DEVICE = "cpu"
CATALOGUE = {1: ("negated", "here"), 2: ("paged", "later: paged caches"), 3: ("race", "gpu")}
EQUIVALENTS = _table(honest=Honest)
MUTANTS = _table(
    unscaled=Unscaled,
    unused=Unused,
    second=Second,
    hangs=lambda: hangs,
    hangs_later=HangsLater,
    aborts=lambda: aborts,
    negated=lambda: negated,
)
