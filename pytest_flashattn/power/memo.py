"""The oracles' answers, remembered: they depend on the case, not on who is on trial.

Between two calls no answer is kept as a tensor, since some mutants search the process for one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import oracles


class Memo:
    """Answers by the content of the arguments."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, Any] = {}

    def forget(self) -> None:
        self._answers.clear()

    def remembering(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which must depend on nothing but its arguments: tensors, numbers, dataclasses of them."""

        def call(*args: Any, **options: Any) -> Any:
            key = function, _key(args), _key(options)
            if key not in self._answers:
                self._answers[key] = _frozen(function(*args, **options))
            return _thawed(self._answers[key])

        return call


@contextmanager
def oracles_remembered() -> Iterator[Memo]:
    """In this process, `oracles.evaluate` and `oracles.emulate` remember their answers until `Memo.forget`."""
    memo = Memo()
    with (
        mock.patch.object(oracles, "evaluate", memo.remembering(oracles.evaluate)),
        mock.patch.object(oracles, "emulate", memo.remembering(oracles.emulate)),
    ):
        yield memo


def _key(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        flat = x.detach().cpu().contiguous()
        content = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""
        return x.dtype, x.shape, x.device, hashlib.blake2b(content).digest()
    if dataclasses.is_dataclass(x):
        return type(x), *(_key(getattr(x, f.name)) for f in dataclasses.fields(x))
    if isinstance(x, dict):
        return tuple((name, _key(value)) for name, value in sorted(x.items()))
    if isinstance(x, tuple):
        return tuple(map(_key, x))
    assert isinstance(x, Hashable)
    return x


@dataclasses.dataclass(frozen=True)
class _Frozen:
    storage: torch.UntypedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _frozen(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _Frozen(x.untyped_storage(), x.dtype, x.shape, x.stride(), int(x.storage_offset()))
    if isinstance(x, oracles.Truth):
        return oracles.Truth(*(_frozen(part) for part in (x.value, x.random, x.fixed)))
    return {name: _frozen(value) for name, value in x.items()}


def _thawed(x: Any) -> Any:
    if isinstance(x, _Frozen):
        tensor = torch.empty(0, dtype=x.dtype, device=x.storage.device)
        return tensor.set_(x.storage, x.offset, x.shape, x.stride).clone()
    if isinstance(x, oracles.Truth):
        return oracles.Truth(*(_thawed(part) for part in (x.value, x.random, x.fixed)))
    return {name: _thawed(value) for name, value in x.items()}
