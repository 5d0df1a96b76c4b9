"""Which faults a step can reach: a mutant that overrides nothing of what the honest one uses there is the honest one.

A trace of one honest run tells. It is exact for mutants that are subclasses of the honest implementation and differ in
what they override, as long as the honest one reads its attributes and methods through `self`.
"""

from __future__ import annotations

from typing import Any

SILENT = frozenset(
    {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__static_attributes__", "__firstlineno__"}
)
"""What every class has of its own. `__init__` is known by what it leaves behind."""


def overridden(suspect: Any, honest: Any) -> frozenset[str] | None:
    """Names of the attributes in which `suspect` differs from `honest`; None where that cannot be told."""
    base = type(honest)
    if not isinstance(suspect, base) or not hasattr(honest, "__dict__"):
        return None
    mro = type(suspect).__mro__
    names = {name for cls in mro[: mro.index(base)] for name in vars(cls)} - SILENT
    mine, its = vars(suspect), vars(honest)
    names |= {name for name in mine.keys() | its.keys() if mine.get(name, mine) is not its.get(name, its)}
    # Such a name is looked up on the type, which a trace does not see.
    return None if any(name.startswith("__") for name in names) else frozenset(names)


def watched(honest: Any) -> set[str] | None:
    """From now on, the names of the attributes that are read off `honest`; None where its type does not allow it."""
    read: set[str] = set()
    cls = type(honest)

    def spy(self: Any, name: str) -> Any:
        read.add(name)
        return cls.__getattribute__(self, name)  # type: ignore[call-arg]

    try:
        honest.__class__ = type(cls.__name__, (cls,), {"__getattribute__": spy})
    except TypeError:
        return None
    return read


def reaches(names: frozenset[str] | None, read: set[str] | None) -> bool:
    """Whether a mutant that overrides `names` may differ from an honest run that read `read`; None: may be anything."""
    return names is None or read is None or bool(names & read)
