"""A pytest plugin for our own tests: implementations that need no torch, so that a run takes a fraction of a second.

`kern:NAME` behaves by its name; what is replaced is the loader, the trial and the device probe, nothing of the rim.
"""

from __future__ import annotations

import os
import sys
import time
import types
from typing import Any

import pytest

import pytest_flashattn
from pytest_flashattn import capability
from pytest_flashattn.features import FEATURES
from pytest_flashattn.support import Support
from pytest_flashattn.verdict import Measure, Verdict

DEVICES = {"cpu": capability.Device("cpu", "CPU", absence="this machine has no CUDA device"),
           "h100": capability.Device("cuda", "NVIDIA H100", (9, 0)),
           "a100": capability.Device("cuda", "NVIDIA A100", (8, 0))}  # fmt: skip
RATIO = {"good": 0.5, "better": 0.25}


class UnknownImplementation(ValueError):
    pass


class FakeImplementation:
    def __init__(self, spec: str, device: str) -> None:
        self.spec, self.name, self.device = spec, spec.partition(":")[2], "cpu"
        self.convention = types.SimpleNamespace(name="canonical", layout="bhsd")
        lacking = {"window", "softcap"} if self.name != "nothing" else set(FEATURES)
        self.support = Support(features=frozenset(FEATURES) - lacking, dtypes=frozenset(("fp16", "bf16", "fp32")))
        if self.name == "nothing":
            self.support = Support(dtypes=frozenset(("fp32",)), head_dims=frozenset((1,)))

    def describe(self) -> str:
        return f"{self.spec}, canonical call; fp16 bf16; causal"


def load(spec: str, *, convention: str | None, support: str | None, device: str) -> FakeImplementation:
    if not spec.startswith("kern:") or (spec == "kern:workerless" and "PYTEST_XDIST_WORKER" in os.environ):
        raise UnknownImplementation(f"--flashattn-impl={spec}: there is no module {spec.partition(':')[0]!r}")
    return FakeImplementation(spec, device)


def gate(implementation: FakeImplementation, case: Any) -> Verdict | None:
    lack = implementation.support.gap(case)
    return Verdict("declared", lack) if lack else None


def run_check(name: str, implementation: FakeImplementation, case: Any, *, diagnose: bool = True) -> Verdict:
    who = implementation.name
    if who == "noisy":
        print("x" * 1_000_000)
    if who == "broken":
        raise RuntimeError("an error of ours")
    if who == "interrupts" and case.causal:
        raise KeyboardInterrupt
    if who == "exits" and case.causal:
        sys.exit(3)
    if who == "crashes" and case.causal:
        os._exit(11)
    if who == "hangs" and case.causal:
        time.sleep(120)
    wrong = who in ("bad", "noisy", "poisons") and case.causal
    worst = {"index": [0, 0, 1, 2], "got": 1.0, "want": 0.5, "error": 0.5, "ulps": 64.0}
    measure = Measure("o", "bound", 41.2 if wrong else RATIO.get(who, 0.75), 1e-3, 7 * wrong, 1000, worst)
    return Verdict.of([measure], diagnosis=("looks like: the mask is off by one",) if wrong else ())


POISON = {"said": False}


def poisoned() -> str | None:
    return "the CUDA context is broken (fake)" if POISON["said"] else None


def _modules() -> dict[str, types.ModuleType]:
    implementation = types.ModuleType("pytest_flashattn.implementation")
    implementation.__dict__.update(load=load, UnknownImplementation=UnknownImplementation)
    trial = types.ModuleType("pytest_flashattn.trial")
    trial.__dict__.update(run_check=run_check, gate=gate, poisoned=poisoned)
    return {"implementation": implementation, "trial": trial}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    for name, module in _modules().items():
        patch.setitem(sys.modules, f"pytest_flashattn.{name}", module)
        patch.setattr(pytest_flashattn, name, module, raising=False)
    patch.setattr(capability, "probe", lambda setting: DEVICES[os.environ.get("FAKE_DEVICE", "cpu")])
    patch.setattr(capability, "check_device", lambda setting: None)
    if "FAKE_WITHOUT_HYPOTHESIS" in os.environ:
        patch.setitem(sys.modules, "hypothesis", None)
        patch.delitem(sys.modules, "pytest_flashattn.strategies", raising=False)
        patch.delattr(pytest_flashattn, "strategies", raising=False)
    patch.setitem(POISON, "said", "poisons" in " ".join(map(str, config.invocation_params.args)))
