"""The chapters of the bundled suite, in the order they run: from the plain to the particular."""

from __future__ import annotations

CHAPTERS: dict[str, str] = {
    "forward": "the output, against the float64 oracle",
    "causal": "the diagonal, and nothing beyond it",
    "lse": "the log-sum-exp and the gradient through it",
    "backward": "dq, dk and dv, as strictly as the output",
    "gqa": "grouped heads",
    "features": "window, softcap, ALiBi, bias, mask, sinks, Dv != D",
    "layout": "strides, offsets, expanded and fused memory",
    "numerics": "closed forms and inputs that are not Gaussian",
    "shapes": "lengths around tile edges, primes, 1, empty",
    "metamorphic": "relations that hold without a reference",
    "fp8": "FP8 inputs with descales: a tensor, a head or a block of rows",
    "contract": "dtype, aliasing, repetition, refusals",
}

TIMED: dict[str, str] = {"performance": "time, and how time and memory grow"}
"""Chapters that measure the machine as well, and so run only when asked for."""

DRAWN: dict[str, str] = {"fuzz": "cases drawn at random (--flashattn-fuzz), shrunk to the smallest that fails"}
"""Chapters without a matrix, which run only when asked for."""
