"""What a package of kernels gives by name, imported on first use: `python -m reference_kernels.forward` chooses the
interpreter before Triton is imported, and whoever only looks needs neither torch nor Triton."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def attribute(package: str, homes: Mapping[str, str], name: str) -> Any:
    """`name` of the module of `package` that is its home; for a package's __getattr__.

    Raises AttributeError for a name without one, ModuleNotFoundError with the remedy where Triton is not installed.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ModuleNotFoundError(
            f"{package}.{name} needs Triton, which is not installed: pip install 'pytest-flashattn[kernels]'",
            name=error.name,
        ) from None
