"""Commands of pytest-flashattn that are not test runs; the suite itself is run by pytest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .performance import compare_command, memory_command
from .power import command as power

COMMANDS = {"power": power, "compare": compare_command, "memory": memory_command}
"""A command is a module: its docstring is its help, add_arguments(parser) its options, main(arguments) -> exit status.

`arguments.refuse(sentence)` ends it with status 2 for bad input.
"""

EPILOG = "The suite:  pytest flashattn-suite --flashattn-impl=module:function   (pytest --help has its options)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit status."""
    parser = argparse.ArgumentParser("python -m pytest_flashattn", description=__doc__, epilog=EPILOG)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        about = (module.__doc__ or "").strip()
        own = commands.add_parser(
            name, help=about.partition("\n")[0], description=about, formatter_class=argparse.RawTextHelpFormatter
        )
        module.add_arguments(own)
        own.set_defaults(run=module.main, refuse=own.error)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
