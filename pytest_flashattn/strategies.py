"""Drawing cases with Hypothesis, and shrinking one that fails. Torch-free; the one module that imports Hypothesis.

A case is drawn from everything that an implementation declares, field by field, each from a table whose first value is
the simplest: that is what Hypothesis shrinks towards. So the smallest failing case has as few features as it can have,
then the shortest lengths, then the default everywhere else. Draws depend on the support and the seed alone.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, configuration
from hypothesis import strategies as st

from .cases import BIASES, DOUTS, FAMILIES, LAYOUTS, Case
from .features import DESCALES, DTYPES, FP8
from .support import Support

T = TypeVar("T")

SCORES, ROWS, KEYS = 2**18, 2**12, 2**14
"""B · Hq · Lq · Lk, B · Hq · Lq and B · Hq · Lk of a drawn case at most: several tiles, and a fraction of a second."""

LENGTHS = (
    1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 23, 31, 32, 33, 47, 48, 63, 64, 65, 79, 80, 81, 96, 97, 100, 111, 113, 127,
    128, 129, 130, 143, 144, 160, 161, 191, 192, 193, 199, 200, 211, 223, 239, 240, 255, 256, 257, 271, 300, 319, 320,
    321, 384, 385, 509, 511, 512, 513, 640, 769, 1009, 1023, 1024, 1025, 2048, 4099, 8191,
)  # fmt: skip
"""Rising. Special cases of kernels, tile sizes and their neighbours, primes; longer than a few tiles: rarely."""

DIMS = (64, 128, 32, 16, 8, 24, 40, 59, 72, 80, 96, 112, 160, 192, 256)
HEADS = ((1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 2), (5, 5), (6, 2), (7, 1), (8, 2))
BATCHES = (1, 1, 1, 2, 2, 3)
SCALES = (0.3, 1.0, 0.05, -0.125, 0.0)
WINDOWS = ((0, 0), (1, 0), (64, 0), (3, 2), (17, 9), (None, 5), (None, 0), (0, None), (130, None), (1000, 1000))
SOFTCAPS = (15.0, 5.0, 50.0)

RUNS, SECONDS = 300, 30.0
"""A failing case is shrunk in so many runs and so long at most."""

MOST = 100
"""Entries of a table at most: Hypothesis mixes numbers that it finds in the user's modules into the integers that it
draws, but none up to 100. So the draws are the same in every process."""


def pick(draw: st.DrawFn, values: Collection[T]) -> T:
    """One of `values`, each as likely as the next; the first is the simplest."""
    table = tuple(values)
    assert len(table) <= MOST
    return table[draw(st.integers(0, len(table) - 1))]


def rarely(draw: st.DrawFn, usual: T, values: Collection[T], share: int) -> T:
    """`usual`, or in one of `share` draws one of `values`."""
    return pick(draw, (*[usual] * ((share - 1) * len(values)), *values))


@st.composite
def cases(draw: st.DrawFn, support: Support) -> Case:
    """A case within `support`, of at most SCORES scores."""
    has = support.features.__contains__
    descales = [word for word in DESCALES if has(f"descale_{word}")]
    known = ("bf16", *DTYPES, *(FP8 if descales else ()))
    chosen: dict[str, Any] = {"dtype": pick(draw, [d for d in known if d in support.dtypes])}
    if chosen["dtype"] in FP8:
        chosen["descale"] = pick(draw, descales)
    if has("causal"):
        chosen["causal"] = pick(draw, (False, True))
    if has("scale"):
        chosen["scale"] = rarely(draw, None, SCALES, 4)
    if has("window"):
        chosen["window"] = rarely(draw, None, WINDOWS, 4)
    if has("softcap"):
        chosen["softcap"] = rarely(draw, None, SOFTCAPS, 5)
    if has("alibi"):
        chosen["alibi"] = rarely(draw, False, (True,), 5)
    if has("sinks"):
        chosen["sinks"] = rarely(draw, False, (True,), 5)
    if kinds := [kind for kind in ("bias", "mask") if has(kind)]:
        kind, pattern = rarely(draw, ("", ""), [(kind, p) for kind in kinds for p in BIASES], 4)
        if kind:
            chosen[kind] = pattern
            chosen["holes"] = kind == "bias" and pick(draw, (False, True))
    chosen["family"] = rarely(draw, "normal", [f for f in FAMILIES if f != "normal" and _distinct(f, chosen)], 2)
    chosen |= _memory(draw, backward=has("backward"))
    chosen |= _sizes(draw, support)
    try:
        case = Case(**chosen)
    except ValueError:  # a layout that this shape cannot have
        hypothesis.reject()
    hypothesis.assume(support.gap(case) is None)
    return case


def _distinct(family: str, chosen: dict[str, Any]) -> bool:
    """Whether a feature still shows with these inputs: a softcap makes large scores alike, and hides a sink's logit."""
    if family == "zeroblocks" and not chosen.get("descale"):
        return False  # zeros are special to quantisers only
    if chosen.get("softcap") and family in ("offset", "negoffset"):
        return False
    return not (chosen.get("sinks") and family == "constant")


def _memory(draw: st.DrawFn, *, backward: bool) -> dict[str, Any]:
    # Not "far": it takes gigabytes.
    chosen = {"layout": rarely(draw, "plain", [x for x in LAYOUTS if x not in ("plain", "far")], 2)}
    if backward:
        chosen["dout"] = rarely(draw, "plain", list(DOUTS)[1:], 3)
    return chosen


def _sizes(draw: st.DrawFn, support: Support) -> dict[str, Any]:
    # Tables are cut at their ends only: while a case shrinks, a position in a table keeps its meaning.
    heads, kv_heads = pick(draw, [(h, kv) for h, kv in HEADS if h == kv or "gqa" in support.features])
    batch = pick(draw, BATCHES)
    step, each = support.length_multiple, batch * heads
    lengths = tuple(dict.fromkeys(-(-n // step) * step for n in LENGTHS))
    cross = "cross" in support.features
    q = k = pick(draw, [n for n in lengths if each * n <= ROWS and (cross or each * n * n <= SCORES)] or lengths[:1])
    if cross and (pick(draw, (False, True)) or each * q * q > SCORES):
        k = pick(draw, [n for n in lengths if each * n <= KEYS and each * q * n <= SCORES] or lengths[:1])
    sizes = {"q": q, "k": k, "heads": heads, "kv_heads": kv_heads, "batch": batch}
    if empty := rarely(draw, "", ("q", "k", "batch"), 25):
        sizes |= {empty: 0} if cross or empty == "batch" else {"q": 0, "k": 0}
    served = support.head_dims or frozenset(DIMS)
    known = [*(d for d in DIMS if d in served), *sorted(served - set(DIMS))]
    sizes["d"] = pick(draw, [d for d in known if d <= (support.max_head_dim or d)][:MOST] or known[:1])
    if "dv" in support.features:
        widths = [n for n in DIMS if n <= (support.max_head_dim or n)]
        sizes["dv"] = rarely(draw, sizes["d"], widths or [sizes["d"]], 4)
    return sizes


def draw(support: Support, number: int, seed: int) -> list[Case]:
    """Up to `number` distinct cases within `support`, the simplest first; fewer where there are no more."""
    found: dict[Case, None] = {}

    def visit(case: Case) -> None:
        hypothesis.assume(case not in found)
        found[case] = None

    _explore(support, number, seed, visit, shrink=False)
    return list(found)


def shrink(
    support: Support, number: int, seed: int, failing: Case, fails: Callable[[Case], bool], seconds: float = SECONDS
) -> tuple[Case, int]:
    """The smallest case that `fails`, reached from `failing`, one of draw(support, number, seed); and runs of `fails`.

    Hypothesis can only shrink what it has drawn: the draws are repeated up to the failing one, without running them.
    """
    smallest, known, drawn = failing, {failing: True}, set[Case]()
    deadline = time.monotonic() + seconds

    def visit(case: Case) -> None:
        nonlocal smallest
        if failing not in drawn:
            hypothesis.assume(case not in drawn)
            drawn.add(case)
            if case != failing:
                return
        if case not in known:
            if len(known) > RUNS or time.monotonic() > deadline:
                return
            known[case] = fails(case)
        if known[case]:
            smallest = case
            raise _Failing

    with contextlib.suppress(_Failing):
        _explore(support, number, seed, visit, shrink=True)
    return smallest, len(known) - 1


class _Failing(Exception):
    pass


def _explore(support: Support, number: int, seed: int, visit: Callable[[Case], None], *, shrink: bool) -> None:
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=number,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases(support))
    def test(case: Case) -> None:
        visit(case)

    with _no_folder():
        test()


@contextlib.contextmanager
def _no_folder() -> Iterator[None]:
    """Hypothesis keeps a folder .hypothesis, even without a database: here it is one that goes away."""
    before = getattr(configuration, "__hypothesis_home_directory", None)
    with tempfile.TemporaryDirectory(prefix="flashattn-") as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(before)
