"""pytest-flashattn: any attention implementation on trial, against float64 oracles and a measured error model.

    pytest --flashattn-impl=mypkg:attn          the bundled suite, a verdict, an exit status
    pytest_flashattn.run(attn)                  the same verdicts in a notebook

Public names are loaded on first use: importing the package imports neither torch nor the suite.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import Case
    from .implementation import UnknownImplementation
    from .runner import Report, Result, run
    from .support import Support
    from .verdict import Measure, Verdict

_HOMES = {
    "Case": "cases",
    "Measure": "verdict",
    "Report": "runner",
    "Result": "runner",
    "Support": "support",
    "UnknownImplementation": "implementation",
    "Verdict": "verdict",
    "run": "runner",
}

__all__ = ["Case", "Measure", "Report", "Result", "Support", "UnknownImplementation", "Verdict", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
