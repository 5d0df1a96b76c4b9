"""Verdicts: what a check says of an implementation on a case, and the numbers behind it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

STATUSES: tuple[str, ...] = ("verified", "failed", "declared", "unmet", "excused")
"""verified, failed; or not judged: declared (the implementation says it lacks the feature, or declares arithmetic whose
limits accept anything), unmet (the machine lacks the hardware or the memory), excused (listed in the user's
expectations file)."""


@dataclass(frozen=True)
class Measure:
    """One quantity judged by one rule.

    quantity: "o", "lse", "dq", …; rule: "bound" (element bound), "noise" (RMS against the emulator, whole tensor),
    "noise-block" (the same, worst block of 128 rows), "exact" (bits).
    ratio: worst error as a share of its limit; above 1 the measure fails. limit: what is allowed there, in the
    quantity's own unit ("bound") or as an RMS ratio ("noise"). beyond of total elements exceed their limit.
    worst: index, got, want, error, ulps of the worst element. grade: A to D for the noise floor.
    note: a sentence about where the error lies ("where: row 63 of 64"). needed: the smallest lambda of the element
    bound that would have accepted every element (what calibration collects). blind: results that were never computed
    and would have passed as well ("zeros"): this measure proves nothing.
    """

    quantity: str
    rule: str
    ratio: float
    limit: float
    beyond: int = 0
    total: int = 0
    worst: dict[str, Any] | None = None
    grade: str | None = None
    note: str = ""
    needed: float | None = None
    blind: str = ""

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0  # NaN compares false: a NaN ratio fails

    def sentence(self) -> str:
        """The measure as one line of a failure report."""
        if self.rule.startswith("noise"):
            where = "over the tensor" if self.rule == "noise" else "in the worst block of 128 rows"
            times = f"{self.ratio * self.limit:.3g} x that of an emulator with the same roundings"
            return f"{self.quantity}: RMS error {where} is {times}, limit {self.limit:g}"
        what = "differ" if self.rule == "exact" else "beyond the bound"
        text = f"{self.quantity}: {self.beyond:,} of {self.total:,} elements {what}"
        if self.worst is None:
            return text
        w = self.worst
        if math.isnan(w["got"]):
            return f"{text}; the first NaN is at {w['index']}, want {w['want']:.6g}"
        text += f"; worst {self.ratio:.3g} x the limit" if math.isfinite(self.ratio) else "; the worst"
        text += (
            f" at {w['index']}: got {w['got']:.6g}, want {w['want']:.6g}, {w['error']:.3g} off ({w['ulps']:.3g} ulp)"
        )
        return text if self.rule == "exact" else f"{text}, limit {self.limit:.3g}"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check on one case; JSON-able through `to_dict`."""

    status: str
    reason: str = ""
    measures: tuple[Measure, ...] = ()
    diagnosis: tuple[str, ...] = ()
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status is one of {', '.join(STATUSES)}, not {self.status!r}")

    @classmethod
    def of(cls, measures: list[Measure], *, reason: str = "", diagnosis: tuple[str, ...] = ()) -> Verdict:
        """Verified when every measure holds, failed otherwise; `reason` leads the text of a failure.

        Declared when every measure holds but one is blind: the arithmetic that is declared leaves nothing to judge.
        Raises ValueError when nothing was measured: a check that compares nothing must not count as verified.
        """
        if not measures:
            raise ValueError("a verdict needs at least one measure")
        if not all(m.ok for m in measures):
            return cls("failed", reason, tuple(measures), diagnosis)
        if blind := dict.fromkeys(f"{m.blind} as {m.quantity}" for m in measures if m.blind):
            reason = f"the limits of its arithmetic are too wide here: they accept {'; '.join(blind)}"
            return cls("declared", reason, tuple(measures))
        return cls("verified", "", tuple(measures), diagnosis)

    @classmethod
    def failed(cls, reason: str) -> Verdict:
        return cls("failed", reason)

    @property
    def worst(self) -> Measure | None:
        """The measure with the largest share of its limit (NaN counts as largest)."""
        return max(self.measures, key=lambda m: math.inf if math.isnan(m.ratio) else m.ratio, default=None)

    def text(self) -> str:
        """What a user reads: the reason, each failed measure on a line, then where it is and what it looks like."""
        lines = [self.reason] if self.reason else []
        beyond = {m.quantity for m in self.measures if not m.ok and not m.rule.startswith("noise")}
        for m in self.measures:
            # An element beyond its bound explains the noise; the noise says nothing more then.
            if not m.ok and not (m.rule.startswith("noise") and m.quantity in beyond):
                lines += [m.sentence(), m.note] if m.note else [m.sentence()]
        return "\n".join([*lines, *self.diagnosis])

    def with_(self, **changes: Any) -> Verdict:
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict (non-finite numbers become strings, since JSON has none)."""
        result: dict[str, Any] = _plain(asdict(self))
        return result

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Verdict:
        measures = tuple(
            Measure(**{**m, "ratio": float(m["ratio"]), "limit": float(m["limit"])}) for m in data["measures"]
        )
        return cls(**{**data, "measures": measures, "diagnosis": tuple(data["diagnosis"])})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
