"""The tables of chapter `performance`: one implementation in full, several side by side. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from ..ledger import Ledger, Record
    from ..state import State

MOST_NOTICES = 8


def lines(run: State, ledger: Ledger) -> list[str]:
    """All that was measured; empty when nothing was."""
    measured = [r for r in ledger.records.values() if "performance" in r.get("extra", {})]
    grown = [r for r in ledger.records.values() if "growth" in r.get("extra", {})]
    if not measured and not grown:
        return []
    found = []
    if measured:
        found.append(_headline(measured))
        names = {spec: name for name, spec in run.settings.names().items()}
        found += side_by_side(measured, names) if len(names) > 1 else in_full(measured)
    found += [f"{r['case']}: {_growth(r['extra']['growth'])}, {_status(r)}" for r in grown]
    return [*found, *_notices([*measured, *grown])]


def _headline(records: list[Record]) -> str:
    found = [r["extra"]["performance"] for r in records]
    baselines = ", ".join(sorted({p["reference"] for p in found if "reference" in p})) or "none"
    return f"{found[0]['device']}: {found[0]['clock_says']}; medians; baseline: {baselines}"


def in_full(records: list[Record]) -> list[str]:
    """A row a measurement; time/baseline with its interval of 99 %."""
    rows = [_row(r, r["extra"]["performance"]) for r in records]
    headers = ["", "case", "ms", "TFLOP/s", "of peak", "GB/s", "MiB", "first call", "time/baseline", "", ""]
    keep = [i for i in range(len(headers)) if i < 4 or any(row[i] for row in rows)]
    aligned = ["left", "left", *["right"] * 6, "right", "left", "left"]
    return _grid([[row[i] for i in keep] for row in [headers, *rows]], [aligned[i] for i in keep])


def _row(record: Record, p: dict[str, Any]) -> list[str]:
    memory, share = p["peak_memory"], p["peak_share"]
    against = p.get("ratio")
    return [
        p["direction"].replace("_", "+"),
        record["case"],
        f"{1e3 * p['seconds'][0]:.4g}",
        f"{p['tflops']:.3g}",
        "" if share is None else f"{share:.0%}",
        f"{p['gbps']:.3g}",
        "" if memory is None else f"{memory / 2**20:,.1f}",
        f"{p['first_call']:.2f} s",
        "" if against is None else f"{against[0]:.3f}",
        "" if against is None else f"[{against[1]:.3f}, {against[2]:.3f}]",
        _status(record),
    ]


def side_by_side(records: list[Record], names: dict[str, str]) -> list[str]:
    """TFLOP/s: a row a case, a column an implementation, and the baseline as it was beside the first of them."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for record in records:
        p = record["extra"]["performance"]
        row = cells.setdefault((p["direction"].replace("_", "+"), record["case"]), {})
        row[names[record["implementation"]]] = f"{p['tflops']:.3g}" + (
            "" if record["status"] != "failed" else " failed"
        )
        if "reference" in p:
            row.setdefault("baseline", f"{p['tflops'] * p['seconds'][0] / p['reference_seconds']:.3g}")
    columns = [*names.values(), "baseline"]
    rows = [[*key, *(row.get(column, "") for column in columns)] for key, row in cells.items()]
    return _grid([["TFLOP/s", "case", *columns], *rows], ["left", "left", *["right"] * len(columns)])


def _growth(g: dict[str, Any]) -> str:
    value, low, high = (float(x) for x in g["value"])
    limit = "no limit" if g["limit"] is None else f"limit {g['limit']:g}"
    return f"{g['says'].format(f'{value:.3g} [{low:.3g}, {high:.3g}]')}, {limit}"


def _status(record: Record) -> str:
    undecided = record["status"] == "unmet" and record["reason"].startswith("undecided")
    return "undecided" if undecided else str(record["status"])


def _notices(records: list[Record]) -> list[str]:
    found = []
    for r in records:
        notices = (r["extra"].get("performance") or r["extra"]["growth"])["notices"]
        found += [f"doubtful: {r['check']}[{r['case']}]: {'; '.join(notices)}"] if notices else []
    more = [f"doubtful: {len(found) - MOST_NOTICES} more like these"] if len(found) > MOST_NOTICES else []
    return found[:MOST_NOTICES] + more


def _grid(rows: list[list[str]], align: list[str]) -> list[str]:
    return tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align).splitlines()
