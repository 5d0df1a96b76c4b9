"""What the compile lane compiles: one kernel with the types and constants of its arguments, without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel.

    kernel: the JITFunction (under the interpreter it is none, and cannot be compiled). signature: argument name to
    Triton type ("*bf16", "i32", "fp32", "constexpr"; "i32:16" is a multiple of 16, as strides usually are: without
    it loads are not vectorised). constexprs: the values of those that are "constexpr".
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int
    num_stages: int


def specialise(
    name: str,
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, object],
    scalars: Mapping[str, str],
    *,
    num_warps: int,
    num_stages: int,
) -> CompileCase:
    """A case from what is special about it: all other arguments of `kernel` are strides and lengths.

    pointers: argument to element type. constants: argument to value, None for an option that is absent. Strides of the
    last dimension ("…_d", "…_k") of a tensor that is present are 1, the others multiples of 16.
    """
    signature: dict[str, str] = {}
    constexprs: dict[str, object] = {}
    for argument in inspect.signature(kernel.fn).parameters:
        tensor, _, axis = argument.rpartition("_")
        if argument in pointers:
            signature[argument] = f"*{pointers[argument]}"
        elif argument in scalars:
            signature[argument] = scalars[argument]
        elif argument in constants:
            signature[argument], constexprs[argument] = "constexpr", constants[argument]
        elif tensor and constants.get(tensor, 0) is None:  # the stride of an absent tensor
            signature[argument], constexprs[argument] = "constexpr", 0
        elif tensor and axis in ("d", "k"):
            signature[argument], constexprs[argument] = "constexpr", 1
        else:
            signature[argument] = "i32:16" if tensor else "i32"
    return CompileCase(name, kernel, signature, constexprs, num_warps, num_stages)
