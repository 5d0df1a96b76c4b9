"""What the compile lane compiles of the plain FP8 kernels, with the instructions that each must consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton

from ..cases import CompileCase, specialise
from .configs import OLDEST, QuantiserConfig, lookup, quantiser_config
from .forward import forward_kernel
from .quantiser import BLOCK, tile
from .quantiser_kernel import quantise_kernel

# What multiplies two E4M3 tiles. PTX names the formats of mma.sync and wgmma; tcgen05 has them in a descriptor.
PRODUCTS: Mapping[int, str] = {89: "mma.sync e4m3", 90: "wgmma e4m3", 100: "tcgen05 f8f6f4", 120: "mma.sync e4m3"}


@dataclass(frozen=True)
class Fp8Case(CompileCase):
    """A case that names the instructions that must be there, and the capabilities that have them."""

    instructions: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = tuple(PRODUCTS)


def _case(case: CompileCase, instructions: tuple[str, ...]) -> Fp8Case:
    return Fp8Case(**vars(case), instructions=instructions)


def forward_case(
    dtypes: str, d: int, *, causal: bool = False, transposed: bool = False, capability: int = 90
) -> Fp8Case:
    """The plain forward in the tiles of `capability`; dtypes: "e4m3", "e5m2", or "e4m3-e5m2" for V in the second.

    transposed: V as the quantiser stores it on request. causal has a tail of keys as well.
    """
    types = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}
    qk, _, v = dtypes.partition("-")
    config = lookup(capability, d)
    pointers = dict.fromkeys(("q", "k"), types[qk]) | {"v": types[v or qk], "o": "bf16", "lse": "fp32"}
    pointers |= dict.fromkeys(("qs", "ks", "vs"), "fp32")
    scalars = {f"{tensor}_{axis}": "i32" for tensor in ("qs", "ks", "vs") for axis in "bhn"} | {"scale": "fp32"}
    block_d = triton.next_power_of_2(d)
    constants: dict[str, object] = {
        "D": d, "DV": d, "BLOCK_D": max(32, block_d), "BLOCK_DV": block_d, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "SCALE_BLOCK": BLOCK, "TAIL": causal, "WIDE": False,
    }  # fmt: skip
    if causal:
        scalars["right"] = "i32"
    else:
        constants["right"] = None
    if transposed:
        constants["v_l"], scalars["v_d"] = 1, "i32:16"
    said = [word for word, on in (("causal", causal), ("transposed", transposed)) if on]
    made = specialise(
        "-".join(["fp8-forward", dtypes, f"d{d}", *said]), forward_kernel, pointers, constants, scalars,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    # V in E5M2 makes one of the two products a mixed one.
    e5m2 = qk == "e5m2" and not v and capability in (89, 90, 120)
    return _case(made, () if e5m2 else (PRODUCTS[capability],))


def quantiser_case(
    source: str,
    target: str,
    d: int,
    *,
    per: str = "block",
    rotate: bool = False,
    transposed: bool = False,
    interleaved: bool = False,
    config: QuantiserConfig | None = None,
    capability: int = 90,
) -> Fp8Case:
    """The quantiser, from "bf16" to "e4m3". per: "amax" is the pass that only measures, "given" the one after it."""
    measures = per == "amax"
    pointers = {"x": source} | ({"signs": "fp32"} if rotate else {})
    config = config or quantiser_config(capability, d, rotated=rotate, transposed=transposed)
    options: dict[str, Any] = tile(config, d, BLOCK, rotated=rotate)
    num_warps = options.pop("num_warps")
    constants: dict[str, object] = {**options, "PADDED": transposed, "INTERLEAVED": interleaved, "WIDE": False}
    constants |= {} if rotate else {"signs": None}
    scalars = {"descale_b": "i32", "descale_h": "i32", "largest": "fp32"}
    if measures:
        constants["PADDED"] = False
        pointers["amax"] = "fp32"
        constants |= {"y": None, "descale": None, "descale_n": None}
    else:
        pointers |= {"y": {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}[target], "descale": "fp32"}
        constants |= {"amax": None, "descale_n": 1} if per == "block" else {"descale_n": None}
        pointers |= {} if per == "block" else {"amax": "fp32"}
    if transposed:
        constants["y_l"], scalars["y_d"] = 1, "i32:16"
    features = ((per, per != "block"), ("rotated", rotate), ("transposed", transposed), ("interleaved", interleaved))
    said = [word for word, on in features if on]
    made = specialise(
        "-".join(["fp8-quantise", source, target, f"d{d}", *said]), quantise_kernel, pointers, constants, scalars,
        num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    return _case(made, ())


QUANTISERS: tuple[tuple[str, str, int, Mapping[str, object]], ...] = (
    ("bf16", "e4m3", 128, {}),
    ("bf16", "e4m3", 256, {}),
    ("fp16", "e5m2", 80, {"per": "amax"}),
    ("bf16", "e4m3", 64, {"per": "given", "transposed": True}),
    ("bf16", "e4m3", 128, {"transposed": True}),
    ("fp16", "e5m2", 256, {"transposed": True, "interleaved": True}),
    ("bf16", "e4m3", 64, {"rotate": True}),
    ("bf16", "e4m3", 128, {"rotate": True}),
    ("bf16", "e4m3", 128, {"per": "amax", "rotate": True}),
    ("bf16", "e4m3", 256, {"rotate": True}),
)


def compile_cases(capability: int) -> list[Fp8Case]:
    """A representative set in the tiles of `capability`."""
    if capability < OLDEST:
        return []
    return [
        forward_case("e4m3", 64, causal=True, capability=capability),
        forward_case("e4m3", 128, capability=capability),
        forward_case("e4m3", 128, causal=True, transposed=True, capability=capability),
        forward_case("e4m3", 256, transposed=True, capability=capability),
        forward_case("e5m2", 64, capability=capability),
        forward_case("e4m3-e5m2", 128, transposed=True, capability=capability),
        *(
            quantiser_case(x, y, d, **options, capability=capability)  # type: ignore[arg-type]
            for x, y, d, options in QUANTISERS
        ),
    ]
