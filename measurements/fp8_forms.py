"""The FP8 forwards that fp8.py checks and times, by name: forms, and candidates for the Hopper table of tiles.

interleaved, ordered    the Hopper kernel as it runs, with the keys of V interleaved, or in their own order
plain                   plain Triton
candidates              of `candidates`, all with interleaved keys
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

FORMS = ("interleaved", "ordered", "plain")

_TWO = {"consumers": 2, "kv_stages": 4, "pin": True, "consumer_registers": 240, "producer_registers": 24}
CANDIDATES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "table": ((64, 128, 256), {}),
    "no-ping-pong": ((64, 256), {"ping_pong": False}),
    "ping-pong": ((128, 256), {"ping_pong": True, "ahead": False}),
    "ahead": ((128,), {"ping_pong": False, "ahead": True}),
    "two-ahead": ((64,), {**_TWO, "ping_pong": False, "ahead": True}),
    "half-keys": ((256,), {"block_n": 64, "kv_stages": 3}),
}
"""Head dims, and what differs from the table's tile. None spills in its loop over the keys under Triton 3.6.0."""


def candidates(d: int, causal: bool) -> dict[str, Any]:
    """Tiles of the Hopper forward by name: the table's, and others."""
    from reference_kernels.fp8.hopper.configs import lookup

    found: dict[str, Any] = {}
    for name, (dims, changes) in CANDIDATES.items():
        config = replace(lookup(d, causal=causal), **changes)
        if d in dims and config not in found.values():
            found[name] = config
    return found


def sums_of(name: str) -> str:
    """How many bits sums of FP8 products keep, of a form or a candidate, in the words of oracles.arithmetic."""
    return "14 bits a tile" if name == "plain" else "14 bits"


def is_interleaved(name: str) -> bool:
    return name not in ("ordered", "plain")


def kernel_named(name: str) -> Callable[..., tuple[Any, Any]]:
    """(q, k, v, q_descale=, k_descale=, v_descale=, scale=, causal=) -> o, lse; v interleaved if is_interleaved."""
    from reference_kernels.fp8 import forward as plain
    from reference_kernels.fp8.hopper import launch

    def hopper(q: Any, k: Any, v: Any, *, causal: bool, **options: Any) -> tuple[Any, Any]:
        config = None if name in FORMS else candidates(q.shape[3], causal)[name]
        return launch.forward(q, k, v, causal=causal, config=config, v_interleaved=is_interleaved(name), **options)

    return plain.forward if name == "plain" else hopper
