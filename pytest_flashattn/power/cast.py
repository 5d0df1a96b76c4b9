"""Who is put on trial: the mutants and equivalents of a module, read by the protocol of docs/power.md."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

HONEST = "honest"
"""The equivalent that mutants deviate from: it says what a case costs, and which faults a case can reach."""

BUNDLED = "tests.mutants"
FIELDS = {"MUTANTS": ("name", "number", "killer", "make", "about"), "EQUIVALENTS": ("name", "make", "about")}


class UnusableModule(ValueError):
    """A module without mutants that can be used; one sentence with the remedy."""


@dataclass(frozen=True)
class Suspect:
    """One implementation on trial. make: a fresh one. number: in the catalogue, 0 for none. killer: who should fail it.

    convention: its calling convention by name; None: the suite finds it by itself.
    """

    name: str
    make: Callable[[], Callable[..., Any]]
    about: str = ""
    number: int = 0
    killer: str = ""
    convention: str | None = None


@dataclass(frozen=True)
class Cast:
    """device: where they run, as in --flashattn-device. catalogue: number to (name, status), if the module has one."""

    mutants: dict[str, Suspect]
    equivalents: dict[str, Suspect]
    device: str = "auto"
    catalogue: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def honest(self) -> Suspect:
        return self.equivalents[HONEST]

    def matching(self, pattern: str) -> tuple[list[str], list[str]]:
        """The names of mutants and of equivalents that match a glob. Raises UnusableModule where none does."""
        mutants, equivalents = ([n for n in x if fnmatchcase(n, pattern)] for x in (self.mutants, self.equivalents))
        if not mutants and not equivalents:
            raise UnusableModule(f"no mutant or equivalent matches {pattern!r}; there are {', '.join(self.mutants)}")
        return mutants, equivalents


def load(module: str) -> Cast:
    """The cast of a module. Raises UnusableModule."""
    found = _import(module)
    tables = {}
    for attribute, names in FIELDS.items():
        table = getattr(found, attribute, None)
        if not isinstance(table, Mapping) or not table:
            raise UnusableModule(f"{module} has no {attribute}, a dict of name to {attribute[:-1].lower()}")
        for key, entry in table.items():
            if missing := [name for name in names if not hasattr(entry, name)]:
                raise UnusableModule(f"{module}.{attribute}[{key!r}] has no attribute {missing[0]!r}")
        tables[attribute] = {key: _suspect(key, entry) for key, entry in table.items()}
    if HONEST not in tables["EQUIVALENTS"]:
        raise UnusableModule(
            f"{module}.EQUIVALENTS has no {HONEST!r}, the implementation that the mutants deviate from"
        )
    if both := tables["MUTANTS"].keys() & tables["EQUIVALENTS"].keys():
        raise UnusableModule(f"{module}: {sorted(both)[0]!r} is both a mutant and an equivalent; rename one")
    device, catalogue = getattr(found, "DEVICE", "auto"), getattr(found, "CATALOGUE", {})
    return Cast(tables["MUTANTS"], tables["EQUIVALENTS"], device, catalogue)


def _suspect(key: str, entry: Any) -> Suspect:
    optional = {name: getattr(entry, name) for name in ("number", "killer", "convention") if hasattr(entry, name)}
    return Suspect(key, entry.make, entry.about, **optional)


def _import(name: str) -> Any:
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UnusableModule(f"{name} needs {error.name!r}, which is not installed") from error
        remedy = "run the command in a checkout of its source" if name == BUNDLED else "set PYTHONPATH to it"
        what = "the suite's own mutants are not installed with it" if name == BUNDLED else f"there is no module {name}"
        raise UnusableModule(f"{what}: {remedy}, or name another module with --mutants") from error
    except Exception as error:
        raise UnusableModule(f"{name} does not import: {type(error).__name__}: {error}") from error
