"""Powers of two, exactly."""

from __future__ import annotations

import torch
from torch import Tensor


def ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    """x times 2 ** exponent, elementwise; exponent: integers of x's shape or one that broadcasts to it.

    PyTorch 2.11 launches this operation on the current GPU whichever one x is on, an illegal memory access.
    """
    with torch.cuda.device_of(x):
        return torch.ldexp(x, exponent)
