"""When a time is good enough: reads thresholds.toml, or a user's own file of the same form. Torch-free."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..cases import Case
from ..matrices import TableError
from .work import DIRECTIONS

SETS = ("ratio", "chapter")
KEYS = {"device": str, "gpu": str, "direction": str, "dtype": str, "d": int, "causal": bool, "n": int}
QUANTITIES = ("exponent", "memory", "causal", "window")
LIMITS = {"ratio": "at_most", "growth": "at_most", "floor": "at_least"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Thresholds:
    """The rows in force, by table."""

    ratio: tuple[Row, ...] = ()
    growth: tuple[Row, ...] = ()
    floor: tuple[Row, ...] = ()

    def ratio_limit(self, case: Case, direction: str, device: tuple[str, str]) -> float | None:
        """The largest time, in those of the baseline; device: its kind and its name. None: no row applies."""
        return max((row["at_most"] for row in _matching(self.ratio, case, direction, device)), default=None)

    def floor_limit(self, case: Case, direction: str, device: tuple[str, str]) -> float | None:
        """The least TFLOP/s."""
        return min((row["at_least"] for row in _matching(self.floor, case, direction, device)), default=None)

    def growth_limit(self, quantity: str, case: Case, direction: str, device: tuple[str, str]) -> float | None:
        """The limit of one of QUANTITIES."""
        rows = [row for row in self.growth if row["quantity"] == quantity]
        return max((row["at_most"] for row in _matching(rows, case, direction, device)), default=None)


def _matching(rows: Any, case: Case, direction: str, device: tuple[str, str]) -> list[Row]:
    facts = {"device": device[0], "gpu": device[1], "direction": direction, "dtype": case.dtype,
             "d": case.d, "causal": case.causal, "n": case.q}  # fmt: skip
    return [row for row in rows if all(row[key] == facts[key] for key in KEYS if key in row)]


@functools.lru_cache(maxsize=8)
def load(name: str) -> Thresholds:
    """The thresholds of --flashattn-thresholds: "ratio" (the bundled table without its floors), "chapter" (with the
    floors of that set), or the path of a TOML file, all of whose rows count.

    Raises TableError, one sentence, for a file that cannot be read or a row that is none.
    """
    if name in SETS:
        text = resources.files(__package__).joinpath("thresholds.toml").read_text(encoding="utf-8")
        rows = parse(text, "thresholds.toml")
        floors = tuple(row for row in rows.floor if row.get("set") == name)
        return Thresholds(rows.ratio, rows.growth, floors)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise TableError(f"cannot read {name}: {why}; write {', '.join(SETS)}, or the path of a TOML file") from None
    return parse(text, name)


def parse(text: str, source: str) -> Thresholds:
    """The rows of a thresholds file. Raises TableError naming the row that is none."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{source}: not valid TOML: {error}") from None
    if unknown := set(table) - set(LIMITS):
        raise TableError(f"{source}: unknown table [[{sorted(unknown)[0]}]]; known: {', '.join(LIMITS)}")
    for name, rows in table.items():
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise TableError(f"{source}: write [[{name}]], a row, not [{name}]")
        for number, row in enumerate(rows, 1):
            if wrong := _fault(name, row):
                raise TableError(f"{source}, [[{name}]] row {number}: {wrong}")
    return Thresholds(**{name: tuple(rows) for name, rows in table.items()})


def _fault(table: str, row: Row) -> str | None:
    limit = LIMITS[table]
    own = {"growth": {"quantity"}, "floor": {"set"}}.get(table, set())
    if unknown := set(row) - set(KEYS) - own - {limit, "why"}:
        return f"unknown key {sorted(unknown)[0]!r}; known: {', '.join([*KEYS, *sorted(own), limit, 'why'])}"
    if not isinstance(row.get("why"), str):
        return "needs a `why`"
    value = row.get(limit)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        return f"{limit} must be a positive number, not {value!r}"
    for key, kind in KEYS.items():
        if key in row and type(row[key]) is not kind:
            return f"{key} must be of type {kind.__name__}, not {row[key]!r}"
    if row.get("direction", DIRECTIONS[0]) not in DIRECTIONS:
        return f"direction {row['direction']!r} is unknown; known: {', '.join(DIRECTIONS)}"
    if table == "growth" and row.get("quantity") not in QUANTITIES:
        return f"quantity {row.get('quantity')!r} is unknown; known: {', '.join(QUANTITIES)}"
    return None
