"""The table of mutants: each a class of a few lines, registered with its number in the catalogue and its killer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from .core import Core

C = TypeVar("C", bound=type[Core])


@dataclass(frozen=True)
class Mutant:
    """name, number: as in the catalogue of mutants, distilled from public bug reports of attention kernels; 0: our own.

    make: a fresh implementation. killer: the chapter, or "chapter.check", that ought to fail it.
    """

    name: str
    number: int
    killer: str
    make: Callable[[], Core]
    about: str


MUTANTS: dict[str, Mutant] = {}


def mutant(number: int, killer: str) -> Callable[[C], C]:
    """Register a subclass of Core under its own name in snake case; its docstring says what is wrong with it."""

    def register(cls: C) -> C:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        assert name not in MUTANTS, name
        MUTANTS[name] = Mutant(name, number, killer, cls, (cls.__doc__ or "").strip())
        return cls

    return register


def misread(x: Tensor, offset: int | None = None) -> Tensor:
    """What a kernel reads that takes x for contiguous; past the end of the storage it starts again at the front."""
    start = x.storage_offset() if offset is None else offset
    flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size() - start,), (1,), start)
    flat = flat[: x.numel()]  # a storage may be gigabytes
    repeats = -(-x.numel() // max(flat.numel(), 1))
    return flat.repeat(repeats)[: x.numel()].view(x.shape)
