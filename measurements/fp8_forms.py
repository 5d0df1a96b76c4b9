"""The FP8 forwards that fp8.py checks and times, by name: forms, and candidates for the Hopper table of tiles.

promoted, direct     the table's tile, P V added up in float32 block by block, or left to the tensor cores
…-interleaved        the same with the keys of V interleaved
plain                plain Triton
candidates           of `candidates`, all with interleaved keys
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

A_TILE, ALL = "14 bits a tile", "14 bits"
"""How many bits sums of FP8 products keep, in the words of oracles.arithmetic."""


@dataclass(frozen=True)
class Form:
    """promote: as of Fp8Config, None for plain Triton."""

    promote: bool | None
    interleaved: bool = False


FORMS = {
    "promoted-interleaved": Form(True, True),
    "direct-interleaved": Form(False, True),
    "promoted": Form(True),
    "direct": Form(False),
    "plain": Form(None),
}

_TURNS = {"ping_pong": False, "softmax_turns": True, "pin": True}
_THREE = {
    "consumers": 3, "kv_stages": 2, "ping_pong": False, "pin": False, "consumer_registers": 160,
    "producer_registers": 32,
}  # fmt: skip
CANDIDATES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "table": ((64, 128, 256), {}),
    "three": ((64,), {**_THREE, "promote": False}),
    "three-pinned": ((64,), {**_THREE, "promote": False, "pin": True}),
    "three-ping-pong": ((64,), {**_THREE, "promote": False, "ping_pong": True}),
    "three-in-turn": ((64,), {**_THREE, "overlap": False}),
    "three-in-turn-direct": ((64, 128), {**_THREE, "overlap": False, "promote": False}),
    "turns": ((64, 128, 256), _TURNS),
    "turns-direct": ((64, 128), {**_TURNS, "promote": False}),
    "table-direct": ((64, 128), {"promote": False}),
    "no-ping-pong": ((64, 128, 256), {"ping_pong": False}),
    "three-half-keys": ((128,), {**_THREE, "block_n": 64, "kv_stages": 4, "promote": False}),
    "half-keys": ((256,), {"block_n": 64, "kv_stages": 3}),
}
"""Head dims, and what differs from the table's tile. None spills in its loop over the keys under Triton 3.6.0."""


def forms_of(d: int) -> list[str]:
    """Two accumulators of 64 x 256 do not fit into the registers."""
    return [name for name, form in FORMS.items() if not form.promote or d < 256]


FASTEST = {64: "three-ping-pong", 128: "table-direct", 256: "no-ping-pong"}
"""Of the candidates, by head dim, in measurements/h200/fp8-tiles.json. In fp8-speed.json, of the same run, "table" is
this one, and "direct" this one with keys in their own order."""


def timed_forms(d: int) -> list[str]:
    """The fastest tile, the table's with interleaved keys and without, and plain Triton."""
    from reference_kernels.fp8.hopper.configs import TABLE

    return [FASTEST[d], "table", "promoted" if TABLE[d].promote else "direct", "plain"]


def candidates(d: int) -> dict[str, Any]:
    """Tiles of the Hopper forward by name: the table's, and others."""
    from reference_kernels.fp8.hopper.configs import TABLE

    found: dict[str, Any] = {}
    for name, (dims, changes) in CANDIDATES.items():
        config = replace(TABLE[d], **changes)
        if d in dims and config not in found.values():
            found[name] = config
    return found


def sums_of(name: str, d: int) -> str:
    """What the sums of P V keep: of a form, or of a candidate."""
    promote = FORMS[name].promote if name in FORMS else candidates(d)[name].promote
    return ALL if promote is False else A_TILE


def is_interleaved(name: str) -> bool:
    return name not in FORMS or FORMS[name].interleaved


def kernel_named(name: str) -> Callable[..., tuple[Any, Any]]:
    """(q, k, v, q_descale=, k_descale=, v_descale=, scale=, causal=) -> o, lse; v interleaved if is_interleaved."""
    from reference_kernels.fp8 import forward as plain
    from reference_kernels.fp8.hopper import launch
    from reference_kernels.fp8.hopper.configs import TABLE

    def hopper(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        d = q.shape[3]
        config = replace(TABLE[d], promote=FORMS[name].promote) if name in FORMS else candidates(d)[name]
        return launch.forward(q, k, v, config=config, v_interleaved=is_interleaved(name), **options)

    return plain.forward if name == "plain" else hopper
