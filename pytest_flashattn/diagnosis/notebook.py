"""The notebook of one check: the calls it made, and what was made out of the first failure.

`trial` opens one, `attempt` records calls, `examination` shows failures; nothing is written while none is open. Light
to import: the diagnosis itself is imported at the first failure.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

import oracles

from ..implementation import Implementation
from ..inputs import Inputs
from ..verdict import Measure, Verdict

FULL = 20
"""Failures of one implementation that are diagnosed in full; later ones by the shape of their error only."""

KEPT_ELEMENTS = 2**22
"""Outputs of earlier calls are kept up to this size, to recognise an answer that was given before."""

SMALL_BYTES = 2**22
"""Memory of a call that is remembered beyond its check."""

_OPEN: ContextVar[Notebook | None] = ContextVar("flashattn_notebook", default=None)
REMEMBERED = 8
"""Calls that are remembered from one check to the next."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call: its inputs and their versions at that time, the arguments of `attempt`, what came back."""

    inputs: Inputs
    versions: tuple[int, ...]
    backward: bool
    keywords: Mapping[str, Any]
    outputs: Mapping[str, Tensor]

    @property
    def small(self) -> bool:
        tensors = (self.inputs.q, self.inputs.k, self.inputs.v, *self.outputs.values())
        return sum(x.untyped_storage().nbytes() for x in tensors) <= SMALL_BYTES

    @property
    def unchanged(self) -> bool:
        """The inputs hold the numbers that they held at the call."""
        return self.versions == versions_of(self.inputs)


def versions_of(inputs: Inputs) -> tuple[int, ...]:
    return tuple(x._version for x in (inputs.q, inputs.k, inputs.v, inputs.dout))


@dataclass
class Memory:
    """What is known of an implementation: failures diagnosed so far, its last small calls."""

    owner: ReferenceType[Implementation]
    failures: int = 0
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


_MEMORIES: dict[int, Memory] = {}
"""By the identity of an implementation, which has no hash; outdated entries are recognised by their owner."""


def _memory(implementation: Implementation) -> Memory:
    for key in [key for key, memory in _MEMORIES.items() if memory.owner() is None]:
        del _MEMORIES[key]
    return _MEMORIES.setdefault(id(implementation), Memory(ref(implementation)))


@dataclass(eq=False)
class Notebook:
    """check: "chapter.name". lines: the diagnosis. fault: what went wrong in the diagnosis itself. started: when the
    check began.

    calls: those of the check. tried: a failure was
    shown already; the first one is diagnosed, the others follow from it as a rule.
    """

    check: str
    implementation: Implementation
    calls: list[Call] = field(default_factory=list)
    lines: tuple[str, ...] = ()
    fault: str = ""
    started: float = field(default_factory=time.perf_counter)
    tried: bool = False

    @property
    def memory(self) -> Memory:
        return _memory(self.implementation)

    def annotate(self, verdict: Verdict) -> Verdict:
        """The failed verdict with what was made out of it; status, reason and measures stay as they are."""
        if not self.tried and verdict.measures:
            with self._guarded():
                from .explain import last_call

                self.lines = last_call(self)
        changed = verdict.with_(diagnosis=(*verdict.diagnosis, *self.lines)) if self.lines else verdict
        return changed.with_(extra={**verdict.extra, "diagnosis": self.fault}) if self.fault else changed

    def failure(
        self,
        inputs: Inputs,
        outputs: Mapping[str, Tensor],
        expected: Mapping[str, oracles.Truth],
        measures: list[Measure],
        rows: slice,
    ) -> None:
        """Diagnose what `judge` has just found wrong, while the tensors are still what they were."""
        if self.tried:
            return
        self.tried = True
        with self._guarded():
            from .explain import explain

            self.lines = explain(self, inputs, outputs, expected, measures, rows)

    def full(self) -> bool:
        """Whether this failure is still one of those that are diagnosed in full; counts it."""
        self.memory.failures += 1
        return self.memory.failures <= FULL

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        token = _OPEN.set(None)  # calls made for the diagnosis are not the check's
        try:
            yield
        except Exception as error:  # a diagnosis must not cost a verdict, whatever is wrong with it
            self.fault = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            _OPEN.reset(token)


@contextlib.contextmanager
def opened(check: str, implementation: Implementation) -> Iterator[Notebook]:
    """A notebook for the calls of one check."""
    notebook = Notebook(check, implementation)
    token = _OPEN.set(notebook)
    try:
        yield notebook
    finally:
        _OPEN.reset(token)
        notebook.memory.calls.extend(c for c in notebook.calls if c.small and c.unchanged)


def current() -> Notebook | None:
    return _OPEN.get()


def record(inputs: Inputs, outputs: Mapping[str, Tensor], *, backward: bool, **keywords: Any) -> None:
    """Note a call of the check that is running, if its outputs are not too large to keep."""
    notebook = _OPEN.get()
    if notebook is not None and sum(x.numel() for x in outputs.values()) <= KEPT_ELEMENTS:
        notebook.calls.append(Call(inputs, versions_of(inputs), backward, keywords, dict(outputs)))
