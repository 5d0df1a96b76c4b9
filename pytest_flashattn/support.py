"""What an implementation declares it can do, and why a case lies outside of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .features import DTYPES, FEATURES, FP8, FP8_SUMS, unknown

if TYPE_CHECKING:
    from .cases import Case


@dataclass(frozen=True)
class Support:
    """The declaration of an implementation; attach it as `attn.__flashattn__ = Support(...)`.

    features: the words of `features.FEATURES` that the implementation serves.
    dtypes: "fp16", "bf16", "fp32"; and, only where they are named, "e4m3", "e5m2" (outputs in bf16, no gradients).
    head_dims: the query/key head dims it serves; None: any. max_head_dim bounds them instead.
    length_multiple: Lq and Lk must be multiples of it. backward_length_multiple: the same, for gradients only.
    alignment: where the causal diagonal ends when Lq != Lk: "bottom-right" (the contract) or "top-left".
    p_dtype: the dtype to which probabilities are rounded before P @ V; None: the input dtype.
    p_scale: what P = exp(s - m) is multiplied by before it is rounded to e4m3 or e5m2.
    fp8_sums: "fp32"; or "14 bits": products of FP8 are summed as in Hopper's tensor cores (oracles/truncated.py), o in
    one accumulator through all keys; or "14 bits a tile": in one for each tile of at most 128 keys, tiles in fp32.
    q_block, kv_block: rows that share a descale, of q, and of k and v, where there is one a block.
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
    p_scale: float = 1.0
    fp8_sums: str = "fp32"
    q_block: int = 128
    kv_block: int = 128
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
        known = (*DTYPES, *FP8)
        if bad := sorted(self.dtypes - set(known)):
            raise ValueError(f"Support.dtypes: unknown {', '.join(bad)}; known: {', '.join(known)}")
        if self.p_dtype is not None and self.p_dtype not in known:
            raise ValueError(f"Support.p_dtype: unknown {self.p_dtype!r}; known: {', '.join(known)}")
        for field in ("p_scale", "q_block", "kv_block"):
            if not getattr(self, field) > 0:
                raise ValueError(f"Support.{field} must be positive, not {getattr(self, field)!r}")
        if self.fp8_sums not in FP8_SUMS:
            raise ValueError(f"Support.fp8_sums is one of {', '.join(FP8_SUMS)}, not {self.fp8_sums!r}")
        if self.gradient_sums not in ("fp32", "input"):
            raise ValueError(f"Support.gradient_sums is 'fp32' or 'input', not {self.gradient_sums!r}")
        if self.alignment not in ("bottom-right", "top-left"):
            raise ValueError(f"Support.alignment is 'bottom-right' or 'top-left', not {self.alignment!r}")

    def gap(self, case: Case, needs: Iterable[str] = ()) -> str | None:
        """Why `case` (with the features `needs` of a check on top) lies outside this declaration; None if inside."""
        wanted = case.features | frozenset(needs)
        if case.dtype in FP8 and not self.dtypes & set(FP8):
            return "lacks FP8"
        if missing := [f for f in FEATURES if f in wanted and f not in self.features]:
            return f"lacks {', '.join(missing)}"
        if case.dtype not in self.dtypes:
            return f"lacks dtype {case.dtype}"
        if case.dtype in FP8 and "backward" in wanted:
            return "lacks gradients of FP8 inputs, which autograd does not have"
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
