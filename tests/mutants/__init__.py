"""Implementations on purpose wrong (mutants) and unusual but right (equivalents): the trial of the suite itself.

`python -m pytest_flashattn power` reads them here, by the protocol of docs/power.md.
"""

from . import isolated, mutants
from .catalogue import CATALOGUE
from .equivalents import EQUIVALENTS
from .registry import Mutant

DEVICE = "cpu"
MUTANTS = mutants.MUTANTS | {
    name: Mutant(name, entry.number, "", type(one := getattr(isolated, name)), type(one).__doc__ or "")
    for name, entry in isolated.ISOLATED.items()
}

__all__ = ["CATALOGUE", "DEVICE", "EQUIVALENTS", "MUTANTS"]
