"""What the lane expects of each architecture, as data with its reasons, and what it says where that is not so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .results import Compiled, Dot

KIB = 1024

#: Tensor memory of one block, in 32-bit columns (PTX ISA, "Tensor Memory": 512 columns × 128 lanes per CTA).
TENSOR_MEMORY_COLUMNS = 512

#: The PTX instructions that are matrix products, as `Compiled.counts` names them.
MATRIX_FAMILIES: tuple[str, ...] = ("mma.sync", "wgmma", "tcgen05")


@dataclass(frozen=True)
class Architecture:
    """What the lane expects of one compute capability.

    `shared_limit` is what one block may use, in bytes. `family` is the matrix instruction of a large 16-bit product.
    """

    capability: int
    gpus: str
    shared_limit: int
    family: str
    source: str


_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"
_PTXAS = f"{_GUIDE}; ptxas 13.4 (Triton 3.9.0) names the same limit when a kernel exceeds it"

ARCHITECTURES: dict[int, Architecture] = {
    a.capability: a
    for a in (
        Architecture(80, "A100", 163 * KIB, "mma.sync", _GUIDE),
        Architecture(89, "L4, L40S, RTX 40", 99 * KIB, "mma.sync", _GUIDE),
        Architecture(90, "H100, H200", 227 * KIB, "wgmma", _PTXAS),
        Architecture(100, "B200", 227 * KIB, "tcgen05", _PTXAS),
        Architecture(120, "RTX 50, RTX PRO 6000", 99 * KIB, "mma.sync", _PTXAS),
    )
}


@dataclass(frozen=True)
class FamilyRule:
    """Where Triton leaves an architecture's own matrix instruction: `applies(dot, num_warps)` → `family`, and why.

    `family` is `"fma"` for products that use no matrix instruction.
    """

    capabilities: tuple[int, ...]
    applies: Callable[[Dot, int], bool]
    family: str
    reason: str


#: The first rule that applies decides; otherwise `Architecture.family`. Found by compiling one matrix product over
#: M, N, num_warps, dtype and precision; Triton 3.6.0 and 3.9.0 agree in every cell. A test repeats the corners.
FAMILY_RULES: tuple[FamilyRule, ...] = (
    FamilyRule(
        (80, 89, 90, 100, 120),
        lambda dot, num_warps: dot.dtype == "f32" and dot.precision == "ieee",
        "fma",
        "no tensor core multiplies fp32 exactly: input_precision='ieee' runs on the ordinary cores",
    ),
    FamilyRule(
        (90, 100),
        lambda dot, num_warps: num_warps % 4 != 0,
        "mma.sync",
        "wgmma and tcgen05 are issued for a warp group of four warps",
    ),
    FamilyRule(
        (90, 100),
        lambda dot, num_warps: dot.m < 64,
        "mma.sync",
        "wgmma and tcgen05 multiply at least 64 rows; Triton does not pad smaller tiles up to them",
    ),
)

#: (case name, capability) → bytes of spill stores and loads: the larger of what Triton 3.6.0 and 3.9.0 make of the
#: kernel (2026-11-30). A ceiling that may only fall: tiles were chosen without a GPU, and whoever tunes them lowers it.
_UNTUNED: dict[tuple[str, int], int] = {
    ("backward_kv-bf16-d64", 120): 32,
    ("backward_kv-bf16-d64-features", 80): 904,
    ("backward_kv-bf16-d64-features", 89): 620,
    ("backward_kv-bf16-d64-features", 100): 1052,
    ("backward_kv-bf16-d64-features", 120): 436,
    ("backward_kv-fp16-d128-causal", 80): 124,
    ("backward_kv-fp16-d128-causal", 100): 16,
    ("backward_q-bf16-d64-features", 80): 12,
    ("backward_q-bf16-d64-features", 89): 12,
    ("backward_q-bf16-d64-features", 120): 172,
    ("backward_q-fp16-d128-causal", 100): 48,
    ("forward-bf16-d128-causal", 89): 36,
    ("forward-bf16-d128-causal", 100): 24,
    ("forward-bf16-d128-causal", 120): 44,
    ("forward-bf16-d256", 80): 64,
    ("forward-bf16-d256", 89): 48,
    ("forward-bf16-d256", 100): 64,
    ("forward-bf16-d256", 120): 160,
    ("forward-bf16-d64", 80): 36,
    ("forward-bf16-d64", 120): 136,
    ("forward-fp16-d128", 89): 24,
    ("forward-fp16-d128", 120): 16,
    ("forward-fp16-d128-features", 89): 12,
    ("forward-fp16-d128-features", 120): 172,
    ("forward-fp16-d64-causal-window", 80): 36,
    ("forward-fp16-d64-causal-window", 89): 104,
    ("forward-fp16-d64-causal-window", 120): 300,
}

#: The same where tiles were chosen by time, on an H200: those that spill less were slower.
_MEASURED: dict[tuple[str, int], int] = {
    ("backward_kv-bf16-d256", 90): 1004,
    ("backward_kv-fp16-d128-causal", 90): 380,
    ("backward_kv-bf16-d64-features", 90): 860,
    ("backward_q-fp16-d128-causal", 90): 16,
}

#: The loop order of FlashAttention-1 and the atomic backward, kept to be compared with, not to be fast.
_COMPARED: dict[tuple[str, int], int] = {
    ("backward_atomic-bf16-d64-causal", 80): 76,
    ("backward_atomic-fp16-d128", 80): 356,
    ("backward_atomic-fp16-d128", 90): 44,
    ("forward_v1-fp16-d128", 90): 296,
}

#: The Hopper forward with a frozen maximum, whose second walk doubles the code: 3.9.0. Under 3.6.0 it spills 20 bytes
#: in the first, and nothing in the others.
_OUTSIDE: dict[tuple[str, int], int] = {
    ("hopper-forward-bf16-d64-192x128-dense-freeze-tail", 90): 20,
    ("hopper-forward-bf16-d256-128x64-dense-freeze-rowless", 90): 404,
    ("hopper-forward-bf16-d256-128x64-dense-freeze-rowless-short16", 90): 392,
    ("hopper-forward-bf16-d256-128x64-dense-freeze-tail", 90): 284,
    ("hopper-forward-bf16-d256-128x64-dense-freeze-tail-rowless", 90): 412,
    ("hopper-forward-bf16-d256-128x64-causal-freeze-diagonals", 90): 304,
    ("hopper-forward-bf16-d256-128x64-causal-freeze-diagonals-short16", 90): 484,
}

#: The Hopper backward: dK and dV of a tile, or dQ at D = 256, leave too few of 240 registers. What Triton 3.9.0 makes
#: of it, but for the first. Under 3.6.0, with which docs/kernels.md was measured, it is at most a third, and at D = 256
#: nothing but 260 bytes in the last. Accesses inside loops, 3.6.0 and 3.9.0, in this order: onepass none in the first
#: two, then 0 and 45, 1 and 46, 65 and 188, 11 and 71; dkv 0 and 1, 0 and 1, 6 and 59, 0 and 9, none in the last two;
#: dq 0 and 36, 0 and 33, 0 and 36, 13 and 122.
_BACKWARD: dict[tuple[str, int], int] = {
    ("hopper-onepass-fp16-d64-ragged", 90): 16,
    ("hopper-onepass-bf16-d64-causal-ragged-grouped", 90): 88,
    ("hopper-onepass-bf16-d128", 90): 1052,
    ("hopper-onepass-bf16-d128-causal", 90): 1176,
    ("hopper-onepass-bf16-d128-causal-ragged-grouped", 90): 2072,
    ("hopper-onepass-fp16-d128-ragged", 90): 1304,
    ("hopper-dkv-bf16-d128", 90): 44,
    ("hopper-dkv-bf16-d128-causal", 90): 96,
    ("hopper-dkv-bf16-d128-causal-ragged-grouped", 90): 564,
    ("hopper-dkv-fp16-d128-ragged", 90): 156,
    ("hopper-dkv-bf16-d256-causal", 90): 16,
    ("hopper-dkv-bf16-d256-causal-ragged-grouped", 90): 76,
    ("hopper-dq-bf16-d256", 90): 616,
    ("hopper-dq-bf16-d256-causal", 90): 904,
    ("hopper-dq-fp16-d256-ragged", 90): 616,
    ("hopper-dq-bf16-d256-causal-ragged-grouped", 90): 1568,
}

#: Plain FP8 kernels: one forward, by Triton 3.6.0 alone.
_FP8: dict[tuple[str, int], int] = {
    ("fp8-forward-e4m3-d128-causal-transposed", 90): 16,
}

#: The Hopper FP8 forward at D = 256: what Triton 3.9.0 makes of it. Under 3.6.0 three of them spill 40 to 64 bytes.
_FP8_HOPPER: dict[tuple[str, int], int] = {
    ("fp8-hopper-d256-128x128-dense", 90): 52,
    ("fp8-hopper-d256-128x128-dense-blocks", 90): 116,
    ("fp8-hopper-d256-128x128-dense-blocks-tail", 90): 152,
    ("fp8-hopper-d256-128x128-dense-blocks-interleaved", 90): 48,
    ("fp8-hopper-d256-128x128-dense-blocks-interleaved-tail", 90): 76,
    ("fp8-hopper-d256-128x128-causal-blocks", 90): 60,
    ("fp8-hopper-d256-128x128-causal-blocks-diagonals", 90): 136,
    ("fp8-hopper-d256-128x128-causal-blocks-interleaved", 90): 16,
    ("fp8-hopper-d256-128x128-causal-blocks-interleaved-diagonals", 90): 56,
}

#: (case name, capability) → (bytes that are accepted, reason). Nothing else may spill.
SPILL_BUDGETS: dict[tuple[str, int], tuple[int, str]] = {
    key: (spills, reason)
    for table, reason in (
        (_UNTUNED, "as compiled by Triton 3.6.0 and 3.9.0, before tuning on a GPU"),
        (_MEASURED, "the fastest tiles of measurements/h200/tune.json; with scores' terms, their half"),
        (_COMPARED, "as compiled by Triton 3.6.0 and 3.9.0; of the tiles tried, those that spill little"),
        (_OUTSIDE, "scalars of a tile, as compiled by Triton 3.9.0; no loop over keys loads or stores them"),
        (_BACKWARD, "the accumulators of a backward tile, as compiled by Triton 3.9.0; not timed with it"),
        (_FP8, "as compiled by Triton 3.6.0, before tuning on a GPU"),
        (_FP8_HOPPER, "the accumulators of a tile, as compiled by Triton 3.9.0; not timed with it"),
    )
    for key, spills in table.items()
}


def expected_family(dot: Dot, capability: int, num_warps: int) -> tuple[str, str]:
    """Say which instruction family a product becomes, and why. KeyError for a capability not in `ARCHITECTURES`."""
    architecture = ARCHITECTURES[capability]
    for rule in FAMILY_RULES:
        if capability in rule.capabilities and rule.applies(dot, num_warps):
            return rule.family, rule.reason
    return architecture.family, f"the matrix instruction of {architecture.gpus}"


def violations(compiled: Compiled, spill_budgets: Mapping[tuple[str, int], tuple[int, str]] | None = None) -> list[str]:
    """Say what is wrong with a result, one sentence each; an empty list if every limit is kept.

    A kernel written in Gluon has no `tl.dot` to look up: its case names the instructions that must be there.
    `spill_budgets` replaces `SPILL_BUDGETS`.
    """
    where = f"{compiled.name} for sm_{compiled.capability}"
    if compiled.fault:
        return [f"{where}: {compiled.fault}"]
    architecture = ARCHITECTURES[compiled.capability]
    said = []
    if compiled.shared > architecture.shared_limit:
        said.append(
            f"{where} needs {compiled.shared:,} bytes of shared memory, and a block has {architecture.shared_limit:,}."
        )
    if compiled.tensor_memory > TENSOR_MEMORY_COLUMNS:
        said.append(
            f"{where} needs {compiled.tensor_memory} columns of tensor memory, and a block has {TENSOR_MEMORY_COLUMNS}."
        )
    budgets = SPILL_BUDGETS if spill_budgets is None else spill_budgets
    budget, _ = budgets.get((compiled.name, compiled.capability), (0, ""))
    if compiled.spills > budget:
        inside = f", {compiled.local_in_loops} accesses of them inside loops" if compiled.local_in_loops else ""
        said.append(f"{where} spills {compiled.spills:,} bytes a thread{inside}; its budget is {budget:,}.")
    said += [f"{where} has no {name} instruction." for name in compiled.instructions if not compiled.counts.get(name)]
    if compiled.specialised and not compiled.partitions:
        said.append(f"{where} is not warp-specialised: its TTGIR has no ttg.warp_specialize.")
    if compiled.dots:
        said += _wrong_families(where, compiled)
    said += [f"{where}: ptxas warns: {warning}" for warning in compiled.warnings]
    return said


def _wrong_families(where: str, compiled: Compiled) -> list[str]:
    expected: dict[str, tuple[Dot, str]] = {}
    for dot in compiled.dots:
        family, reason = expected_family(dot, compiled.capability, compiled.num_warps)
        expected.setdefault(family, (dot, reason))
    said = []
    for family in MATRIX_FAMILIES:
        found = compiled.counts.get(family, 0)
        if family in expected and not found:
            dot, reason = expected[family]
            said.append(f"{where} has no {family} instruction, expected for {dot}: {reason}.")
        if family not in expected and found:
            wanted = " and ".join(sorted(expected))
            said.append(f"{where} has {found} {family} instructions, where its products should become {wanted}.")
    return said
