"""How a measurement is to be made, and the plan in force. Torch-free.

A check takes an implementation and a case and nothing else; pytest's rim puts the plan around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

BASELINES = {"cuda": "reference_kernels:flash_attention", "cpu": "reference_kernels.naive:naive_attention"}
"""The bundled kernel of a device. Triton does not run on a CPU: there it is the definition, in PyTorch."""


@dataclass(frozen=True)
class Plan:
    """baseline: "module:attribute" of the peer that is timed in turns with the implementation; None: the bundled kernel
    of the device. thresholds: "ratio", "chapter" or the path of a TOML file (`thresholds.load`).

    Rounds go on until the interval of the ratio is within `precision` on either side or `seconds` have passed, but no
    fewer than `least` of them, so that an interval exists, and no more than `most`. A call of more than `wall_flops`
    operations is not timed on a CPU.
    """

    baseline: str | None = None
    thresholds: str = "ratio"
    seconds: float = 1.0
    precision: float = 0.01
    least: int = 15
    most: int = 400
    wall_flops: float = 6e9


_DEFAULT = Plan()
_PLAN: ContextVar[Plan] = ContextVar("flashattn_plan", default=_DEFAULT)


def current() -> Plan:
    return _PLAN.get()


@contextlib.contextmanager
def in_force(plan: Plan) -> Iterator[None]:
    """Within the block, `current()` is `plan`."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)
