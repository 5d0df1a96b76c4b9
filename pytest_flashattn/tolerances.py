"""Limits by quantity and case: reads tolerances.toml; every row that matches has a reason, the widest counts."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from .cases import Case
from .matrices import TableError

KEYS = {"quantity": str, "dtype": str, "grouped": bool, "family": str}
LIMITS = {"bound": ("lam",), "noise": ("tensor", "block")}


@dataclass(frozen=True)
class Limits:
    """What decides a quantity: `lam` of the element bound, RMS ratios `tensor` and `block` of the noise floor."""

    lam: float
    tensor: float
    block: float


def limits(quantity: str, case: Case) -> Limits:
    """The limits for one quantity ("o", "dk", …) of a case."""
    # A scale of 0 makes every score equal, whatever the inputs: what the constant family is.
    family = "constant" if case.scale == 0 else case.family
    return _limits(quantity, case.dtype, case.kv_heads != case.heads, family)


@functools.cache
def _limits(quantity: str, dtype: str, grouped: bool, family: str) -> Limits:
    facts = {"quantity": quantity, "dtype": dtype, "grouped": grouped, "family": family}
    found: dict[str, float] = {}
    for rule, names in LIMITS.items():
        rows = [row for row in _table()[rule] if all(row[key] == facts[key] for key in KEYS if key in row)]
        found |= {name: max(row[name] for row in rows) for name in names}
    return Limits(**found)


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, list[dict[str, Any]]]:
    text = resources.files("pytest_flashattn").joinpath("tolerances.toml").read_text(encoding="utf-8")
    return parse_table(text, "tolerances.toml")


def parse_table(text: str, source: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of a tolerances file by rule.

    Raises TableError, one sentence, for text that is not TOML, an unknown rule or key, a missing or wrongly typed
    value, or a rule without a general row.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{source}: not valid TOML: {error}") from None
    if unknown := set(table) - set(LIMITS):
        raise TableError(f"{source}: unknown rule [[{sorted(unknown)[0]}]]; known: {', '.join(LIMITS)}")
    for rule, names in LIMITS.items():
        rows = table.get(rule)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise TableError(f"{source}: needs rows [[{rule}]]")
        for number, row in enumerate(rows, 1):
            where = f"{source}, [[{rule}]] row {number}"
            if unknown := set(row) - set(KEYS) - set(names) - {"why"}:
                raise TableError(
                    f"{where}: unknown key {sorted(unknown)[0]!r}; known: {', '.join([*KEYS, *names, 'why'])}"
                )
            if not isinstance(row.get("why"), str):
                raise TableError(f"{where}: needs a `why`")
            for key, kind in KEYS.items():
                if key in row and not isinstance(row[key], kind):
                    raise TableError(f"{where}: {key} must be a {kind.__name__}, not {row[key]!r}")
            for name in names:
                value = row.get(name)
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                    raise TableError(f"{where}: {name} must be a positive number, not {value!r}")
        if not any(not (set(row) & set(KEYS)) for row in rows):
            raise TableError(f"{source}: [[{rule}]] needs one row without keys, for everything that no other row names")
    return table
