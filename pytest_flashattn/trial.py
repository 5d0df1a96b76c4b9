"""Put one implementation on trial on one case: gate, run a check, turn every fault into a verdict.

Nothing that an implementation does wrong comes out of here as an exception of ours: it comes back as a Verdict whose
reason is one sentence.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from .capability import lacks
from .cases import Case
from .checks.registry import Function, find
from .diagnosis import notebook
from .features import FP8
from .implementation import Implementation, ImplementationError, Unsupported, present
from .memory import exhausted, shortage
from .verdict import Verdict


def run_check(name: str, implementation: Implementation, case: Case, *, diagnose: bool = True) -> Verdict:
    """The verdict of check "chapter.name" on `case`; a failed one says what it looks like, if `diagnose`.

    Raises KeyError for a check that does not exist.
    """
    check = find(name)
    started = time.perf_counter()
    verdict = gate(implementation, case, check.needs)
    if verdict is None and diagnose:
        with notebook.opened(name, implementation) as notes:
            verdict = _run(check.function, implementation, case)
        verdict = notes.annotate(verdict) if verdict.status == "failed" else verdict
    elif verdict is None:
        verdict = _run(check.function, implementation, case)
    return verdict.with_(seconds=round(time.perf_counter() - started, 4))


def gate(implementation: Implementation, case: Case, needs: Iterable[str] = ()) -> Verdict | None:
    """Why the case cannot be judged (declared or unmet), or None when it can."""
    if gap := implementation.support.gap(case, needs):
        return Verdict("declared", gap)
    kind = implementation.device.type
    if not present(kind):
        return Verdict("unmet", f"runs on {kind}; this machine has no {kind.upper()} device")
    if case.dtype in FP8 and kind == "cuda" and (lack := lacks("fp8", str(implementation.device))):
        return Verdict("unmet", lack)  # elsewhere FP8 is emulated, which needs no tensor cores
    if lack := shortage(case, implementation.device):
        return Verdict("unmet", lack)
    return None


def _run(function: Function, implementation: Implementation, case: Case) -> Verdict:
    try:
        return function(implementation, case)
    except Unsupported as gap:
        return Verdict("declared", str(gap))
    except ImplementationError as fault:
        return Verdict.failed(str(fault))
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        return Verdict("unmet", f"ran out of memory on {implementation.device}: {str(error).splitlines()[0]}")


def poisoned() -> str | None:
    """A sentence when the CUDA context no longer works (a sticky error of an earlier kernel), else None."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the CUDA context is broken ({str(error).splitlines()[0]}): later results would say nothing"
    return None
