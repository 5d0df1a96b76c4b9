"""how much the suite catches: every mutant against every case, a table of who kills whom

Mutants are implementations that are wrong on purpose, equivalents are unusual but right. Each mutant is put to each
chapter of the suite, cheapest case first, until a case fails it; each equivalent to every case that is not large.
Exit status 0: the most thorough level asked for kills every mutant, and nobody right is accused."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from ..matrices import LEVELS

OPTIONS: dict[str, dict[str, Any]] = {
    "--mutants": {
        "metavar": "MODULE",
        "default": "tests.mutants",
        "help": "module with MUTANTS and EQUIVALENTS (docs/power.md);\n"
        "default: the suite's own, in a checkout of its source",
    },
    "--matrix": {
        "metavar": "LEVEL",
        "nargs": "+",
        "choices": LEVELS,
        "default": ["smoke", "default"],
        "help": f"levels to measure: {', '.join(LEVELS)}; default: smoke default",
    },
    "--only": {"metavar": "GLOB", "default": "*", "help": "put only mutants and equivalents with such names on trial"},
    "--rules": {"action": "store_true", "help": "put the same mutants to the rules of other projects as well"},
    "--json": {"metavar": "PATH", "type": Path, "help": "write everything that was found to PATH"},
    "--suggest-smoke": {
        "action": "store_true",
        "help": "instead: the fewest cheap cases of smoke and default that kill the most",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, says in OPTIONS.items():
        parser.add_argument(flag, **says)


def main(arguments: argparse.Namespace) -> int:
    """Measure, print, and say by the exit status whether anyone survives or is wrongly accused."""
    from . import campaign, cast, crew, plan, suggest, tables

    levels = [level for level in LEVELS if level in arguments.matrix]
    if arguments.json and not arguments.json.resolve().parent.is_dir():
        arguments.refuse(f"--json: there is no folder {arguments.json.parent}")
    try:
        who = cast.load(arguments.mutants)
        mutants, equivalents = who.matching(arguments.only)
        if arguments.suggest_smoke:
            kills = campaign.survey(arguments.mutants, mutants, _say)
            found = suggest.document(kills, mutants, plan.all_steps("smoke"))
            _write(arguments, found)
            print(tables.plain(tables.cover(found)), tables.plain(tables.smoke(found)), sep="\n\n")
            return 0
        document = campaign.run(arguments.mutants, who, mutants, equivalents, levels, _say)
        _write(arguments, document)
        if arguments.rules:
            document["rules"] = campaign.compare(arguments.mutants, who, document, _say)
            _write(arguments, document)
    except (cast.UnusableModule, crew.CrewError) as error:
        arguments.refuse(str(error))
    print(tables.text(document))
    accused = any(entry["false_alarms"] for entry in document["levels"].values())
    return int(accused or bool(document["levels"][levels[-1]]["survivors"]))


def _write(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    from .campaign import text

    if arguments.json:
        command = shlex.join(["python", "-m", "pytest_flashattn", *sys.argv[1:]])
        arguments.json.write_text(text({"command": command, **document}), encoding="utf-8")


def _say(line: str) -> None:
    """One line of a terminal, written over the one before; nothing elsewhere."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{line[:width]:<{width}}", end="" if line else "\r", file=sys.stderr, flush=True)
