"""What the compile lane compiles of the Hopper FP8 forward, with the instructions that it must consist of."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from ...hopper.cases import HopperCase, sampled
from .configs import TABLE, Fp8Config
from .kernel import forward_kernel
from .launch import fixed

INSTRUCTIONS = ("wgmma e4m3", "tma")

# Of each tile one, and what masks add once.
ALWAYS = {
    "fp8-hopper-d64-192x128-dense-blocks",
    "fp8-hopper-d128-128x128-causal",
    "fp8-hopper-d128-128x128-causal-blocks-diagonals",
    "fp8-hopper-d128-128x128-dense-ahead-blocks-interleaved",
    "fp8-hopper-d256-128x128-dense-blocks-tail",
    "fp8-hopper-d256-128x128-causal-blocks",
}


def descriptor_type(dtype: str, rows: int, columns: int) -> str:
    """Triton's name for a descriptor of blocks of `rows` by `columns` of a tensor of four dimensions."""
    element = {"fp8e4nv": gl.float8e4nv, "bf16": gl.bfloat16}[dtype]
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)
    return f"tensordesc<{dtype}[1, 1, {rows}, {columns}],{layout!r}>"


def forward_case(
    d: int,
    config: Fp8Config,
    *,
    causal: bool = False,
    blocks: bool = False,
    interleaved: bool = False,
    lq: int = 768,
    lk: int = 768,
) -> HopperCase:
    """The kernel for one head dimension and tile. blocks: V's scales are by block; interleaved: its keys are. lq, lk:
    whether they make tails.

    An integer that a launch may specialise is a constant here, as it is there where its value is 1.
    """
    constants = fixed(d, config, causal=causal, lq=lq, lk=lk, by_blocks=blocks, interleaved=interleaved)
    types = {
        "q": descriptor_type("fp8e4nv", 64, d), "k": descriptor_type("fp8e4nv", config.block_n, d),
        "v": descriptor_type("fp8e4nv", d, config.block_n), "o": descriptor_type("bf16", 64, d),
        "lse": "*fp32", "tiles": "*i64", "starts": "*i32", "scale": "fp32",
    } | dict.fromkeys(("qs", "ks", "vs", "top"), "*fp32")  # fmt: skip
    plain = [p for p in forward_kernel.params if p.name not in constants and p.name not in types]
    ones = {p.name: 1 for p in plain if not p.do_not_specialize}
    signature = {
        name: "constexpr" if name in constants or name in ones else types.get(name, "i32")
        for name in forward_kernel.arg_names
    }
    said = [f"{config.block_m}x{config.block_n}", "causal" if causal else "dense"]
    said += [word for word, on in (("ahead", config.ahead), ("blocks", blocks), ("interleaved", interleaved)) if on]
    said += [word for word, constant in (("tail", "TAIL"), ("diagonals", "DIAGONALS")) if constants[constant]]
    name = "-".join(["fp8-hopper", f"d{d}", *said])
    return HopperCase(
        name, forward_kernel, signature, constants | ones, num_warps=4, num_stages=1, instructions=INSTRUCTIONS
    )


def compile_cases(capability: int) -> list[HopperCase]:
    """Every tile, causal and not, scales by block and by tensor, V in either order, what tails add. For 90 alone."""
    if capability != 90:
        return []
    cases = []
    for d, by_mask in TABLE.items():
        for causal, config in by_mask.items():
            cases += [
                forward_case(d, config, causal=causal),
                forward_case(d, config, causal=causal, blocks=True),
                forward_case(d, config, causal=causal, blocks=True, lk=1000),
                forward_case(d, config, causal=causal, blocks=True, interleaved=True),
                forward_case(d, config, causal=causal, blocks=True, interleaved=True, lk=1000),
            ]
    # With a diagonal that always takes more than one block, other lengths are no other kernel.
    return sampled(list({case.name: case for case in cases}.values()), ALWAYS)
