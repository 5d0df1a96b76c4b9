"""The tables of a kill matrix, from its document: for the terminal, and as Markdown for the docs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

from ..chapters import CHAPTERS

Document = dict[str, Any]
Table = tuple[list[str], list[list[Any]]]


def markdown(table: Table) -> list[str]:
    """The lines of a table in Markdown."""
    head, rows = table
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


def text(document: Document) -> str:
    """All tables and lists for a terminal."""
    parts = [plain(matrix(document)), *(plain(chapters(document, level)) for level in document["levels"])]
    if "rules" in document:
        parts.append(plain(rules(document)))
    parts += [plain(levels(document)), *remarks(document)]
    return "\n\n".join(parts)


def levels(document: Document) -> Table:
    """What each level costs and catches."""
    rows = []
    for level, entry in document["levels"].items():
        chapters = entry["chapters"].values()
        killed, total = entry["killed"], len(document["mutants"])
        share = f"{killed} of {total} ({killed / max(total, 1):.1%})"
        rows.append([level, *_cost(list(chapters)), share, len(entry["survivors"]), len(entry["false_alarms"])])
    return ["matrix", *COST, "mutants killed", "survivors", "false alarms"], rows


def chapters(document: Document, level: str) -> Table:
    """What each chapter of a level costs and catches."""
    rows = [
        [name, *_cost([entry]), entry["killed"], len(entry["alone"])]
        for name, entry in document["levels"][level]["chapters"].items()
    ]
    return [level, *COST, "mutants killed", "by no other chapter"], rows


COST = ("cases", "tried", "CPU s")


def _cost(chapters: list[Document]) -> list[str]:
    """Cases, those that were tried, and what these took on the honest implementation."""
    steps, tried, seconds = (sum(chapter[key] for chapter in chapters) for key in ("steps", "tried", "seconds"))
    return [str(steps), str(tried), f"{seconds:.1f}"]


def matrix(document: Document) -> Table:
    """Mutants by chapters: the first letter of the first level whose cases of the chapter kill, "." where none does.

    In capitals where the case kills only after others of the chapter, that is, where the fault has a memory.
    """
    rows = []
    for name, about in document["mutants"].items():
        cells = [_cell(document, name, chapter) for chapter in CHAPTERS]
        best = about["cheapest"]
        killer = f"{best['check']}[{best['case']}]" if best else "SURVIVES"
        rows.append([name, about["number"] or "", *cells, killer])
    return ["mutant", "no.", *(chapter[:3] for chapter in CHAPTERS), "cheapest case that kills it"], rows


def rules(document: Document) -> Table:
    """What each rule catches, by level, and on how many cases it refuses a right implementation; last, this suite."""
    found, mutants = document["rules"]["levels"], set(document["rules"]["mutants"])
    total = max(len(mutants), 1)
    head, rows = ["rule"], {name: [name] for name in [*document["rules"]["about"], "pytest-flashattn"]}
    for level, entries in found.items():
        head += [f"{level}: killed", "refuses who is right"]
        for name, entry in entries.items():
            killed, refused = len(entry["caught"]), entry["cases_that_refuse_equivalents"]
            rows[name] += [f"{killed} ({killed / total:.0%})", f"on {refused} of {entry['cases']} cases"]
        own = document["levels"][level]
        killed = len(mutants - set(own["survivors"]))
        accused = len({alarm["step"] for alarm in own["false_alarms"]})
        tried = sum(chapter["tried"] for chapter in own["chapters"].values())
        rows["pytest-flashattn"] += [f"{killed} ({killed / total:.0%})", f"on {accused} of {tried} cases"]
    return head, list(rows.values())


def about_rules(document: Document) -> Table:
    rows = [[name, entry["about"], entry["source"]] for name, entry in document["rules"]["about"].items()]
    return ["rule", "what it accepts", "source"], rows


def catalogue(document: Document) -> Table:
    """Where the faults of the catalogue stand."""
    here = len({about["number"] for about in document["mutants"].values()} - {0})
    rows = [[status, len(names), ", ".join(names)] for status, names in document["absent"].items()]
    return ["status", "faults", "names"], [["here", here, ""], *rows]


def spent(document: Document) -> Table:
    """What the run has cost."""
    parts = {"matrix": document, "rules": document.get("rules")}
    cores = document["machine"]["processes"]
    rows = [[name, round(x["seconds"]), cores, round(x["cpu_seconds"])] for name, x in parts.items() if x]
    return ["part", "seconds", "cores", "CPU seconds"], rows


def survivors(document: Document) -> Table:
    """Whom some level does not kill, and by what another does."""
    rows = []
    for level, entry in document["levels"].items():
        for name in entry["survivors"]:
            about, best = document["mutants"][name]["about"], document["mutants"][name]["cheapest"]
            killer = f"{best['level']}: {best['check']}[{best['case']}]" if best else "nothing"
            rows.append([level, name, about, killer])
    return ["survives", "mutant", "its fault", "killed by"], rows


def cover(found: Document) -> Table:
    """The cases of --suggest-smoke, one by one."""
    rows: list[list[Any]] = []
    so_far = 0
    for number, choice in enumerate(found["cover"], 1):
        new = choice["new"]
        so_far += len(new)
        who = ", ".join(new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
        rows.append([number, choice["set"], choice["case"], len(new), f"{so_far / found['mutants']:.1%}", who])
    return ["", "set", "case", "new kills", "of all", "who"], rows


def smoke(found: Document) -> Table:
    """What today's smoke kills case by case, and who needs larger cases or more than one."""
    today = found["smoke"]
    return ["mutants", "number", "names"], [
        [f"killed by one of today's {today['cases']} cases alone", today["killed"], ""],
        ["missed, though a cheap case kills them", len(today["missed"]), ", ".join(today["missed"])],
        ["killed by no cheap case alone", len(found["never"]), ", ".join(found["never"])],
    ]


def remarks(document: Document) -> Iterator[str]:
    """Survivors, false alarms and absentees by name; the time."""
    for level, entry in document["levels"].items():
        if entry["survivors"]:
            yield f"Survivors of {level} ({len(entry['survivors'])}): {', '.join(entry['survivors'])}"
        for alarm in entry["false_alarms"]:
            yield f"False alarm in {level}: {alarm['step']} fails {alarm['name']}: {alarm['reason']}"
    if absent := document["absent"]:
        names = "; ".join(f"{status} ({len(of)}): {', '.join(of)}" for status, of in absent.items())
        yield f"In the catalogue and not here ({sum(map(len, absent.values()))}): {names}"
    for part, seconds, cores, cpu in spent(document)[1]:
        yield f"{part}: {seconds} s on {cores} core{'s' * (cores > 1)}, {cpu} s of CPU time"


def _cell(document: Document, name: str, chapter: str) -> str:
    for level, entry in document["levels"].items():
        if kill := entry["kills"].get(name, {}).get(chapter):
            letter: str = level[0]
            return letter.upper() if kill.get("alone") is False else letter
    return "."


def plain(table: Table) -> str:
    """The table for a terminal."""
    head, rows = table
    shown: str = tabulate(rows, headers=head, tablefmt="plain", disable_numparse=True)
    return shown
