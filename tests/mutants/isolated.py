"""Mutants that only a process of their own survives: they hang, abort, or spoil what they find in memory.

Each is named on a command line as a user would: `--flashattn-impl=mutants.isolated:NAME`, with tests/ on the path.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from pytest_flashattn.support import Support

from .core import Core, Problem
from .mutants_mask import EVERYTHING


class _HangOnEmpty(Core):
    """Loops for ever when there are no keys."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        if not p.lk:
            hang()
        return super().forward(p)


class _Hang1In50(Core):
    """Hangs at every fiftieth call."""

    calls = 0

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls % 50 == 0:
            hang()
        return super().forward(p)


def hang() -> NoReturn:
    while True:
        time.sleep(0.01)


class _CrashOnUnsupported(Core):
    """ALiBi is not declared, and ends the process instead of raising."""

    __flashattn__ = Support(features=EVERYTHING - {"alibi"})

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        if p.slopes is not None:
            os.abort()
        return super().forward(p)


class _GcNanExpected(Core):
    """Zeros, after filling with NaN whatever may be the expected output: any float64 tensor of its shape."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        o, lse = super().forward(p)
        for x in gc.get_objects():
            if type(x) is Tensor and x.dtype == torch.float64 and x.shape == o.shape:
                x.fill_(torch.nan)
        return torch.zeros_like(o), lse


hang_on_empty = _HangOnEmpty()
hang_1_in_50 = _Hang1In50()
crash_on_unsupported = _CrashOnUnsupported()
gc_nan_expected = _GcNanExpected()


@dataclass(frozen=True)
class Isolated:
    """number: in the catalogue. options: the run that must fail. reason: how the failure's reason begins."""

    name: str
    number: int
    options: tuple[str, ...]
    reason: str


LIMIT = "--flashattn-timeout=5"
ISOLATED = {
    mutant.name: mutant
    for mutant in (
        Isolated("hang_on_empty", 30, ("flashattn-suite/shapes", LIMIT), "did not return within 5 s: a hang"),
        Isolated("hang_1_in_50", 88, ("flashattn-suite", LIMIT), "did not return within 5 s: a hang"),
        Isolated("crash_on_unsupported", 118, ("flashattn-suite/contract", "-n1"), "the process died while it ran"),
        Isolated("gc_nan_expected", 140, ("flashattn-suite/forward",), ""),
    )
}
