"""The names of Gluon that changed between Triton 3.6 and 3.9, in one place; what is the same everywhere is not here.

tma_load(descriptor, coordinates, barrier, tile)     global to shared memory, arrives at the barrier when done
tma_store(descriptor, coordinates, tile)             shared to global memory, in the issuing thread's bulk group
aggregate                                            a struct for kernels, with methods
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.8 renamed async_copy_global_to_shared and async_copy_shared_to_global; 3.9 keeps the old names to raise an error.
if hasattr(tma, "async_load"):
    tma_load = tma.async_load
    tma_store = tma.async_store
else:
    tma_load = tma.async_copy_global_to_shared
    tma_store = tma.async_copy_shared_to_global

if hasattr(gluon, "aggregate"):
    aggregate = gluon.aggregate
else:
    from triton.language import core

    aggregate = core._aggregate

__all__ = ["aggregate", "tma_load", "tma_store"]
