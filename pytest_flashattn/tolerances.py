"""Limits by quantity and dtype: reads tolerances.toml; the most specific row that matches decides."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from .matrices import TableError

KEYS = {"quantity": str, "dtype": str, "grouped": bool, "family": str}
LIMITS = {"bound": ("lam",), "noise": ("tensor", "block")}


@dataclass(frozen=True)
class Limits:
    """What decides a quantity: `lam` of the element bound, RMS ratios `tensor` and `block` of the noise floor."""

    lam: float
    tensor: float
    block: float


@functools.cache
def limits(quantity: str, dtype: str, grouped: bool, family: str) -> Limits:
    """The limits for one quantity ("o", "dk", …) of a case with this dtype, grouping and input family."""
    facts = {"quantity": quantity, "dtype": dtype, "grouped": grouped, "family": family}
    bound, noise = (_decide(rule, facts) for rule in ("bound", "noise"))
    return Limits(lam=bound["lam"], tensor=noise["tensor"], block=noise["block"])


def _decide(rule: str, facts: dict[str, Any]) -> dict[str, float]:
    rows = [row for row in _table()[rule] if all(row[key] == facts[key] for key in KEYS if key in row)]
    row = max(rows, key=lambda r: sum(key in r for key in KEYS))
    return {name: row[name] for name in LIMITS[rule]}


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, list[dict[str, Any]]]:
    text = resources.files("pytest_flashattn").joinpath("tolerances.toml").read_text(encoding="utf-8")
    return parse_table(text, "tolerances.toml")


def parse_table(text: str, source: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of a tolerances file by rule.

    Raises TableError, one sentence, for text that is not TOML, an unknown rule or key, a missing or wrongly typed
    value, a rule without a general row, or two rows that match the same case equally well.
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
        _unambiguous(rows, rule, source)
    return table


def _unambiguous(rows: list[dict[str, Any]], rule: str, source: str) -> None:
    if not any(not (set(row) & set(KEYS)) for row in rows):
        raise TableError(f"{source}: [[{rule}]] needs one row without keys, for everything that no other row names")
    for i, a in enumerate(rows):
        for j, b in enumerate(rows[:i]):
            keys_a, keys_b = (set(row) & set(KEYS) for row in (a, b))
            if len(keys_a) == len(keys_b) and all(a[key] == b[key] for key in keys_a & keys_b):
                raise TableError(
                    f"{source}: [[{rule}]] rows {j + 1} and {i + 1} match equally well; make one more specific"
                )
