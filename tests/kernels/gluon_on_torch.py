"""Runs the Python source of Gluon functions on torch tensors: there is no interpreter for Gluon.

A function of a kernel is taken out of its decorator and given other globals: `gl` becomes `Language`, constants become
what they hold, and what has no meaning without a GPU (barriers, TMA, matrix units) is replaced by the caller. What is
left is what the source says about numbers, indices and the order of tiles. Layouts are ignored, and nothing runs at the
same time: it says nothing of races, registers or PTX.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Int(int):
    """An int as a kernel has it: the result of arithmetic is one too, and `to` casts it."""

    def to(self, dtype: Any) -> Int:
        return self

    def __add__(self, other: Any) -> Any:
        return Int(int(self) + int(other)) if isinstance(other, int) else int(self) + other

    def __mul__(self, other: Any) -> Any:
        return Int(int(self) * int(other)) if isinstance(other, int) else int(self) * other

    __radd__, __rmul__ = __add__, __mul__


class Pointer:
    """An address in a flat tensor."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


def pointer(x: Tensor) -> Pointer:
    """A pointer to the first element of x, from which its strides count."""
    size = x.untyped_storage().nbytes() // x.element_size()
    return Pointer(torch.as_strided(x, (size,), (1,), 0), x.storage_offset())


def _largest(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    # A NaN is not returned, as on a GPU.
    return torch.fmax(torch.as_tensor(a, dtype=torch.float32), torch.as_tensor(b, dtype=torch.float32))


class Language:
    """What kernels call `gl`, as far as it is needed here."""

    float32, int32, int64 = torch.float32, torch.int32, torch.int64
    static_range = range
    maximum = staticmethod(_largest)
    minimum = staticmethod(min)
    split = staticmethod(lambda x: x.unbind(-1))
    join = staticmethod(lambda a, b: torch.stack((a, b), -1))
    permute = staticmethod(lambda x, order: x.permute(order))
    reshape = staticmethod(lambda x, shape: x.reshape(shape))
    convert_layout = staticmethod(lambda x, layout, **words: x)
    cdiv = staticmethod(lambda a, b: -(-a // b))
    max = staticmethod(lambda x, axis: x.amax(axis))
    sum = staticmethod(lambda x, axis: x.sum(axis))
    exp2 = staticmethod(lambda x: torch.as_tensor(x).exp2())
    log2 = staticmethod(lambda x: torch.as_tensor(x).log2())
    NVMMADistributedLayout = DotOperandLayout = SliceLayout = staticmethod(lambda *a, **k: None)

    @staticmethod
    def where(c: Any, a: Any, b: Any) -> Any:
        if isinstance(c, bool):
            return a if c else b
        return torch.where(c, torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def load(p: Pointer) -> Any:
        value = p.memory[p.offset]
        return value if value.is_floating_point() else Int(value)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def full(shape: Sequence[int], value: float, dtype: torch.dtype, layout: Any = None) -> Tensor:
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> Tensor:
        return torch.arange(start, end)

    @staticmethod
    def store(p: Pointer, value: Tensor, mask: Tensor) -> None:
        mask = mask.expand(value.shape)
        p.memory[p.offset[mask]] = value[mask].to(p.memory.dtype)


def on_torch(function: Any, **replaced: Any) -> Callable[..., Any]:
    """The Python function behind a Gluon one, with `replaced` among its globals."""
    while hasattr(function, "fn"):
        function = function.fn
    held = {name: x.value if type(x).__name__ == "constexpr" else x for name, x in function.__globals__.items()}
    names = held | {"gl": Language} | replaced
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def quad_exchange(asm: str, inputs: list[dict[str, object]]) -> list[dict[str, object]]:
    """What the four threads of a quad hold after `asm`; conversions keep the names of what they convert."""

    def value(held: dict[str, object], name: str) -> object:
        return held[name] if name in held else int(name, 0)

    for line in asm.splitlines():
        if not (found := re.fullmatch(r"(\w+)((?:\.\w+)+) (.*);", line)) or found[1] in ("", "reg"):
            continue
        word, dots, rest = found[1], found[2], re.findall(r"[$\w]+", found[3])
        before = [dict(held) for held in inputs]
        for held in inputs:
            to, *names = rest
            if word == "cvt":  # cvt.x2 d, a, b: a becomes the upper half
                held[to] = (held[names[1]], held[names[0]])
            elif word == "mov":
                held[to] = held[names[0]] + held[names[1]]
            elif word == "setp":
                held[to] = value(held, names[0]) != value(held, names[1])
            elif word == "selp":
                held[to] = held[names[0]] if held[names[2]] else held[names[1]]
            elif word == "shfl":
                assert dots == ".sync.idx.b32"
                assert names[2:] == ["0x1c1f", "0xffffffff"]  # lanes are counted within four
                held[to] = before[held[names[1]]][names[0]]
            elif word == "prmt":
                eight = held[names[0]] + held[names[1]]
                held[to] = tuple(eight[value(held, names[2]) >> 4 * i & 7] for i in range(4))
            else:
                raise AssertionError(f"no such instruction here: {line}")
    return inputs
