"""The command: find the cases of every kernel module, compile them, print a table and what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .expectations import ARCHITECTURES, KIB, violations
from .messages import shorten
from .processes import compile_all
from .results import Case, Compiled

#: The columns of `Compiled.counts`, in the order in which the table shows them.
COUNTED = ("mma.sync", "wgmma", "tcgen05", "cp.async", "tma")


def find_cases(capabilities: Iterable[int] = tuple(ARCHITECTURES)) -> tuple[list[tuple[str, Case, int]], list[str]]:
    """Collect (module, case, capability) from every module of `reference_kernels` that has `compile_cases`.

    A `compile_cases` with an argument is asked for the cases of each capability, one without for cases that are the
    same for all. A case may have `capabilities`, those it is meant for (a Hopper Gluon kernel has only 90). Returns the
    cases and a sentence for each module that could not be imported or asked: one broken module hides no other.
    """
    package = __package__.rpartition(".")[0]
    found: list[tuple[str, Case, int]] = []
    broken: list[str] = []
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if module.name.startswith(__package__) or module.name.endswith("__main__"):
            continue
        short = module.name.removeprefix(package + ".")
        try:
            ask = getattr(importlib.import_module(module.name), "compile_cases", None)
            if ask is None:
                continue
            takes_capability = bool(inspect.signature(ask).parameters)
            for capability in capabilities:
                cases: list[Case] = ask(capability) if takes_capability else ask()
                for case in cases:
                    if capability in getattr(case, "capabilities", ARCHITECTURES):
                        found.append((short, case, capability))
        except Exception as error:
            broken.append(f"{short} has no compile cases: {type(error).__name__}: {shorten(str(error))}.")
    return found, broken


def table(results: Iterable[Compiled]) -> str:
    """Lay results out as text, one line a compile, columns aligned."""
    heads = ("kernel", "sm", "registers", "spills", "shared", *COUNTED, "local in loops", "seconds")
    rows: list[tuple[str, ...]] = [heads]
    for r in results:
        numbers = (r.registers, r.spills, r.shared, *(r.counts.get(i, 0) for i in COUNTED), r.local_in_loops)
        shown = tuple("–" for _ in numbers) if r.fault else tuple(str(number) for number in numbers)
        rows.append((r.name, str(r.capability), *shown, f"{r.seconds:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _parser() -> argparse.ArgumentParser:
    capabilities = "\n".join(
        f"  {a.capability:<4} {a.gpus:<22} {a.family:<9} {a.shared_limit // KIB:>3} KiB of shared memory a block"
        for a in ARCHITECTURES.values()
    )
    parser = argparse.ArgumentParser(
        prog="python -m reference_kernels.compiling",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Compile the reference kernels to machine code for NVIDIA architectures; no GPU is needed or used.\n"
            "Prints registers, spills, shared memory and the matrix instructions of each kernel."
        ),
        epilog=(
            f"capabilities, their matrix instruction and limit:\n{capabilities}\n\n"
            "columns:\n"
            "  registers        of one thread\n"
            "  spills, shared   bytes: spill stores and loads of one thread; shared memory of one block\n"
            "  mma.sync … tma   PTX instructions, counted once wherever a loop repeats them\n"
            "  local in loops   loads and stores of local memory inside a loop: these are the spills that cost time\n\n"
            "exit status:\n"
            "  0  every limit is kept\n"
            "  1  a kernel does not compile, spills, exceeds a limit or uses another matrix instruction than\n"
            "     expected; one sentence each, after the table\n"
            "  2  the command line is wrong, or no case fits it\n\n"
            "examples:\n"
            "  python -m reference_kernels.compiling --list\n"
            "  python -m reference_kernels.compiling --capability 90 100 --kernel forward --json /tmp/forward.json"
        ),
    )
    parser.add_argument(
        "--capability",
        nargs="+",
        type=int,
        choices=tuple(ARCHITECTURES),
        default=list(ARCHITECTURES),
        metavar="N",
        help="compute capabilities, see below (default: all)",
    )
    parser.add_argument(
        "--kernel",
        nargs="+",
        default=[],
        metavar="NAME",
        help="kernel modules (forward), or parts of the names of cases, of which there are more for sm_90 than are "
        "compiled by default: hopper names them all (default: all but those)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results, as a list of objects")
    parser.add_argument("--processes", type=int, metavar="N", help="compilers side by side (default: one a core)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    return parser


def _asked(module: str, case: Case, names: Sequence[str]) -> bool:
    if not names:
        return not getattr(case, "only_named", False)
    return any(name == module or name in case.name for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for a violated limit, 2 for a wrong command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    found, broken = find_cases(options.capability)
    chosen = [(module, case, capability) for module, case, capability in found if _asked(module, case, options.kernel)]
    if not chosen and not broken:
        known = ", ".join(dict.fromkeys(module for module, _, _ in found)) or "none"
        print(f"No compile case fits --kernel {' '.join(options.kernel)}. Kernel modules: {known}.", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(dict.fromkeys(f"{module}: {case.name}" for module, case, _ in chosen)))
        return 0
    jobs = [(case, capability) for _, case, capability in chosen]
    finished = 0

    def progress(result: Compiled) -> None:
        nonlocal finished
        finished += 1
        state = "failed" if result.fault else f"{result.seconds:.1f} s"
        print(f"[{finished}/{len(jobs)}] {result.name} sm_{result.capability}: {state}", file=sys.stderr, flush=True)

    results = compile_all(jobs, processes=options.processes, done=progress)
    if results:
        version = next((r.triton for r in results if r.triton), "unknown")
        print(f"Triton {version}\n\n{table(results)}")
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1) + "\n")
    said = broken + [sentence for result in results for sentence in violations(result)]
    if said:
        print("\n" + "\n".join(said))
    return 1 if said else 0
