"""flash_attention_fp8 by names that the suite can put on trial, with the arithmetic of each declared:

    pytest flashattn-suite/fp8 --flashattn-impl=reference_kernels.fp8.variants:hopper

triton                plain Triton
hopper                the Hopper kernel, in which the tensor cores sum over all keys
hopper_interleaved    the same with the keys of V in the order that needs no exchange of registers

The Hopper kernel reads V by columns: here it is copied first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..tiles import INTERPRETED
from .api import flash_attention_fp8
from .hopper.configs import TABLE
from .hopper.interleaving import interleave_keys
from .quantiser import by_columns

_FEATURES = frozenset(["causal", "cross", "gqa", "scale", "lse", "descale_tensor", "descale_head", "descale_block"])


def _hopper(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    return flash_attention_fp8(q, k, by_columns(v), kernel="hopper", **options)


def _interleaved(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    return flash_attention_fp8(q, k, interleave_keys(v), kernel="hopper", v_interleaved=True, **options)


def _declared(function: Any, **facts: Any) -> Any:
    """The function, with the fields of its `pytest_flashattn.Support` attached."""
    function = partial(function)
    function.__flashattn__ = {"p_dtype": "e4m3", "p_scale": 256.0, **facts}
    return function


triton = _declared(
    partial(flash_attention_fp8, kernel="triton"),
    features=_FEATURES | {"dv"},
    dtypes={"e4m3", "e5m2"},
    max_head_dim=256,
    fp8_sums="fp32" if INTERPRETED.value else "14 bits a tile",
)

_HOPPER: dict[str, Any] = {
    "features": _FEATURES,
    "dtypes": {"e4m3"},
    "head_dims": set(TABLE),
    "fp8_sums": "14 bits",
    "devices": {"cuda"},
}
hopper = _declared(_hopper, **_HOPPER)
hopper_interleaved = _declared(_interleaved, **_HOPPER)
