"""Tiles of the Hopper FP8 forward, by head dimension: chosen by what compiles, not measured yet.

As in ../../hopper/configs.py. FP8 halves the tiles in shared memory, but O leaves as bfloat16 and needs buffers of its
own. A promoted sum takes registers for a second accumulator of 64 x D: at D = 256 there is no room for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...hopper.configs import Config


@dataclass(frozen=True)
class Fp8Config(Config):
    """promote: every block of keys has a P V of its own, added to the sum in float32 (consumer.py says why).

    overlap: P V of a block and Q K of the next are under way together. softmax_turns: consumers take turns at the
    softmax, for which `pin` is needed.
    """

    promote: bool = True
    overlap: bool = True
    softmax_turns: bool = False


TABLE: dict[int, Fp8Config] = {
    64: Fp8Config(2, 128, 4, 2, True, True, False, 240, 24),
    128: Fp8Config(2, 128, 3, 2, True, True, False, 240, 24),
    256: Fp8Config(2, 128, 2, 1, True, True, False, 240, 24, promote=False),
}
