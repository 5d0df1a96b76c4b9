"""Covering designs: few rows that contain every combination of `strength` axis values.

A full product of ten axes is millions of cases; most attention faults need at most two axis values at once, so every
pair is enough for the default matrix. The design is greedy and deterministic: the same axes give the same rows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

Row = tuple[str, ...]


def covering(axes: Sequence[Sequence[str]], strength: int, valid: Callable[[Row], bool]) -> list[Row]:
    """Rows (one value an axis) such that every valid combination of `strength` axes' values occurs in some row.

    `valid` says whether a complete row is a problem at all; a combination that occurs in no valid row found is
    dropped. strength 1: every value occurs; strength >= len(axes): the full product of valid rows.
    """
    if strength >= len(axes):
        return [row for row in itertools.product(*axes) if valid(row)]
    groups = list(itertools.combinations(range(len(axes)), strength))
    uncovered = {(g, values) for g in groups for values in itertools.product(*(axes[i] for i in g))}
    # Insertion order decides which combination is served next; sets have no stable order across processes.
    queue = [(g, values) for g in groups for values in itertools.product(*(axes[i] for i in g))]
    rng = random.Random(0)
    rows: list[Row] = []
    for target in queue:
        if target not in uncovered:
            continue
        row = _complete(target, axes, groups, uncovered, valid, rng)
        if row is None:
            uncovered.discard(target)
            continue
        rows.append(row)
        uncovered -= {(g, tuple(row[i] for i in g)) for g in groups}
    return rows


def _complete(
    target: tuple[tuple[int, ...], Row],
    axes: Sequence[Sequence[str]],
    groups: list[tuple[int, ...]],
    uncovered: set[tuple[tuple[int, ...], Row]],
    valid: Callable[[Row], bool],
    rng: random.Random,
) -> Row | None:
    """A valid row that contains `target` and, greedily, as many other uncovered combinations as possible."""
    fixed = dict(zip(*target, strict=True))
    best: tuple[int, Row] | None = None
    # The greedy fill may run into an invalid row: later attempts fill more and more at random.
    for attempt in range(40):
        chosen = dict(fixed)
        free = [i for i in range(len(axes)) if i not in chosen]
        rng.shuffle(free)
        for i in free:
            if attempt >= 8:
                chosen[i] = rng.choice(axes[i])
                continue
            relevant = [g for g in groups if i in g and all(j == i or j in chosen for j in g)]

            def gain(
                value: str, i: int = i, chosen: dict[int, str] = chosen, relevant: list[tuple[int, ...]] = relevant
            ) -> int:
                trial = {**chosen, i: value}
                return sum((g, tuple(trial[j] for j in g)) in uncovered for g in relevant)

            values = list(axes[i])
            rng.shuffle(values)
            chosen[i] = max(values, key=gain)
        row = tuple(chosen[i] for i in range(len(axes)))
        if not valid(row):
            continue
        gained = sum((g, tuple(row[i] for i in g)) in uncovered for g in groups)
        if best is None or gained > best[0]:
            best = (gained, row)
        if attempt >= 3 and best is not None:
            break
    return best[1] if best else None
