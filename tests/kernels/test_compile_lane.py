"""The compile lane: its own kernels, what it says of bad ones, and a cross-section of the reference kernels.

Compiling needs no GPU. `.ci/run` compiles every case for every architecture; here each architecture gets some.
"""

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from reference_kernels import compiling  # noqa: E402
from reference_kernels.compiling import ARCHITECTURES, Compiled, Dot, command, expected_family, violations, worker  # noqa: E402
from reference_kernels.hopper import backward as hopper_backward  # noqa: E402
from reference_kernels.hopper import cases as hopper_forward  # noqa: E402

#: Compiles in the cross-section of the reference kernels; about 1.5 s each on two cores.
CROSS_SECTION = 24


@dataclass(frozen=True)
class Case:
    """A case as the lane sees it, so that its own tests need no reference kernel."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr, stride_n, length, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """One head, no mask, no tails: as little of attention as has both products and the softmax between them."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * stride_n + dims[None, :])
    most = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, D], tl.float32)
    for start in range(0, length, BN):
        at = (start + columns)[:, None] * stride_n + dims[None, :]
        scores = tl.dot(q, tl.trans(tl.load(k_ptr + at)), input_precision="ieee") * scale
        new = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(q.dtype), tl.load(v_ptr + at), out * shrink[:, None], input_precision="ieee")
        most = new
    tl.store(o_ptr + rows[:, None] * stride_n + dims[None, :], (out / total[:, None]).to(q.dtype))


@triton.jit
def hoard(x_ptr, y_ptr, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Keep a tile alive across a loop; with few threads it does not fit into their registers."""
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    kept = tl.load(x_ptr + at)
    for step in range(steps):
        kept = kept * tl.load(x_ptr + at + step * 16) + tl.sum(kept)
    tl.store(y_ptr + at, kept)


@triton.jit
def misuse(x_ptr, BM: tl.constexpr):
    """Add tensors whose shapes do not broadcast."""
    tl.store(x_ptr + tl.arange(0, BM), tl.arange(0, BM) + tl.arange(0, 2 * BM))


@triton.constexpr_function
def _die():
    import os

    os.abort()


@triton.constexpr_function
def _dawdle():
    import time

    time.sleep(600)


@triton.jit
def fatal(x_ptr):
    """Take the compiler down while it compiles."""
    _die()


@triton.jit
def endless(x_ptr):
    """Never finish compiling."""
    _dawdle()


def attention(dtype: str = "bf16", bm: int = 64, bn: int = 64, d: int = 64, **options: int) -> Case:
    pointers = {f"{name}_ptr": f"*{dtype}" for name in "qkvo"}
    signature = pointers | {"stride_n": "i32:16", "length": "i32", "scale": "fp32"}
    return Case(f"attend_{dtype}_{bm}x{bn}x{d}", attend, signature, {"BM": bm, "BN": bn, "D": d}, **options)


HOARD = Case(
    "hoard",
    hoard,
    {"x_ptr": "*fp32", "y_ptr": "*fp32", "steps": "i32"},
    {"ROWS": 64, "COLUMNS": 256},
    num_warps=1,
)
MISUSE = Case("misuse", misuse, {"x_ptr": "*i32"}, {"BM": 16})
FATAL = Case("fatal", fatal, {"x_ptr": "*i32"})
ENDLESS = Case("endless", endless, {"x_ptr": "*i32"})
OVERSIZED = attention(bm=128, bn=128, d=128, num_warps=8, num_stages=3)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], Compiled]:
    """Every compile of the lane's own kernels, made together so that the compilers work side by side."""
    good = [attention(), attention("fp16", num_warps=8), attention("fp32", bm=32, bn=32), attention(bm=16)]
    good += [attention(bn=32, d=32, num_warps=2)]
    jobs = [(case, capability) for case in good[:1] for capability in ARCHITECTURES]
    jobs += [(case, capability) for case in good[1:] for capability in (90, 100)]
    jobs += [(HOARD, 90), (FATAL, 80), (OVERSIZED, 89), (OVERSIZED, 90), (MISUSE, 120)]
    return {(result.name, result.capability): result for result in compiling.compile_all(jobs)}


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_an_attention_kernel_compiles_for_every_architecture(compiled, capability):
    result = compiled["attend_bf16_64x64x64", capability]
    assert violations(result) == []
    assert result.triton == triton.__version__
    assert 0 < result.registers <= 255
    assert result.dots == (Dot(64, 64, 64, "bf16", "ieee"),)
    assert result.counts[ARCHITECTURES[capability].family] > 0
    assert result.counts["cp.async"] > 0, "the loads of K and V are not asynchronous: is the alignment passed on?"


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("attend_fp16_64x64x64", ""),
        ("attend_fp32_32x32x64", "fma"),
        ("attend_bf16_16x64x64", "mma.sync"),
        ("attend_bf16_64x32x32", "mma.sync"),
    ],
)
def test_the_family_of_a_product_depends_on_its_shape_and_precision(compiled, capability, name, family):
    result = compiled[name, capability]
    assert violations(result) == []
    (found,) = {expected_family(dot, capability, result.num_warps)[0] for dot in result.dots}
    assert found == (family or ARCHITECTURES[capability].family)


def test_a_kernel_that_spills_is_one_sentence(compiled):
    result = compiled["hoard", 90]
    (sentence,) = violations(result)
    assert sentence.startswith(f"hoard for sm_90 spills {result.spills:,} bytes a thread, ")
    assert f"{result.local_in_loops} accesses of them inside loops; its budget is 0." in sentence
    assert violations(result, {("hoard", 90): (result.spills, "it is meant to spill")}) == []
    assert violations(result, {("hoard", 90): (result.spills - 1, "one byte short")}) != []


def test_a_kernel_that_exceeds_shared_memory_is_one_sentence(compiled):
    small, large = compiled["attend_bf16_128x128x128", 89], compiled["attend_bf16_128x128x128", 90]
    assert any("bytes of shared memory, and a block has 101,376." in sentence for sentence in violations(small))
    assert not any("shared memory" in sentence for sentence in violations(large)), "an H100 has room for it"


def test_a_kernel_that_does_not_compile_is_one_sentence(compiled):
    (sentence,) = violations(compiled["misuse", 120])
    assert sentence.startswith("misuse for sm_120: it does not compile: ")
    assert "\n" not in sentence
    assert "32" in sentence, "the sentence names the shapes"


def test_a_compiler_that_dies_costs_one_result(compiled):
    (sentence,) = violations(compiled["fatal", 80])
    assert sentence == "fatal for sm_80: the compiler was killed by SIGABRT."
    assert sum(bool(result.fault) for result in compiled.values()) == 2, "only `fatal` and `misuse` have no result"


def test_a_compile_that_does_not_end_is_one_sentence():
    (result,) = compiling.compile_all([(ENDLESS, 80)], time_limit=8)
    assert violations(result) == ["endless for sm_80: the compiler took longer than 8 s."]


def test_a_wrong_family_is_named_with_its_reason():
    dot = Dot(64, 64, 64, "f16", "ieee")
    result = Compiled("made_up", 90, num_warps=4, counts={"mma.sync": 16}, dots=(dot,))
    assert violations(result) == [
        "made_up for sm_90 has 16 mma.sync instructions, where its products should become wgmma.",
        "made_up for sm_90 has no wgmma instruction, expected for 64×64×64 f16: the matrix instruction of H100, H200.",
    ]


def test_ptxas_complaints_are_read_from_its_log():
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x\n"
        "ptxas /tmp/a.ptx, line 7; warning : setmaxnreg ignored to maintain minimum register requirements.\n"
        "ptxas info    : Used 168 registers\n"
    )
    assert worker.ptxas_warnings(log) == [
        "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x",
        "setmaxnreg ignored to maintain minimum register requirements.",
    ]


def test_only_local_accesses_between_a_label_and_its_branch_are_inside_a_loop():
    sass = """
        /*0000*/ STL [R1], R2 ;
.L_x_1:
        /*0010*/ LDL R3, [R1] ;
        /*0020*/ @P0 BRA `(.L_x_2) ;
        /*0030*/ STL [R1+0x4], R3 ;
.L_x_2:
        /*0040*/ @P1 BRA `(.L_x_1) ;
        /*0050*/ LDL R3, [R1] ;
.L_x_3:
        /*0060*/ BRA `(.L_x_3) ;
"""
    assert worker.local_in_loops(sass) == 2


def test_the_dispatch_of_warp_groups_and_the_retries_of_barriers_are_no_loops():
    sass = """
.L_x_1:
        /*0000*/ STL [R1], R2 ;
.L_x_2:
        /*0010*/ LDL R3, [R1] ;
        /*0020*/ @P0 BRA `(.L_x_2) ;
        /*0030*/ USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0040*/ LDL R3, [R1] ;
        /*0050*/ BRA `(.L_x_1) ;
"""
    assert worker.local_in_loops(sass) == 1


def test_a_kernel_inside_a_function_is_refused():
    @triton.jit
    def hidden(x_ptr):
        pass

    with pytest.raises(ValueError, match="must be at the top level of a module"):
        compiling.compile_case(Case("hidden", hidden, {"x_ptr": "*i32"}), 80)


def test_an_unknown_capability_is_refused():
    with pytest.raises(ValueError, match=r"compute capability 75 is not one the lane knows \(80, 89"):
        compiling.compile_case(MISUSE, 75)


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_the_shared_memory_limits_are_those_of_ptxas(capability, tmp_path):
    """The assembler knows an architecture's limit; up to release 12 it names the 48 KiB of static memory instead."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    release = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 12." in release:
        pytest.skip("this Triton's ptxas does not name the limit")
    source = tmp_path / "k.ptx"
    source.write_text(
        f".version 8.7\n.target sm_{capability}a\n.address_size 64\n.visible .entry k() {{\n"
        ".shared .align 16 .b8 s[300000];\n.reg .u64 r;\nmov.u64 r, s;\nst.shared.u64 [r], r;\nret;\n}\n"
    )
    command = [ptxas, f"--gpu-name=sm_{capability}a", source, "-o", tmp_path / "k.cubin"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert f"{ARCHITECTURES[capability].shared_limit:#x} max" in said


def test_the_command_teaches_and_refuses():
    command = [sys.executable, "-m", "reference_kernels.compiling"]
    text = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "exit status" in text
    assert all(architecture.gpus in text for architecture in ARCHITECTURES.values())
    wrong = subprocess.run([*command, "--kernel", "no_such_kernel"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "No compile case fits --kernel no_such_kernel." in wrong.stderr


def test_the_command_prints_a_table_and_a_sentence_for_each_violation(monkeypatch, capsys, tmp_path):
    cases = [("own", attention(), 80), ("own", MISUSE, 80)]
    monkeypatch.setattr(
        command, "find_cases", lambda capabilities: (cases, ["later has no compile cases: ImportError: x."])
    )
    path = tmp_path / "lane.json"
    assert compiling.main(["--capability", "80", "--kernel", "own", "--json", str(path)]) == 1
    out, progress = capsys.readouterr()
    assert f"Triton {triton.__version__}" in out
    assert [line.split()[:2] for line in out.splitlines() if " 80 " in line] == [
        ["attend_bf16_64x64x64", "80"],
        ["misuse", "80"],
    ]
    *_, broken, failed = out.splitlines()
    assert broken == "later has no compile cases: ImportError: x."
    assert failed.startswith("misuse for sm_80: it does not compile: ")
    assert "[2/2]" in progress
    assert [row["name"] for row in json.loads(path.read_text())] == ["attend_bf16_64x64x64", "misuse"]


def test_cases_for_when_they_are_named_are_left_out_otherwise(capsys):
    listed = []
    for words in ([], ["--kernel", "hopper"]):
        assert compiling.main(["--capability", "90", "--list", *words]) == 0
        listed.append({line for line in capsys.readouterr().out.splitlines() if line.startswith("hopper.")})
    always = hopper_forward.ALWAYS | hopper_backward.ALWAYS
    assert {line.rpartition(" ")[2] for line in listed[0]} >= always
    assert {line.rpartition(" ")[2] for line in listed[1] - listed[0]} & always == set()
    assert len(listed[0]) < len(listed[1])


def test_the_hopper_backward_is_compiled_with_every_value_of_every_constant():
    """Of those that `backward` launches with: causal or not, lengths even or not, groups of query heads or not."""
    launched: dict[tuple[str, int, str], set[Any]] = {}
    asked: dict[tuple[str, int, str], set[Any]] = {}
    for kernel, d in itertools.product(("onepass", "dkv", "dq"), hopper_backward.HEAD_DIMS):
        if (kernel, d) == ("onepass", 256):
            continue
        for causal, ragged, group in itertools.product((False, True), (False, True), (1, 8)):
            case = hopper_backward.compile_case(kernel, "bf16", d, causal=causal, ragged=ragged, group=group)
            for name, value in case.constexprs.items():
                launched.setdefault((case.kernel.__name__, d, name), set()).add(value)
    for case in hopper_backward.compile_cases(90):
        for name, value in case.constexprs.items():
            asked.setdefault((case.kernel.__name__, case.constexprs["D"], name), set()).add(value)
    assert asked == launched


def test_a_cross_section_of_the_reference_kernels_keeps_every_limit():
    found, broken = compiling.find_cases()
    assert broken == []
    # Cases in the order of their names, so that a stride prime to the number of architectures meets all of these.
    jobs = [(case, c) for _, case, c in found if not getattr(case, "only_named", False)]
    jobs.sort(key=lambda job: (job[0].name, job[1]))
    stride = max(1, -(-len(jobs) // CROSS_SECTION))
    stride += stride % len(ARCHITECTURES) == 0
    results = compiling.compile_all(jobs[::stride])
    assert [sentence for result in results for sentence in violations(result)] == []
