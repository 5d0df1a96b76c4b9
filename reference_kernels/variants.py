"""flash_attention with the choice of kernel taken away, by names that the suite can put on trial:

    pytest --flashattn-impl=reference_kernels.variants:hopper

triton                  the plain Triton kernels
specialised             the forward whose warps the compiler specialises, in the interpreter; on a GPU it refuses
hopper                  the Hopper kernels; what they do not serve they refuse
hopper_deterministic    the same, with the backward that repeats its bits
"""

from __future__ import annotations

from functools import partial

from .api import flash_attention

triton = partial(flash_attention, kernel="triton")
specialised = partial(flash_attention, kernel="specialised")
hopper = partial(flash_attention, kernel="hopper")
hopper_deterministic = partial(hopper, deterministic=True)
