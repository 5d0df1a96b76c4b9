"""The table of equivalents: unusual implementations that are right, registered under a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .core import Core


@dataclass(frozen=True)
class Equivalent:
    """make: a fresh implementation; convention: the one to name for it, None where the suite finds it by itself."""

    name: str
    make: Callable[[], Callable[..., Any]]
    about: str
    convention: str | None = None


EQUIVALENTS: dict[str, Equivalent] = {"honest": Equivalent("honest", Core, "The honest core itself.")}


def equivalent(name: str, *, convention: str | None = None, made: bool = False) -> Callable[[Any], Any]:
    """Register a class (called for a fresh object), a function, or with `made` a function that makes one."""

    def register(thing: Any) -> Any:
        assert name not in EQUIVALENTS, name
        make = thing if made or isinstance(thing, type) else lambda: thing
        EQUIVALENTS[name] = Equivalent(name, make, (thing.__doc__ or "").strip(), convention)
        return thing

    return register
