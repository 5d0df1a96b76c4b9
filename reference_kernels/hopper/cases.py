"""What the compile lane compiles of the Hopper kernels, with the instructions that each must consist of."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from triton.experimental.gluon import language as gl

from ..cases import CompileCase
from . import stage1, stage2, stage3
from .configs import TABLE, Config
from .kernel import forward_kernel
from .launch import constants
from .stages import Stage
from .work import few_columns


@dataclass(frozen=True)
class HopperCase(CompileCase):
    """A case of a kernel that names its instructions itself. capabilities: it compiles for no other.

    specialised: its warps have different work to do. only_named: the lane compiles it when --kernel names it, and
    otherwise goes without.
    """

    instructions: tuple[str, ...] = ("wgmma", "tma")
    capabilities: tuple[int, ...] = (90,)
    specialised: bool = True
    only_named: bool = False


# Of the forward each tile, form and mask once.
ALWAYS = {
    "hopper-forward-fp16-d64-192x128-dense-online",
    "hopper-forward-bf16-d64-128x128-causal-freeze",
    "hopper-forward-bf16-d128-128x128-causal-online",
    "hopper-forward-bf16-d128-128x128-causal-freeze-short16",
    "hopper-forward-bf16-d256-128x64-dense-freeze-tail",
    "hopper-forward-bf16-d256-128x64-dense-freeze-rowless-short16",
}


def sampled(cases: Iterable[HopperCase], always: Set[str]) -> list[HopperCase]:
    """The cases, each once, those whose name is not in `always` only when named."""
    return [replace(case, only_named=case.name not in always) for case in {c.name: c for c in cases}.values()]


def descriptor_type(dtype: str, rows: int, d: int) -> str:
    """Triton's name for a descriptor of blocks of `rows` rows of (B, H, L, D)."""
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    return f"tensordesc<{dtype}[1, 1, {rows}, {d}],{gl.NVMMASharedLayout.get_default_for([1, 1, rows, d], element)!r}>"


def forward_case(
    dtype: str, d: int, config: Config, *, causal: bool = False, freeze: bool = False, lq: int = 768, lk: int = 768
) -> HopperCase:
    """The kernel for one dtype ("bf16"), head dimension and tile. lq, lk: what is ragged in them decides the code."""
    fixed = constants(d, config, causal=causal, freeze=freeze, lq=lq, lk=lk)
    short = fixed["SHORT"]
    few = few_columns(short, config.block_n)
    signature = dict.fromkeys("qo", descriptor_type(dtype, 64, d))
    signature |= dict.fromkeys("kv", descriptor_type(dtype, config.block_n, d))
    signature |= dict.fromkeys(("k_few", "v_few"), descriptor_type(dtype, few, d) if few else "constexpr")
    signature |= {"lse": "*fp32", "outgrown": "*i32", "tiles": "*i64", "starts": "*i32", "scale": "fp32"}
    signature |= dict.fromkeys(("heads", "Lq", "Lk"), "i32") | {"o_rows": f"*{dtype}"}
    signature |= dict.fromkeys(fixed, "constexpr")
    fixed |= {} if few else {"k_few": None, "v_few": None}
    said = [f"{config.block_m}x{config.block_n}", "causal" if causal else "dense", "freeze" if freeze else "online"]
    words = (("tail", "TAIL"), ("diagonals", "DIAGONALS"), ("rowless", "ROWLESS"))
    said += [word for word, constant in words if fixed[constant]]
    said += [f"short{short}"] if short else []
    name = "-".join(["hopper-forward", dtype, f"d{d}", *said])
    return HopperCase(name, forward_kernel, signature, fixed, num_warps=4, num_stages=1)


def stage_case(stage: Stage, dtype: str, d: int, *, causal: bool) -> HopperCase:
    """One of the three stages for one dtype ("bf16") and head dimension."""
    signature = dict.fromkeys("qo", descriptor_type(dtype, stage.q_rows, d))
    signature |= dict.fromkeys("kv", descriptor_type(dtype, stage.block_n, d))
    signature |= {"lse": "*fp32", "scale": "fp32"} | dict.fromkeys(("heads", "group", "Lq", "Lk"), "i32")
    signature |= dict.fromkeys(("D", "CAUSAL"), "constexpr")
    name = f"hopper-{stage.name}-{dtype}-d{d}-{'causal' if causal else 'dense'}"
    fixed = {"D": d, "CAUSAL": causal}
    return HopperCase(
        name, stage.kernel, signature, fixed, stage.num_warps, num_stages=1, specialised=stage is not stage1.STAGE
    )


def compile_cases(capability: int) -> list[HopperCase]:
    """Every tile of the table in both forms, causal and not, and what ragged lengths add; the stages. For 90 alone."""
    if capability != 90:
        return []
    cases = []
    for stage in (stage1.STAGE, stage2.STAGE, stage3.STAGE):
        cases += [stage_case(stage, "fp16", 64, causal=False), stage_case(stage, "bf16", 128, causal=True)]
    for d, by_mask in TABLE.items():
        for config in dict.fromkeys(config for rules in by_mask.values() for _, config in rules):
            cases += [
                forward_case("fp16", d, config),
                forward_case("fp16", d, config, lq=769, lk=769),
                forward_case("bf16", d, config, freeze=True, lq=769, lk=800),
                forward_case("bf16", d, config, freeze=True, lq=1),
                forward_case("bf16", d, config, freeze=True, lq=769, lk=769),
                forward_case("bf16", d, config, freeze=True, lk=1000),
                forward_case("bf16", d, config, freeze=True, lq=1, lk=1000),
                forward_case("bf16", d, config, causal=True),
                forward_case("fp16", d, config, causal=True, lq=769, lk=769),
                forward_case("bf16", d, config, causal=True, freeze=True),
                forward_case("bf16", d, config, causal=True, freeze=True, lq=769, lk=769),
                forward_case("bf16", d, config, causal=True, freeze=True, lq=800, lk=800),
                forward_case("bf16", d, config, causal=True, freeze=True, lk=1000),
            ]
    return sampled(cases, ALWAYS)
