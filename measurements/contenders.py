"""The kernels that are measured beside one another, by name; a name may carry a tile: "v1@64,32,8,2". "online@o_in_q"
is the full Hopper kernel whose output leaves through Q's buffer, as at D = 128 with a few keys beside whole blocks.

forward    online, freeze (the full Hopper kernel), stage1, stage2, stage3, specialised, plain, v1
backward   onepass, twopass (Hopper), plain_backward, atomic
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

FORMS = ("online", "freeze")
STAGES = ("stage1", "stage2", "stage3")
BACKWARDS = ("onepass", "twopass", "plain_backward", "atomic")

# BLOCK_M, BLOCK_N, num_warps, num_stages of those that have not been tuned on a GPU.
TILES = {
    "specialised": ("128,128,4,2", "128,64,4,2", "128,64,4,4"),
    "v1": ("64,32,8,2", "64,64,8,2", "128,32,8,2"),
    "atomic": ("32,128,8,2", "64,64,8,2", "32,64,8,2"),
}

Kernel = Callable[..., tuple[Any, ...]]


def is_backward(name: str) -> bool:
    """Whether it is one of BACKWARDS, in any tile."""
    return name.partition("@")[0] in BACKWARDS


def tiled(name: str) -> list[str]:
    """The names of a kernel in each of its TILES; the name alone if it has none."""
    return [f"{name}@{tile}" for tile in TILES.get(name, ())] or [name]


def forward_named(name: str) -> Kernel:
    """(q, k, v, causal=, scale=) -> o, lse."""
    form, _, variant = name.partition("@")
    if form in FORMS:
        from reference_kernels.hopper import forward

        variants: dict[str, Kernel] = {"": forward, "o_in_q": _through_q}
        return partial(variants[variant], form=form)
    name, config = _split(name)
    if name in STAGES:
        from reference_kernels.hopper import stages

        return partial(stages.attention, importlib.import_module(f"reference_kernels.hopper.{name}").STAGE)
    if name == "specialised":
        from reference_kernels import specialised

        return partial(specialised.forward, config=config)
    if name == "v1":
        from reference_kernels.forward_v1 import forward_v1

        return partial(forward_v1, config=config)
    if name == "plain":
        return _plain_forward
    raise ValueError(f"no forward {name!r}")


def backward_named(name: str) -> Kernel:
    """(do, q, k, v, o, lse, causal=, scale=) -> dq, dk, dv."""
    name, config = _split(name)
    if name in ("onepass", "twopass"):
        return partial(_hopper_backward, deterministic=name == "twopass")
    if name == "atomic":
        from reference_kernels.backward_atomic import backward_atomic

        return partial(backward_atomic, config=config)
    if name == "plain_backward":
        return _plain_backward
    raise ValueError(f"no backward {name!r}")


def _split(name: str) -> tuple[str, Any]:
    from reference_kernels.configs import Config

    name, _, tile = name.partition("@")
    return name, Config(*map(int, tile.split(","))) if tile else None


def _through_q(q: Any, k: Any, v: Any, *, causal: bool, **options: Any) -> tuple[Any, ...]:
    from reference_kernels.hopper import forward
    from reference_kernels.hopper.configs import lookup

    config = lookup(q.shape[3], causal=causal, lq=q.shape[2], lk=k.shape[2])
    return forward(q, k, v, causal=causal, config=replace(config, o_in_q=True), **options)


def _scale(q: Any, scale: float | None) -> float:
    return float(q.shape[3] ** -0.5) if scale is None else scale


def _plain_forward(q: Any, k: Any, v: Any, *, causal: bool, scale: float | None = None) -> tuple[Any, ...]:
    from reference_kernels.forward import forward

    return forward(q, k, v, scale=_scale(q, scale), right=0 if causal else None)


def _plain_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, causal: bool, scale: float | None = None
) -> tuple[Any, ...]:
    from reference_kernels.backward import backward

    return backward(do, None, q, k, v, o, lse, scale=_scale(q, scale), right=0 if causal else None)[:3]


def _hopper_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, causal: bool, deterministic: bool, scale: float | None = None
) -> tuple[Any, ...]:
    from reference_kernels.hopper.backward import backward

    return backward(q, k, v, o, lse, do, scale=_scale(q, scale), causal=causal, deterministic=deterministic)
