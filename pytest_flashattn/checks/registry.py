"""The registry of checks: plain functions `check(implementation, case) -> Verdict`, found by "chapter.name"."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..cases import Case
from ..chapters import CHAPTERS, DRAWN, TIMED
from ..implementation import Implementation
from ..verdict import Verdict

Function = Callable[[Implementation, Case], Verdict]

_REGISTRY: dict[str, Check] = {}


@dataclass(frozen=True)
class Check:
    """name: "chapter.function"; needs: features it asks for on top of those of the case."""

    name: str
    function: Function
    needs: frozenset[str]

    @property
    def chapter(self) -> str:
        return self.name.partition(".")[0]


def check(*, needs: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Register a function as `<module>.<function>`, the module being its chapter."""

    def register(function: Function) -> Function:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        _REGISTRY[name] = Check(name, function, frozenset(needs))
        return function

    return register


def find(name: str) -> Check:
    """The check "chapter.name". Raises KeyError, naming the checks of the chapter, when there is none."""
    chapter = name.partition(".")[0]
    if chapter in CHAPTERS or chapter in TIMED or chapter in DRAWN:
        importlib.import_module(f"{__package__}.{chapter}")
    if name not in _REGISTRY:
        known = [n for n in _REGISTRY if n.startswith(f"{chapter}.")] or list(CHAPTERS)
        raise KeyError(f"no check {name!r}; known: {', '.join(known)}")
    return _REGISTRY[name]


def checks_of(chapter: str) -> list[Check]:
    """All checks of a chapter, in the order of its file."""
    importlib.import_module(f"{__package__}.{chapter}")
    return [c for c in _REGISTRY.values() if c.chapter == chapter]
