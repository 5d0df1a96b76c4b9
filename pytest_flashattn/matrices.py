"""Which cases a check runs on: reads matrices.toml, a table that a person can review.

A set is named after its chapter ("forward"), or after one check ("metamorphic.key_permutation") where the check needs
cases of its own. Each level of a set lists axes of id fragments ("h6-kv2", "q129-k257", "causal", "" for absent), the
strength of their covering design, and single ids on top. Torch-free: collection runs anywhere.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import replace
from importlib import resources
from typing import Any

from .cases import Case
from .covering import covering

LEVELS: tuple[str, ...] = ("smoke", "default", "full")


class TableError(ValueError):
    """A table (matrices, tolerances) that cannot be used; the message names the file, the entry and the remedy."""


def cases_for(chapter: str, check: str, level: str, seed: int) -> list[Case]:
    """The cases of one check: those of `set_of` it."""
    return cases_named(set_of(chapter, check), level, seed)


def set_of(chapter: str, check: str) -> str:
    """The set that holds the cases of a check: `chapter.check` if the table has it, else `chapter`."""
    name = f"{chapter}.{check}"
    return name if name in _table() else chapter


def cases_named(name: str, level: str, seed: int) -> list[Case]:
    """The cases of the set `name` at `level`, each with the run's seed.

    Raises TableError for a set or level that does not exist or an entry that is no case.
    """
    if level not in LEVELS:
        raise TableError(f"matrix {level!r} is unknown; known: {', '.join(LEVELS)}")
    table = _table()
    if name not in table:
        raise TableError(f"matrices.toml has no set {name!r}; it has {', '.join(table)}")
    return [replace(case, seed=seed) for case in _expand(name, level)]


@functools.cache
def _expand(name: str, level: str) -> tuple[Case, ...]:
    return tuple(expand(_table()[name], level, name))


def expand(entry: dict[str, Any], level: str, name: str) -> list[Case]:
    """The distinct cases of one set's level, in the order of the table. Raises TableError naming the bad fragment."""
    where = f"matrices.toml, [{name}.{level}]"
    spec = entry.get(level)
    if not isinstance(spec, dict):
        raise TableError(f"{where}: missing; every set has the levels {', '.join(LEVELS)}")
    if unknown := set(spec) - {"axes", "strength", "also"}:
        raise TableError(f"{where}: unknown key {sorted(unknown)[0]!r}; known: axes, strength, also")
    axes = [list(axis) for axis in spec.get("axes", [])]
    for fragment in (fragment for axis in axes for fragment in axis if fragment):
        _parse(fragment, where, fragment=True)

    def valid(row: tuple[str, ...]) -> bool:
        try:
            Case.parse("-".join(part for part in row if part))
        except ValueError:
            return False
        return True

    ids = (
        ["-".join(part for part in row if part) for row in covering(axes, spec.get("strength", 2), valid)]
        if axes
        else []
    )
    cases = dict.fromkeys(_parse(text, where) for text in [*ids, *spec.get("also", [])])
    if not cases:
        raise TableError(f"{where}: gives no case; add axes or ids under `also`")
    return list(cases)


def _parse(text: str, where: str, *, fragment: bool = False) -> Case:
    try:
        return Case.parse(text)
    except ValueError as error:
        # A fragment alone ("kv2") may contradict a default ("h1"); the row is judged as a whole.
        if fragment and "is not understood" not in str(error) and "unknown" not in str(error):
            return Case()
        raise TableError(f"{where}: {error}") from None


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("pytest_flashattn").joinpath("matrices.toml").read_text(encoding="utf-8")
    return parse_table(text, "matrices.toml")


def parse_table(text: str, source: str) -> dict[str, dict[str, Any]]:
    """The sets of a matrices file. Raises TableError, one sentence, for text that is no such table."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{source}: not valid TOML: {error}") from None
    for name, entry in table.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("why"), str):
            raise TableError(f"{source}: [{name}] needs a `why` and the levels {', '.join(LEVELS)}")
        if unknown := set(entry) - {"why", *LEVELS}:
            raise TableError(
                f"{source}: [{name}] has an unknown key {sorted(unknown)[0]!r}; known: why, {', '.join(LEVELS)}"
            )
    return table
