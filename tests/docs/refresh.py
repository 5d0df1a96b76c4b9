"""Rewrite what the documents quote: tables from the code, samples from real runs. `python tests/docs/refresh.py`

The tests compare; this writes. The run of PyTorch's attention takes a minute on one CPU core.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from documents import ROOT, blocks, read

sys.path.insert(0, str(ROOT / "measurements"))
import kernel_tables
import performance_tables
import power_tables
from evidence import table as evidence

from pytest_flashattn.chapters import CHAPTERS
from pytest_flashattn.features import FEATURES
from pytest_flashattn.known_apis import CONVENTIONS
from pytest_flashattn.options import OPTIONS, Option

SDPA = "torch.nn.functional:scaled_dot_product_attention"
SAMPLE = re.compile(r"(?<=```console\n\$ pytest flashattn-suite --flashattn-impl=)(\S+)\n.*?(?=^```$)", re.M | re.S)
NEARLY = re.compile(r"(?<=prints, after the table,\n\n```text\n).*?(?=^```$)", re.M | re.S)


def tables() -> dict[str, list[str]]:
    """The generated tables, by marker."""
    return {
        "chapters": _table("chapter", "what is judged", CHAPTERS.items()),
        "conventions": _table("convention", "call", ((n, c.summary) for n, c in CONVENTIONS.items())),
        "features": _table("feature", "what it means", FEATURES.items()),
        "evidence": evidence(sorted(ROOT.glob("measurements/*/calibration-*.json"))),
        **kernel_tables.tables(ROOT / "measurements/h200"),
        **performance_tables.tables(ROOT / "measurements/h200/performance.json"),
        **power_tables.tables(ROOT / "measurements/cpu"),
        "options": _table("option", "what it says", ((f"{o.flag}={o.metavar}", _meaning(o)) for o in OPTIONS)),
    }


def _meaning(option: Option) -> str:
    if option.default in (None, ()):
        return option.help
    number = isinstance(option.default, float)
    return f"{option.help}; default {option.default:g}" if number else f"{option.help}; default {option.default}"


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| {left} | {right} |", "|---|---|", *(f"| `{a}` | {_escaped(b)} |" for a, b in rows)]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def with_tables(text: str) -> str:
    for name, lines in tables().items():
        table = "\n".join(lines)
        pattern = rf"<!-- {name} -->\n(?:\|.*\n)+"
        text = re.sub(pattern, lambda _, t=table, n=name: f"<!-- {n} -->\n{t}\n", text)
    return text


def sample() -> str:
    """The run of the README, cut: header, table, the failure with the shortest id, closing line."""
    output = _run("-m", "pytest", "-p", "no:benchmark", "flashattn-suite", f"--flashattn-impl={SDPA}")
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("chapter "))
    table = lines[start : next(i for i in range(start, len(lines)) if lines[i].startswith("==="))]
    failures = re.findall(r"^_+ (test_\S+\[\S+\]) _+\n(.*?)(?=^_+ test_|^=)", output, re.M | re.S)
    name, text = min(failures, key=lambda failure: len(failure[0]))
    first, *_, replay = text.splitlines()
    heads = [line for line in lines if line.startswith("flashattn: ")]
    cut = [*heads, "…", f"____ {name} ____", first, "…", replay, "…", *(line.rstrip() for line in table), "…"]
    return "\n".join([*cut, lines[-1]]) + "\n"


def nearly() -> str:
    """What the python block of docs/accuracy.md prints, without the table."""
    code = next(b.text for b in blocks("docs/accuracy.md") if "nearly_right" in b.text and b.language == "python")
    lines = _run("-c", code).splitlines()
    return "\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith("failed: ")) :]) + "\n"


def _run(*args: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "docs/examples"), "COLUMNS": "80"}
    with tempfile.TemporaryDirectory() as folder:  # no ini file of ours applies there
        done = subprocess.run([sys.executable, *args], cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout


def main() -> None:
    pages = ("guide", "accuracy", "kernels", "performance", "power")
    for page in ("README.md", *(f"docs/{name}.md" for name in pages)):
        text = with_tables(read(page))
        if page == "README.md":
            text = SAMPLE.sub(lambda m: f"{m[1]}\n{sample()}", text)
        if page == "docs/accuracy.md":
            text = NEARLY.sub(lambda _: nearly(), text)
        if page == "docs/guide.md":
            tests = (ROOT / "docs/examples/test_my_attention.py").read_text(encoding="utf-8")
            mark = "<!-- file: docs/examples/test_my_attention.py -->\n```python\n"
            before, _, after = text.partition(mark)
            text = before + mark + tests + after[after.index("```") :]
        Path(ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
