"""How much memory a case needs and how much is free: a case that does not fit is unmet, with the numbers."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .cases import Case
from .layouts import FAR

GIB = 1 << 30

NO_MEMORY = re.compile(r"CUDA[^\n]*: out of memory")
"""How the driver says it, through whoever asked it for memory: loading a compiled kernel takes some too."""


def needed(case: Case) -> int:
    """Bytes that judging `case` takes at most, roughly: inputs, outputs, the oracle's float64 copies and its blocks."""
    queries = case.batch * case.heads * case.q * (case.d + case.dv)
    keys = case.batch * case.kv_heads * case.k * (case.d + case.dv)
    # 8 bytes for each of about ten tensors of either size (values, bounds, emulated, gradients), and the row blocks
    # of the oracle, which are bounded by its own budget.
    bytes_ = 80 * (queries + keys) + GIB // 2
    if case.layout == "far":
        bytes_ += FAR * (4 if case.dtype == "fp32" else 2)
    if pattern := case.bias or case.mask:
        sizes = (case.batch, case.heads, case.q, case.k)
        elements = 1
        for size, letter in zip(sizes, pattern, strict=True):
            elements *= size if letter != "1" else 1
        bytes_ += 40 * elements
    return bytes_


def free(device: torch.device) -> int | None:
    """Bytes free on `device`; None where the system does not say."""
    if device.type == "cuda":
        # What PyTorch's allocator has cached is taken for the driver, and free for us.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def shortage(case: Case, device: torch.device) -> str | None:
    """A sentence when `case` needs more memory than is free on `device`, else None."""
    available = free(device)
    if available is None or (need := needed(case)) <= available:
        return None
    return f"needs about {need / GIB:.1f} GiB on {device}, {available / GIB:.1f} GiB are free"


def exhausted(error: Exception) -> bool:
    """Whether it is of memory that ran out, which is no verdict on who asked for it."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))
