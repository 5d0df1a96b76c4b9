"""did it become slower: two runs of chapter performance, compared point by point

OLD and NEW are files of `pytest flashattn-suite/performance --benchmark-json=PATH`, or of pytest-benchmark's storage.
By the ratio to the baseline that both runs measured, else by the time itself. Prints Markdown, for instance for
$GITHUB_STEP_SUMMARY. Exit status 0: nothing is slower; 1: something is, or is measured no longer; 2: the files cannot
be compared; 3: nothing is slower, but an interval is too wide to say so."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from . import compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", type=Path, help="the run before")
    parser.add_argument("new", metavar="NEW", type=Path, help="the run now")
    parser.add_argument(
        "--fail-on", metavar="PERCENT", default="5%", help="the largest change that is accepted; default: 5%%"
    )
    parser.add_argument(
        "--force", action="store_true", help="compare runs on different GPUs, drivers or clocks all the same"
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the comparison; its verdict is the exit status."""
    if not re.fullmatch(r"\d+(\.\d+)?%", arguments.fail_on) or not (limit := float(arguments.fail_on[:-1]) / 100):
        arguments.refuse(f"--fail-on: {arguments.fail_on!r} is no percentage; write for instance 5%")
    try:
        old, new = compare.read(arguments.old), compare.read(arguments.new)
    except compare.Incomparable as error:
        arguments.refuse(str(error))
    against = compare.reasons_against(old, new)
    if against and not arguments.force:
        arguments.refuse(f"not the same machine: {'; '.join(against)}; --force compares them all the same")
    rows = compare.compare(old, new, limit)
    print(compare.markdown(rows, old, new, limit))
    if against:
        print(f"\nForced: {'; '.join(against)}.")
    return compare.status(rows)
