"""Tiles of the Hopper FP8 forward, by head dimension and mask: data, chosen by measurement on an H200.

As in ../../hopper/configs.py. FP8 halves the tiles in shared memory, but O leaves as bfloat16 and needs buffers of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...hopper.configs import Config


@dataclass(frozen=True)
class Fp8Config(Config):
    """ahead: the scores of a block are computed during the softmax of the one before (consumer.py); not with ping_pong.

    The second tile of scores takes block_n / 2 registers a thread.
    """

    ahead: bool = False


_D64 = Fp8Config(3, 128, 2, 2, True, False, False, 160, 32)

TABLE: dict[int, dict[bool, Fp8Config]] = {
    64: {False: _D64, True: _D64},
    128: {
        False: Fp8Config(2, 128, 3, 2, False, True, False, 240, 24, ahead=True),
        True: Fp8Config(2, 128, 3, 2, True, True, False, 240, 24),
    },
    256: {
        False: Fp8Config(2, 128, 2, 1, False, True, False, 240, 24),
        True: Fp8Config(2, 128, 2, 1, True, True, False, 240, 24),
    },
}
"""By D, then causal."""


def lookup(d: int, *, causal: bool) -> Fp8Config:
    """The tile for a head dimension of TABLE."""
    return TABLE[d][causal]
