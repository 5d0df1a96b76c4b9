"""The documents as data: fenced blocks with the comment above each, and the generated tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/guide.md", "docs/accuracy.md", "docs/kernels.md", "docs/power.md", "docs/diagnosis.md",
         "docs/performance.md", "docs/fp8.md")  # fmt: skip
ALL_PAGES = (*PAGES, "docs/architecture.md", "docs/findings.md", "docs/examples/performance.yml", "CONTRIBUTING.md")

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block. mark: the comment directly above it, split like a shell line; empty when there is none."""

    page: str
    line: int
    language: str
    text: str
    mark: tuple[str, ...] = field(default=())

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"

    def values(self, name: str) -> list[str]:
        return [word.partition("=")[2] for word in self.mark if word.startswith(f"{name}=")]

    def flag(self, name: str) -> bool:
        return name in self.mark


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    text = read(page)
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        mark = match["mark"] or ""
        words = ("test:", "none") if mark.startswith("test: none") else tuple(shlex.split(mark))
        yield Block(page, line, match["language"], match["text"], words)


def table(page: str, marker: str) -> list[list[str]]:
    """The cells of the table after `<!-- marker -->`, without its two head rows."""
    after = read(page).partition(f"<!-- {marker} -->\n")[2]
    assert after, f"{page} has no <!-- {marker} -->"
    rows = []
    for line in after.splitlines():
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))])
    return rows[2:]
