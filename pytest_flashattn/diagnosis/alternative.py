"""An alternative: one wrong way to compute attention, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .model import Problem

Change = Callable[..., Problem]
"""Problem → Problem; more parameters only to bind the variables of a loop."""

TILES = (64, 128, 32, 16)
"""Tile sizes that families of alternatives try, the commonest first."""


def always(p: Problem) -> bool:
    return True


@dataclass(frozen=True)
class Alternative:
    """name: short and stable. sentence: what an author reads. change: the problem as such a kernel sees it.

    when: on which problems it is another one than the right one. exact_only: told only when every element matches.
    whole: needs all query rows at once, so that a few of them do not tell whether it is worth a try.
    """

    name: str
    sentence: str
    change: Change
    when: Callable[[Problem], bool] = always
    exact_only: bool = False
    whole: bool = False


Family = Callable[[Problem], list[Alternative]]
"""Alternatives whose number depends on the problem: tile sizes, heads, tensors."""


def keys_named(keys: list[int]) -> str:
    """[3] -> "key 3", [3, 4, 5] -> "keys 3-5"."""
    return f"key {keys[0]}" if len(keys) == 1 else f"keys {keys[0]}-{keys[-1]}"
