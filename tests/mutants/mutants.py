"""All mutants: MUTANTS maps a name to its Mutant, whose `make()` gives a fresh broken implementation."""

from __future__ import annotations

from . import (
    mutants_backward,
    mutants_contract,
    mutants_features,
    mutants_fp8,
    mutants_layout,
    mutants_mask,
    mutants_numerics,
    mutants_shape,
    mutants_split,
)
from .registry import MUTANTS, Mutant

FAMILIES = (
    mutants_shape,
    mutants_mask,
    mutants_numerics,
    mutants_backward,
    mutants_features,
    mutants_layout,
    mutants_split,
    mutants_contract,
    mutants_fp8,
)

__all__ = ["FAMILIES", "MUTANTS", "Mutant"]
