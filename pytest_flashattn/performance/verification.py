"""The timed outputs, judged after the timing: one round drawn at random, and every round that looks unlike its peer's.

Every round is compared with the peer that had the same inputs, which is cheap and decides nothing: a round that differs
is kept, and the oracle judges it with the others. Without a peer the random round stands alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import examination
from ..attempt import Outputs
from ..inputs import Inputs
from ..verdict import Measure
from .clock import Timing
from .subject import Subject, snapshot

UNLIKE = 8.0
"""Relative RMS difference in units of the dtype's epsilon: two correct results lie within one of each other; with a
share f of the keys left out they are about sqrt(f) apart, 13 of bfloat16 for a hundredth."""
SUSPECTS = 2

_drawn = random.SystemRandom()  # an implementation can know the seed of the run, and so would know when to be honest


@dataclass
class _Kept:
    round: int
    inputs: Inputs
    outputs: Outputs


class Verification:
    """Watches the rounds of `subject`, as a `pairing.Witness`; peer: who takes turns with it, if anyone does."""

    def __init__(self, subject: Subject, peer: Subject | None = None) -> None:
        self.subject, self.peer = subject, peer
        self._wrote = False
        self._random: _Kept | None = None
        self._suspects: list[_Kept] = []

    def __call__(self, number: int, timings: list[Timing]) -> None:
        mine = timings[0].results
        same = self.peer is not None and self.peer.values is self.subject.values
        if same and len(self._suspects) < SUSPECTS and _unlike(mine, timings[1].results):
            self._suspects.append(self._keep(number, mine))
        elif _drawn.random() < 1 / (number + 1):  # each of the rounds, however many there will be, is as likely
            self._random = self._keep(number, mine)

    def _keep(self, number: int, results: list[Tensor]) -> _Kept:
        self._wrote = self._wrote or self.subject.has_changed_inputs()
        return _Kept(number, snapshot(self.subject.inputs), self.subject.named(results))

    def judge(self) -> tuple[list[Measure], str]:
        """The measures of every round that was kept, and what to say ahead of them if one fails."""
        if self._wrote:
            return [], "changed its inputs while it was timed"
        kept = [k for k in (*self._suspects, self._random) if k is not None]
        found: list[Measure] = []
        for one in kept:
            measures = examination.judge(self.subject.implementation, one.inputs, one.outputs, noise=False)
            found += measures
            if not all(m.ok for m in measures):
                return found, f"what it returned while it was timed is wrong (round {one.round + 1})"
        return found, ""


def _unlike(got: list[Tensor], peer: list[Tensor]) -> bool:
    limit = UNLIKE * torch.finfo(got[0].dtype).eps
    differences = [
        torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float())
        for a, b in zip(got, peer, strict=True)
    ]
    return not all(bool(x <= limit) for x in differences)  # NaN compares false
