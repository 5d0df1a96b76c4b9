"""The terminal: header, table of chapters, closing line. Fits 80 to 120 columns; `-q` keeps only the closing line."""

from __future__ import annotations

import math
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from tabulate import tabulate

from .. import capability
from ..verdict import STATUSES
from . import performance
from .json_report import versions

if TYPE_CHECKING:
    from ..ledger import Closing, Ledger, Record
    from ..state import State


def header(run: State) -> list[str]:
    """A line an implementation; under xdist also the machine, since no line follows the collection there."""
    lines = []
    if not run.collect_only:
        lines = [f"flashattn: {run.implementation(name).describe()}" for name in run.settings.names()]
    if run.is_controller:
        lines.append(machine(run, None))
    if run.expectations:
        count = len(run.expectations)
        lines.append(f"flashattn: {count} expectation{'s' * (count != 1)} read: failures that are excused")
    if strays := sorted(name for name in os.environ if name.startswith("FLASHATTN_")):
        lines.append(f"flashattn: no environment variable is read; ignored: {', '.join(strays)}")
    return lines


def machine(run: State, cases: int | None) -> str:
    """The line that says where and on what: device, versions, matrix, number of cases, seed."""
    device = capability.glance() if run.is_controller else str(capability.probe(run.settings.device))
    if run.settings.device == "cpu":
        device = "CPU"
    found = versions()
    software = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton") if found.get(name))
    counted = "" if cases is None else f" {cases} case{'s' * (cases != 1)},"
    fuzz = f", fuzz {run.settings.fuzz}" if run.settings.fuzz else ""
    return f"flashattn: {device}, {software}; matrix {run.settings.matrix}{fuzz},{counted} seed {run.settings.seed}"


def summary(terminal: pytest.TerminalReporter, run: State, ledger: Ledger) -> None:
    """The table: chapter by status, and the worst error of each chapter as a share of its limit."""
    if not ledger.records or terminal.verbosity < 0:
        return
    terminal.write_sep("=", "flashattn", bold=True)
    for line in performance.lines(run, ledger):
        terminal.write_line(line)
    width = max(80, shutil.get_terminal_size().columns)
    if len(run.settings.impl) < 2:
        terminal.write_line(table(ledger.of(None), width))
        return
    beside = side_by_side(run, ledger)
    if max(map(len, beside.splitlines())) <= width:
        terminal.write_line(beside)
        return
    for name, spec in run.settings.names().items():
        terminal.write_line(f"{name}\n{table(ledger.of(spec), width)}\n")


def closing(terminal: pytest.TerminalReporter, lines: list[Closing]) -> None:
    for line in lines:
        terminal.write_line(line.text, green=line.ok, red=not line.ok, bold=True)


def table(records: list[Record], width: int) -> str:
    shown = [s for s in STATUSES if s != "excused" or any(r["status"] == s for r in records)]
    rows = []
    for chapter in dict.fromkeys(r["chapter"] for r in records):
        of_chapter = [r for r in records if r["chapter"] == chapter]
        counts = [sum(r["status"] == s for r in of_chapter) for s in shown]
        rows.append([chapter[-24:], *counts, *_worst(of_chapter)])
    headers = ["chapter", *shown, "worst/limit", "", "case"]
    lines = _grid([headers, *rows], ["left", *["right"] * (len(shown) + 1), "left", "left"])
    return "\n".join(_fitted(lines, width, lines[0].index("case")))


def _fitted(lines: list[str], width: int, last: int) -> list[str]:
    """A narrow terminal costs the tail of the last column, or all of it; a replay line has the case in full anyway."""
    if max(map(len, lines)) <= width:
        return lines
    if width - last < 24:
        return [line[:last].rstrip() for line in lines]
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _grid(rows: list[list[Any]], align: list[str]) -> list[str]:
    # The headers go in as a row: as headers, tabulate would pad each of them by two columns.
    return tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align).splitlines()


def _worst(records: list[Record]) -> list[str]:
    """Ratio, quantity and case of the largest error of these records; blanks when nothing was measured."""
    measured = [(m, r) for r in records if r["status"] != "excused" for m in r["measures"]]
    if not measured:
        return ["", "", ""]
    measure, record = max(measured, key=lambda pair: _size(pair[0]))
    return [_ratio(measure), measure["quantity"], record["case"]]


def _size(measure: dict[str, Any]) -> float:
    ratio = float(measure["ratio"])  # non-finite ratios travel as strings
    return math.inf if math.isnan(ratio) else ratio


def _ratio(measure: dict[str, Any]) -> str:
    return f"{float(measure['ratio']):.3g}"


def side_by_side(run: State, ledger: Ledger) -> str:
    """Several implementations: a row a chapter, a column each: verified of judged, and the worst error."""
    names = run.settings.names()
    chapters = dict.fromkeys(r["chapter"] for r in ledger.records.values())
    rows = []
    for chapter in chapters:
        cells = ([r for r in ledger.of(spec) if r["chapter"] == chapter] for spec in names.values())
        rows.append([chapter[-24:], *map(_cell, cells)])
    for status in STATUSES:
        counts = [ledger.totals(spec)[status] for spec in names.values()]
        if any(counts) or status != "excused":
            rows.append([f"({status})", *map(str, counts)])
    table = "\n".join(_grid([["chapter", *names], *rows], ["left"] * (len(names) + 1)))
    return f"{table}\nA cell: verified of judged, and the worst error as a share of its limit."


def _cell(records: list[Record]) -> str:
    verified = sum(r["status"] == "verified" for r in records)
    judged = verified + sum(r["status"] in ("failed", "excused") for r in records)
    if not judged:
        return ", ".join(sorted({r["status"] for r in records}))
    ratio, quantity, _ = _worst(records)
    return f"{verified}/{judged}" + (f"  {ratio} {quantity}" if ratio else "")
