"""Unusual implementations that are right: the suite must pass every one of them, or it raises false alarms."""

from __future__ import annotations

from . import equivalents_calls, equivalents_fp8, equivalents_order, equivalents_rounding
from .equivalents_registry import EQUIVALENTS, Equivalent

FAMILIES = (equivalents_order, equivalents_rounding, equivalents_calls, equivalents_fp8)

__all__ = ["EQUIVALENTS", "FAMILIES", "Equivalent"]
