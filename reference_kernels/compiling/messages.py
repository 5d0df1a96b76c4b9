"""One line out of what a compiler printed."""

from __future__ import annotations

import re


def reason_in(log: str) -> str:
    """Find the line in which MLIR, ptxas, LLVM or the C library says why it stopped."""
    for pattern in (r"\berror\s*: (.*)", r"LLVM ERROR: (.*)", r"(Assertion .*)", r"(?:^|\n)(terminate called .*)"):
        if match := re.search(pattern, log):
            return shorten(match[1])
    return ""


def shorten(text: str, width: int = 240) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= width else text[: width - 1] + "…"
