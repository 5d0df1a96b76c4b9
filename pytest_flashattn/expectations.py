"""Expected failures: flashattn-expect.toml of the user's repository.

    [[expect]]
    id = "flashattn-suite/backward::*-d256*"    # glob over the node id or the case id; only * and ? are special
    reason = "no backward for D = 256 yet"      # mandatory
    issue = "https://…/123"                     # the rest is optional
    device = "cuda"                             # "cpu", "cuda", or a glob over the GPU's name
    implementation = "mykernels:*"              # glob over module:attribute or the short name
    until = 2026-12-31                          # from the day after, it excuses nothing

Strict: a case that verifies although it is listed fails, and so does an entry that matches nothing at all.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

DEFAULT_NAME = "flashattn-expect.toml"


@dataclass(frozen=True)
class Expectation:
    """One entry of the file."""

    id: str
    reason: str
    issue: str = ""
    device: str = ""
    implementation: str = ""
    until: datetime.date | None = None

    @property
    def expired(self) -> bool:
        return self.until is not None and self.until < datetime.date.today()

    def applies_to(self, device: tuple[str, str], implementations: list[str]) -> bool:
        """Whether this entry is about the device (kind, name) and one of the implementations (specs and names)."""
        on_device = not self.device or any(_glob(text, self.device) for text in device)
        on_impl = not self.implementation or any(_glob(text, self.implementation) for text in implementations)
        return on_device and on_impl

    def matches_id(self, nodeid: str) -> bool:
        """The pattern may name the node id or the case id, with or without `@implementation`."""
        case = nodeid.partition("[")[2].removesuffix("]")
        plain = re.sub(r"@[^@\[\]]*\]$", "]", nodeid)
        texts = (nodeid, plain, case, case.partition("@")[0])
        return any(_glob(text, self.id) for text in texts if text)

    def text(self) -> str:
        return f"{self.reason} ({self.issue})" if self.issue else self.reason


def _glob(text: str, pattern: str) -> bool:
    # Node ids are full of brackets, which fnmatch would read as character classes.
    return fnmatchcase(text, pattern.replace("[", "[[]"))


def find(asked: Path | None, rootdir: Path) -> Path | None:
    """The file to read. Raises UsageError when the one that was asked for does not exist."""
    if asked is None:
        default = rootdir / DEFAULT_NAME
        return default if default.is_file() else None
    if not asked.is_file():
        raise pytest.UsageError(f"--flashattn-expect: {asked} is no file")
    return asked


def load(path: Path | None) -> tuple[Expectation, ...]:
    """The entries of the file. Raises UsageError, one sentence that names the file and the entry."""
    if path is None:
        return ()
    import tomllib  # most sessions have no such file, and need not pay for the parser

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise pytest.UsageError(f"{path.name}: not readable as TOML: {error}") from None
    if unknown := sorted(set(table) - {"expect"}):
        raise pytest.UsageError(f"{path.name}: unknown key {unknown[0]!r}; entries are written [[expect]]")
    entries = table.get("expect", [])
    if not isinstance(entries, list):
        raise pytest.UsageError(f"{path.name}: write [[expect]], with two brackets, above each entry")
    return tuple(_entry(entry, f"{path.name}, entry {number}") for number, entry in enumerate(entries, 1))


def _entry(entry: Any, where: str) -> Expectation:
    known = [field.name for field in fields(Expectation)]
    if not isinstance(entry, dict):
        raise pytest.UsageError(f"{where}: an entry is a table with the keys {', '.join(known)}")
    if "id" in entry:
        where += f" ({entry['id']})"
    if unknown := sorted(set(entry) - set(known)):
        raise pytest.UsageError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    for name in ("id", "reason"):
        if not str(entry.get(name, "")).strip():
            raise pytest.UsageError(f"{where}: `{name}` is missing; every expected failure has an id and a reason")
    for name, value in entry.items():
        if name == "until":
            entry[name] = _date(value, where)
        elif not isinstance(value, str):
            raise pytest.UsageError(f"{where}: `{name}` must be a string, not {value!r}")
    return Expectation(**entry)


def _date(value: Any, where: str) -> datetime.date:
    if isinstance(value, datetime.datetime):
        return value.date()
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(value)
    except (TypeError, ValueError):
        raise pytest.UsageError(f"{where}: `until` must be a date such as 2026-12-31, not {value!r}") from None
