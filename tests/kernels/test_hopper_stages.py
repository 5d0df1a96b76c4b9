"""The three stages of the Hopper forward as far as no GPU is needed: compiles, refusals, what a launch binds."""

import contextlib
import math
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from triton import runtime
from triton.backends.compiler import GPUTarget

from reference_kernels import compiling
from reference_kernels.hopper import cases, stage1, stage2, stage3, stages

STAGES = [stage1.STAGE, stage2.STAGE, stage3.STAGE]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _tensor(heads: int, length: int, d: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(1, heads, length, d, dtype=dtype)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_compiles_to_wgmma_and_tma_without_spills(stage):
    for case in cases.compile_cases(90):
        if case.kernel is stage.kernel:
            result = compiling.compile_case(case, 90)
            assert compiling.violations(result, spill_budgets={}) == []
            assert result.counts["wgmma"] > 0
            assert result.counts["tma"] > 0
            assert result.local_in_loops == 0


# In a process of its own: a compiler prints what it likes when its process ends.
_MACHINE_CODE = """
import sys
from reference_kernels.compiling import worker
from reference_kernels.hopper import cases, stage1, stage2, stage3
stage = {"stage1": stage1, "stage2": stage2, "stage3": stage3}[sys.argv[1]].STAGE
case = cases.stage_case(stage, "bf16", 128, causal=True)
built, _ = worker._build(case.kernel, case.signature, case.constexprs, case.num_warps, case.num_stages, 90)
print(worker._disassemble(built.asm["cubin"]))
"""


def _exponentials_between_waits(stage) -> list[int]:
    """For each place of the machine code that waits until all but the youngest product are done: how many exponentials
    it computes before it waits for that one."""
    done = subprocess.run([sys.executable, "-c", _MACHINE_CODE, stage.name], capture_output=True, text=True, check=True)
    found, passed = [], None
    for line in done.stdout.splitlines():
        if wait := re.search(r"WARPGROUP\.DEPBAR\S* gsb0, 0x([01])", line):
            if wait[1] == "0" and passed is not None:
                found.append(passed)
            passed = 0 if wait[1] == "1" else None
        elif passed is not None and "MUFU.EX2" in line:
            passed += 1
    return found


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_only_in_stage_3_the_softmax_runs_under_a_product(stage):
    """Each of a thread's 64 exponentials of a block, in both consumers, between the wait for S and that for P V."""
    found = _exponentials_between_waits(stage)
    assert len(found) == (2 if stage is stage3.STAGE else 0)
    assert all(count >= 64 for count in found)


def test_every_stage_is_in_the_lane_for_both_head_dims_and_masks():
    names = [case.name for case in cases.compile_cases(90) if "stage" in case.name]
    assert sorted(names) == sorted(
        f"hopper-stage{n}-{rest}" for n in (1, 2, 3) for rest in ("fp16-d64-dense", "bf16-d128-causal")
    )


class _Recorder:
    """Stands in for Triton's driver: knows a target, and launches nothing."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return "none"

    def get_current_stream(self, device):
        return 0


def _launched(stage, monkeypatch, *tensors, **options):
    """What a call of a stage would have Triton compile and launch: types, constants, num_warps, the grid, arguments."""
    found = {}

    def compile_nothing(key, signature, device, constexprs, options, attrs, warmup):
        constants = {stage.kernel.arg_names[index]: value for (index,), value in constexprs.items()}
        found.update(signature=signature, constants=constants, num_warps=options.num_warps)

    run = stage.kernel.run

    def noting(*args, grid, **rest):
        found.update(grid=grid, arguments=dict(zip(stage.kernel.arg_names, args, strict=False)))
        return run(*args, grid=grid, **rest)

    monkeypatch.setattr(runtime.driver, "_active", _Recorder())
    monkeypatch.setattr(stage.kernel, "_do_compile", compile_nothing)
    monkeypatch.setattr(stage.kernel, "run", noting)
    monkeypatch.setattr(stages, "supports", lambda *args, **rest: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    stages.attention(stage, *tensors, **options)
    return found


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
@pytest.mark.parametrize(("dtype", "d", "causal"), [("fp16", 64, False), ("bf16", 128, True)])
def test_what_is_launched_is_what_the_lane_compiles(stage, dtype, d, causal, monkeypatch):
    q, k = _tensor(6, 512, d, DTYPES[dtype]), _tensor(2, 640, d, DTYPES[dtype])
    found = _launched(stage, monkeypatch, q, k, k.clone(), causal=causal)
    case = cases.stage_case(stage, dtype, d, causal=causal)
    assert found["signature"] == case.signature
    assert found["constants"] == case.constexprs
    assert found["num_warps"] == case.num_warps
    assert found["grid"] == (6 * 512 // stage.block_m,)
    given = found["arguments"]
    assert given.pop("scale") == pytest.approx(d**-0.5 / math.log(2))
    assert {name: given[name] for name in ("heads", "group", "Lq", "Lk")} == {
        "heads": 6, "group": 3, "Lq": 512, "Lk": 640
    }  # fmt: skip
    assert [list(given[name].shape) for name in "qkvo"] == [list(x.shape) for x in (q, k, k, q)]
    assert given["lse"].shape == (1, 6, 512)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_lengths_of_a_stage_are_multiples_of_its_tile(stage):
    good = _tensor(2, 2 * stage.block_m), _tensor(2, 3 * stage.block_n)
    assert "compute capability" in stages.refusal(stage, good[0], good[1], good[1])  # nothing else is wrong with it
    for q, k in ((_tensor(2, 2 * stage.block_m - 1), good[1]), (good[0], _tensor(2, stage.block_n + 64))):
        said = stages.refusal(stage, q, k, k)
        assert f"Lq {q.shape[2]}, Lk {k.shape[2]}" in said
        assert f"{stage.block_m} queries by {stage.block_n} keys" in said
        with pytest.raises(NotImplementedError, match=re.escape(said)):
            stages.attention(stage, q, k, k)


@pytest.mark.parametrize(
    ("q", "k", "options", "reason"),
    [
        (_tensor(2, 128, 256), _tensor(2, 128, 256), {}, "D 256"),
        (_tensor(2, 256), _tensor(2, 128), {"causal": True}, "rows that see no key"),
        (_tensor(2, 128, dtype=torch.float32), _tensor(2, 128, dtype=torch.float32), {}, "float32"),
        (_tensor(2, 128), _tensor(2, 128), {"scale": -1.0}, "scale -1.0"),
        (_tensor(2, 0), _tensor(2, 128), {}, "empty"),
    ],
)
def test_what_a_stage_cannot_serve_is_said_with_its_reason(q, k, options, reason):
    assert reason in stages.refusal(stage3.STAGE, q, k, k, **options)


def test_the_tile_that_is_launched_is_the_kernels_own():
    assert stage1.STAGE.block_m == stage1.STAGE.q_rows == stage1.BLOCK_M.value
    assert stage2.STAGE.block_m == stage2.STAGE.q_rows == stage2.BLOCK_M.value
    assert stage3.STAGE.block_m == 2 * stage3.STAGE.q_rows == 2 * stage3.ROWS.value
    for module in (stage1, stage2, stage3):
        assert module.STAGE.block_n == module.BLOCK_N.value


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do without a GPU")
def test_a_stage_by_itself_says_what_it_needs_and_how_it_is_compiled():
    command = [sys.executable, "-m", "reference_kernels.hopper.stage1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "compute capability 9.0" in done.stderr
    assert "reference_kernels.compiling --capability 90 --kernel hopper-stage1" in done.stderr
