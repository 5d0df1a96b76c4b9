"""what flash attention is for: peak memory of an implementation and of the definition, over the length

Forward and backward, one batch, 32 heads, D = 64, fp16, bytes on top of the inputs; needs a CUDA device. The definition
stores S and P, so that its memory grows as N squared."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .plan import BASELINES

if TYPE_CHECKING:
    from ..implementation import Implementation

LENGTHS = (512, 1024, 2048, 4096, 8192)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--impl", metavar="MODULE:ATTRIBUTE", default=BASELINES["cuda"], help=f"default: {BASELINES['cuda']}"
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the table, as Markdown."""
    import torch

    from .. import implementation

    if not torch.cuda.is_available():
        arguments.refuse("this machine has no CUDA device, and a CPU does not say how much memory a call took")
    try:
        subjects = [implementation.load(spec, device="cuda") for spec in (BASELINES["cpu"], arguments.impl)]
    except ValueError as error:
        arguments.refuse(str(error))
    print(f"| N | {' | '.join(f'{s.name}, MiB' for s in subjects)} | ratio |\n|--:|--:|--:|--:|")
    for length in LENGTHS:
        naive, flash = table_row(subjects, length)
        print(f"| {length} | {naive / 2**20:,.1f} | {flash / 2**20:,.1f} | {naive / flash:.1f} |", flush=True)
    return 0


def table_row(subjects: list[Implementation], length: int) -> list[int]:
    """Peak bytes of each subject at one length."""
    from ..cases import Case
    from . import clock, pairing
    from .subject import Subject, Values
    from .trials import peak_memory

    case = Case(dtype="fp16", heads=32, q=length, k=length, d=64)
    found = []
    for one in subjects:
        subject = Subject(one, Values(case, one.device), "forward_backward")
        pairing.first_call(clock.clock_for(one.device), subject)
        taken = peak_memory(subject)
        assert taken is not None
        found.append(taken)
    return found
