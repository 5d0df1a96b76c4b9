"""Wrong gradients of a right forward: statistics, sums, factors, zeros. Changes to the tape, each with its sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .backward_model import Gradients, Tape, gradients, summed
from .model import LOG2E, Problem

Change = Callable[..., Tape]
"""Tape → Tape; more parameters only to bind the variables of a loop."""


def _always(tape: Tape) -> bool:
    return True


@dataclass(frozen=True)
class Wrong:
    """sentence: what an author reads. change: the tape of such a backward. when: where it is another one.

    exact_only: told only when it matches every element of every gradient. moves: where elements of each gradient go,
    for one that is stored in the wrong place: its bounds go with it.
    """

    sentence: str
    change: Change
    when: Callable[[Tape], bool] = _always
    exact_only: bool = False
    moves: Callable[[str, Tensor], Tensor] | None = None


def _with(**changes: Any) -> Change:
    return lambda tape: replace(tape, **changes)


def _grouped(tape: Tape) -> bool:
    return tape.problem.group > 1


def _batches(tape: Tape) -> bool:
    return tape.do.shape[0] > 1


def _heads(tape: Tape) -> bool:
    return tape.do.shape[1] > 1


def _flows(tape: Tape) -> bool:
    return tape.dlse is not None


def _capped(tape: Tape) -> bool:
    return tape.problem.softcap is not None


def _first_lse(tape: Tape) -> Tape:
    return replace(tape, lse=tape.lse[:1].expand_as(tape.lse))


def _first_delta(tape: Tape) -> Tape:
    return replace(tape, delta=(tape.do * tape.o).sum(-1)[:1].expand_as(tape.lse))


def _negative_dlse(tape: Tape) -> Tape:
    return replace(tape, dlse=None if tape.dlse is None else -tape.dlse)


STATISTICS: tuple[Wrong, ...] = (
    Wrong("Delta = sum(dO * O) is missing in dS", _with(times_delta=0.0)),
    Wrong("Delta is added in dS, not subtracted", _with(times_delta=-1.0)),
    Wrong("the gradient that arrives through the log-sum-exp is dropped", _with(dlse=None), _flows),
    Wrong("the gradient that arrives through the log-sum-exp has the wrong sign", _negative_dlse, _flows),
    Wrong("the backward uses the log-sum-exp of batch element 0 for all", _first_lse, _batches),
    Wrong("the backward uses the Delta of batch element 0 for all", _first_delta, _batches),
    Wrong("the backward uses the log-sum-exp and the Delta of batch element 0 for all",
          lambda t: _first_lse(_first_delta(t)), _batches),
    Wrong("the backward uses the log-sum-exp of head 0 for all heads",
          lambda t: replace(t, lse=t.lse[:, :1].expand_as(t.lse)), _heads),
    Wrong("the backward takes a natural log-sum-exp for one to base 2", lambda t: replace(t, lse=t.lse / LOG2E)),
    Wrong("the backward takes a log-sum-exp to base 2 for a natural one", lambda t: replace(t, lse=t.lse * LOG2E)),
    Wrong("the derivative of the softcap is missing in the backward", _with(cap=False), _capped),
)  # fmt: skip


def _one_head(which: int) -> Callable[[Problem, Tensor], Tensor]:
    def join(p: Problem, x: Tensor) -> Tensor:
        return x[:, which % p.group :: p.group]

    return join


def _part(name: str, change: Change) -> Change:
    """Only gradient `name` comes from the changed tape."""

    def finish(tape: Tape, out: Gradients) -> Gradients:
        if name not in out:
            return out
        wrong = gradients(change(replace(tape, finish=lambda t, o: o, wanted=frozenset({name}))))
        return {**out, name: wrong[name]}

    return _with(finish=finish)


def _of_batch(which: slice) -> Change:
    def narrow(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[which]

    def change(tape: Tape) -> Tape:
        p = tape.problem
        one = replace(p, q=p.q[which], k=p.k[which], v=p.v[which], bias=narrow(p.bias), mask=narrow(p.mask), known=[])
        dlse = narrow(tape.dlse)
        return replace(tape, problem=one, o=tape.o[which], lse=tape.lse[which], do=tape.do[which], dlse=dlse)

    return change


SUMS: tuple[Wrong, ...] = (
    Wrong("dk and dv come from the last query head of each group only: they are not summed over the group",
          _with(over_groups=_one_head(-1)), _grouped),
    Wrong("dk and dv come from the first query head of each group only: they are not summed over the group",
          _with(over_groups=_one_head(0)), _grouped),
    Wrong("dk and dv are the mean over the query heads of a group, not the sum",
          _with(over_groups=lambda p, x: summed(p, x) / p.group), _grouped),
    Wrong("the gradient of the sinks comes from the last batch element only",
          _part("dsinks", _of_batch(slice(-1, None))), _batches),
    Wrong("the gradient of the sinks comes from the first batch element only",
          _part("dsinks", _of_batch(slice(0, 1))), _batches),
    Wrong("the gradient of the sinks lacks Delta", _part("dsinks", _with(times_delta=0.0))),
)  # fmt: skip


def _times(name: str, factor: Callable[[Problem], float]) -> Change:
    def finish(tape: Tape, out: Gradients) -> Gradients:
        return {n: x * factor(tape.problem) if n == name else x for n, x in out.items()}

    return _with(finish=finish)


def _scaled(tape: Tape) -> bool:
    return tape.problem.scale not in (0.0, 1.0)


FACTORS: tuple[Wrong, ...] = (
    *(
        Wrong(f"{name} {what}", _times(name, factor), _scaled)
        for name in ("dk", "dq")
        for what, factor in (
            ("lacks the scale", lambda p: 1 / p.scale),
            ("is scaled twice", lambda p: p.scale),
            ("has a factor log2(e) too many", lambda p: LOG2E),
            ("has a factor ln 2 too many", lambda p: 1 / LOG2E),
        )
    ),
    Wrong("dbias is multiplied by the scale", _times("dbias", lambda p: p.scale)),
    Wrong("dsinks has the wrong sign", _times("dsinks", lambda p: -1.0)),
)


def _zero(*names: str) -> Wrong:
    def finish(tape: Tape, out: Gradients) -> Gradients:
        return {n: torch.zeros_like(x) if n in names else x for n, x in out.items()}

    who = " and ".join(names) if len(names) < 3 else "all gradients"
    verb = "is" if len(names) == 1 else "are"
    return Wrong(f"{who} {verb} zero: computed nowhere, or not stored", _with(finish=finish), exact_only=True)


ZEROS: tuple[Wrong, ...] = (
    _zero("dq"),
    _zero("dk"),
    _zero("dv"),
    _zero("dk", "dv"),
    _zero("dbias"),
    _zero("dsinks"),
    _zero("dq", "dk", "dv", "dbias", "dsinks"),
)

TABLE: tuple[Wrong, ...] = (*ZEROS, *STATISTICS, *SUMS, *FACTORS)
