"""The table of the GPU lane: the mutants, what of the suite must fail each, and the right kernel that must pass it."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD = ("flashattn-suite/forward", "--flashattn-matrix=smoke")
CACHE = "flashattn-suite/layout::test_matches_oracle[bf16-b2-h2-q65-k130-d64-cache]"
FAR = "flashattn-suite/layout::test_matches_oracle[bf16-b3-h4-kv2-q65-k65-d64-causal-far]"
MANY_KEYS = "flashattn-suite/shapes::test_matches_oracle[bf16-b1-h1-q4-k33000-d32]"
MANY_HEADS = "flashattn-suite/shapes::test_matches_oracle[fp16-b32768-h2-q1-k2-d8]"
TWICE = "flashattn-suite/contract::test_same_call_twice[fp32-b2-h4-q256-k1024-d64]"


@dataclass(frozen=True)
class Real:
    """A fault as it really happens.

    number: in the catalogue. options: the run that must fail it and pass `control`, the nearest kernel without the
    fault. gpus: how many it needs.
    """

    name: str
    number: int
    options: tuple[str, ...]
    control: str = "honest"
    gpus: int = 1


LANE = (
    Real("compiled_differs", 13, FORWARD, control="definition"),
    Real("int32_offset", 77, (FAR,)),
    Real("int16_seqlen", 78, (MANY_KEYS,)),
    Real("grid_limit_raises", 79, (MANY_HEADS,)),
    Real("pad_poison", 80, (CACHE,)),
    Real("fwd_race", 84, FORWARD, control="pv_race"),
    Real("bwd_race", 84, ("flashattn-suite/backward", "--flashattn-matrix=smoke")),
    Real("pv_race", 85, (TWICE,)),
    Real("device0_launch", 117, (*FORWARD, "--flashattn-device=cuda:1"), gpus=2),
    Real("empty_alias", 132, FORWARD),
    Real("side_stream", 133, FORWARD),
)
