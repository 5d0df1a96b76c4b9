"""Attention for Hopper (sm_90) in Gluon: TMA, warp specialisation, a persistent grid.

    from reference_kernels.hopper import forward, supports

Read them in this order:

    channel         how tiles change hands between warps
    stage1          the simplest kernel of TMA and wgmma: load, multiply, softmax, multiply, in turn
    stage2          a warp of its own loads ahead
    stage3          two consumers, the softmax under the products: FlashAttention-3's schedule; tiles must be whole
    producer        from here on the full kernel, for any lengths: the warp that loads
    softmax         one block of scores
    consumer        a warp group's loop over the keys: products, softmax under them, masks peeled off, frozen maximum
    kernel          the roles, and what they share
    schedule        who works on what, and when

and the backward:

    backward            which kernels for which problem, and their launch
    wgmma               products, and how a warp group holds them in registers
    backward_tile       the keys of a CTA, and the rows that see them
    backward_stream     the ring of those rows, and what is done with a block of them
    backward_dkv        dK and dV: the simplest of the kernels
    backward_dkv_wide   the same for D = 256, where the consumers share products instead of keys
    backward_dq         dQ
    backward_onepass    all three at once
    backward_ends       what comes before and after

Around them `work` (what all roles agree on), `ptx` (what Gluon cannot say), `configs` (tiles), `gluon_compat` (names
that differ between Triton 3.6 and 3.9), `launch` (the function), `stages` (the same for the three stages) and `cases`
(for the compile lane). `python -m reference_kernels.hopper.stage1` runs a stage by itself.

Importing the package imports neither torch nor Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy import attribute

if TYPE_CHECKING:
    from .launch import forward as forward
    from .launch import supports as supports

__all__ = ["forward", "supports"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, dict.fromkeys(__all__, "launch"), name)
