"""One implementation, ready to be timed on a case in one direction, with inputs that change for every call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attempt import Outputs
from ..cases import Case
from ..implementation import Implementation, ImplementationError, Unsupported
from ..inputs import TORCH_DTYPES, Inputs, make_inputs
from ..layouts import place
from ..memory import exhausted

SLOTS = 2
"""Memory of the inputs in rotation: results that were kept by address are found out in the round after next."""
TENSORS = ("q", "k", "v", "dout")
RESULTS: dict[str, tuple[str, ...]] = {
    "forward": ("o",),
    "backward": ("dq", "dk", "dv"),
    "forward_backward": ("o", "dq", "dk", "dv"),
}


class Values:
    """The values of the next round: q, k, v and dO ~ N(0, 1), new for every round, the same for all who take turns.

    Not zeros or small integers: they draw less power, and a GPU at its power limit then runs up to 13 % faster.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self._generator = torch.Generator(device).manual_seed(case.rng_seed)
        sizes = {"q": (case.heads, case.q, case.d), "k": (case.kv_heads, case.k, case.d),
                 "v": (case.kv_heads, case.k, case.dv), "dout": (case.heads, case.q, case.dv)}  # fmt: skip
        dtype = TORCH_DTYPES[case.dtype]
        self.tensors = {n: torch.empty((case.batch, *s), dtype=dtype, device=device) for n, s in sizes.items()}
        self.draw()

    def draw(self) -> None:
        for x in self.tensors.values():
            x.normal_(generator=self._generator)


@dataclass
class Subject:
    """An implementation and its inputs in memory of their own, in its own order of axes.

    `before` comes ahead of the timed part, `refresh` right in front of it, `call` is the timed part and returns RESULTS
    of the direction. Raises Unsupported when the output carries no autograd graph where gradients are asked for.
    """

    implementation: Implementation
    values: Values
    direction: str

    def __post_init__(self) -> None:
        self.case = self.values.case
        self._slots = [self._memory() for _ in range(SLOTS)]
        self._turn = 0
        self._graph: Tensor | None = None

    def _memory(self) -> Inputs:
        case, device = self.case, self.values.device
        native = self.implementation.convention.layout
        if case.alibi or case.bias or case.mask or case.sinks:
            inputs = make_inputs(case, device, native)
        else:
            q, k, v, dout = (place(torch.empty_like(self.values.tensors[n]), "plain", native) for n in TENSORS)
            inputs = Inputs(case, q, k, v, dout, torch.zeros(case.batch, case.heads, case.q, device=device))
        if self.direction == "forward":
            return inputs
        return inputs.with_(**{name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")})

    @property
    def inputs(self) -> Inputs:
        """The inputs of this turn."""
        return self._slots[self._turn]

    def before(self) -> None:
        """Take the next slot; for a backward alone, run the forward that it belongs to."""
        self._turn = (self._turn + 1) % SLOTS
        if self.direction == "backward":
            self._copy("q", "k", "v")
            self._graph = self._forward()

    def refresh(self) -> None:
        """Put the values of this round into the inputs."""
        self._copy(*(("dout",) if self.direction == "backward" else TENSORS))

    def call(self) -> tuple[Tensor, ...]:
        if self.direction == "forward":
            with torch.no_grad():
                return (self._forward(),)
        if self.direction == "backward":
            assert self._graph is not None
            graph, self._graph = self._graph, None
            return self._gradients(graph)
        o = self._forward()
        return (o, *self._gradients(o))

    def named(self, results: list[Tensor]) -> Outputs:
        return dict(zip(RESULTS[self.direction], results, strict=True))

    def has_changed_inputs(self) -> bool:
        return any(not torch.equal(getattr(self.inputs, name), self.values.tensors[name]) for name in TENSORS)

    def _copy(self, *names: str) -> None:
        with torch.no_grad():
            for name in names:
                getattr(self.inputs, name).copy_(self.values.tensors[name])

    def _forward(self) -> Tensor:
        inputs = self.inputs
        o, _ = self.implementation.call(inputs.q, inputs.k, inputs.v, inputs.options())
        return o

    def _gradients(self, o: Tensor) -> tuple[Tensor, ...]:
        if not o.requires_grad:
            raise Unsupported("the output carries no autograd graph: forward only")
        inputs = self.inputs
        try:
            return torch.autograd.grad(o, (inputs.q, inputs.k, inputs.v), inputs.dout)
        except NotImplementedError as error:
            raise Unsupported(f"in backward: {self.implementation.raised(error)}") from error
        except Exception as error:
            if exhausted(error):
                raise
            raise ImplementationError(f"in backward: {self.implementation.raised(error)}") from error


def snapshot(inputs: Inputs) -> Inputs:
    """A copy of the inputs that later rounds do not change."""
    return replace(inputs, **{name: getattr(inputs, name).detach().clone() for name in TENSORS})
