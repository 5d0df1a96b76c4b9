"""The suite fails every real fault and passes a right kernel on the same cases; each run is a process of its own.

`python3 -m pytest tests/mutants/gpu` on a machine with a CUDA GPU and Triton; skipped elsewhere.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from ..process import Run, run_suite
from .lane import LANE, Real

if not torch.cuda.is_available():
    pytest.skip("the GPU lane needs a CUDA GPU: these faults do not exist on a CPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
REAL = [pytest.param(m, id=m.name) for m in LANE]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lane")


def enough(mutant: Real) -> None:
    if (have := torch.cuda.device_count()) < mutant.gpus:
        pytest.skip(f"{mutant.name} needs {mutant.gpus} GPUs, this machine has {have}")


@functools.cache
def control(name: str, options: tuple[str, ...], folder: Path) -> Run:
    """The right kernel of several mutants on the same cases runs once."""
    return run_suite(f"mutants.gpu.faulty:{name}", *options, folder=folder)


@pytest.mark.parametrize("mutant", REAL)
def test_right_kernel_passes(mutant: Real, folder: Path) -> None:
    enough(mutant)
    run = control(mutant.control, mutant.options, folder)
    assert run.of("verified"), run.text
    assert not run.of("failed"), run.text
    assert run.status == 0, run.text


@pytest.mark.parametrize("mutant", REAL)
def test_suite_fails_real_fault(mutant: Real, folder: Path) -> None:
    enough(mutant)
    run = run_suite(f"mutants.gpu.faulty:{mutant.name}", *mutant.options, folder=folder)
    assert run.of("failed"), run.text
    assert run.status in (1, 2), run.text  # 2: the fault broke the CUDA context, which ends the run
