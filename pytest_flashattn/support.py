"""What an implementation declares it can do, and why a case lies outside of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .features import DTYPES, FEATURES, unknown

if TYPE_CHECKING:
    from .cases import Case


@dataclass(frozen=True)
class Support:
    """The declaration of an implementation; attach it as `attn.__flashattn__ = Support(...)`.

    features: the words of `features.FEATURES` that the implementation serves.
    dtypes: "fp16", "bf16", "fp32".
    head_dims: the query/key head dims it serves; None: any. max_head_dim bounds them instead.
    length_multiple: Lq and Lk must be multiples of it. backward_length_multiple: the same, for gradients only.
    alignment: where the causal diagonal ends when Lq != Lk: "bottom-right" (the contract) or "top-left".
    p_dtype: the dtype to which probabilities are rounded before P @ V; None: the input dtype.
    tf32: fp32 products are computed with TF32 operands.
    gradient_sums: "fp32", or "input": gradients are added up in the input dtype, dk and dv over blocks of query rows
    and over the heads of a group, dq over blocks of keys.
    deterministic: the same call gives the same bits (forward).
    devices: the device types it runs on; empty: any.

    Raises ValueError for a word that is not in the vocabulary.
    """

    features: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset(DTYPES)
    head_dims: frozenset[int] | None = None
    max_head_dim: int | None = None
    length_multiple: int = 1
    backward_length_multiple: int = 1
    alignment: str = "bottom-right"
    p_dtype: str | None = None
    tf32: bool = False
    gradient_sums: str = "fp32"
    deterministic: bool = True
    devices: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        # Users write plain sets and lists; the declaration itself stays immutable and hashable.
        for field in ("features", "dtypes", "devices"):
            value: Iterable[str] = getattr(self, field)
            if isinstance(value, str):
                raise ValueError(f"Support.{field} is a set of words, not the string {value!r}; write {{{value!r}}}")
            object.__setattr__(self, field, frozenset(value))
        if self.head_dims is not None:
            object.__setattr__(self, "head_dims", frozenset(self.head_dims))
        if bad := unknown(self.features):
            raise ValueError(f"Support.features: unknown {', '.join(bad)}; known: {', '.join(FEATURES)}")
        if bad := sorted(self.dtypes - set(DTYPES)):
            raise ValueError(f"Support.dtypes: unknown {', '.join(bad)}; known: {', '.join(DTYPES)}")
        if self.p_dtype is not None and self.p_dtype not in DTYPES:
            raise ValueError(f"Support.p_dtype: unknown {self.p_dtype!r}; known: {', '.join(DTYPES)}")
        if self.gradient_sums not in ("fp32", "input"):
            raise ValueError(f"Support.gradient_sums is 'fp32' or 'input', not {self.gradient_sums!r}")
        if self.alignment not in ("bottom-right", "top-left"):
            raise ValueError(f"Support.alignment is 'bottom-right' or 'top-left', not {self.alignment!r}")

    def gap(self, case: Case, needs: Iterable[str] = ()) -> str | None:
        """Why `case` (with the features `needs` of a check on top) lies outside this declaration; None if inside."""
        wanted = case.features | frozenset(needs)
        if missing := [f for f in FEATURES if f in wanted and f not in self.features]:
            return f"lacks {', '.join(missing)}"
        if case.dtype not in self.dtypes:
            return f"lacks dtype {case.dtype}"
        if self.head_dims is not None and case.d not in self.head_dims:
            return f"lacks head dim {case.d}"
        if self.max_head_dim is not None and max(case.d, case.dv) > self.max_head_dim:
            return f"lacks head dim {max(case.d, case.dv)} (at most {self.max_head_dim})"
        multiple = self.length_multiple
        if "backward" in wanted:
            multiple = max(multiple, self.backward_length_multiple)
        if case.q % multiple or case.k % multiple:
            return f"lacks lengths that are no multiple of {multiple}"
        return None
