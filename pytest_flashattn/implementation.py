"""The implementation under test: loading it by name, describing it, calling it by the contract.

Whatever its own convention is, `Implementation.call` takes and returns canonical tensors, and turns every way of
breaking the contract, except wrong numbers, into one sentence.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .conventions import Convention, declared, layers, relayout
from .features import DTYPES, FEATURES, FP8
from .known_apis import CONVENTIONS, infer
from .memory import exhausted
from .support import Support


class UnknownImplementation(ValueError):
    """The implementation, its convention or its support cannot be found or understood; a sentence with the remedy."""


class ImplementationError(Exception):
    """The implementation raised, or returned something that is not the contract's (out, lse); one sentence."""


class Unsupported(ImplementationError):
    """The implementation raised NotImplementedError: it says that it cannot do this."""


@dataclass
class Implementation:
    """A function under test, understood.

    spec: how the user named it ("module:attribute"). name: its last part, for tables. device: where to call it.
    """

    spec: str
    name: str
    function: Callable[..., Any]
    convention: Convention
    support: Support
    device: torch.device

    def describe(self) -> str:
        """One line: "mykernels:attn, canonical call; fp16 bf16; causal gqa lse backward"."""
        dtypes = " ".join(d for d in (*DTYPES, *FP8) if d in self.support.dtypes)
        features = " ".join(f for f in FEATURES if f in self.support.features)
        declared = [f"P in {self.support.p_dtype}"] if self.support.p_dtype else []
        if self.support.dtypes & set(FP8):
            scaled, short = self.support.p_scale != 1, self.support.fp8_sums != "fp32"
            declared += [f"P times {self.support.p_scale:g} in FP8"] if scaled else []
            declared += [f"FP8 products summed in {self.support.fp8_sums}"] if short else []
        declared += ["tf32 products"] if self.support.tf32 else []
        declared += ["gradients summed in the input dtype"] if self.support.gradient_sums == "input" else []
        declared += ["top-left diagonal"] if self.support.alignment == "top-left" else []
        said = [f"{self.spec}, {self.convention.name} call", dtypes, features or "no features", *declared]
        return "; ".join(said)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], *, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Call the implementation by the contract, whatever its own convention is.

        q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), any strides: passed as views, never copied.
        options: the keywords of the contract that differ from their defaults. One that the convention cannot express is
        passed under its canonical name, so that an honest function refuses it.
        Returns out (B, Hq, Lq, Dv) in q's dtype (FP8: bf16) and lse (B, Hq, Lq) float32, natural log, or None when not
        asked for.
        Raises Unsupported for its NotImplementedError, ImplementationError for any other exception and for a return
        value of another kind, shape, dtype or device. Running out of memory is no verdict on it and passes through.
        """
        said = {**options, "return_lse": True} if return_lse else dict(options)
        if "b" in self.convention.layout:
            return self._call(q, k, v, said, return_lse)
        entries = [[x[b : b + 1] for x in (q, k, v)] for b in range(q.shape[0])]
        rows = [self._call(one_q, one_k, one_v, said, return_lse) for one_q, one_k, one_v in entries]
        lses = [lse for _, lse in rows if lse is not None]
        return torch.cat([out for out, _ in rows]), torch.cat(lses) if lses else None

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, said: Mapping[str, Any], return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        positional, keywords = self.convention.arguments(q, k, v, said)
        try:
            with _ignoring(self.convention.ignore_warning):
                returned = self.function(*positional, **keywords)
        except NotImplementedError as error:
            raise Unsupported(self.raised(error)) from error
        except Exception as error:
            if exhausted(error):
                raise
            raise ImplementationError(self.raised(error)) from error

        out, lse = self._unpack(returned, return_lse)
        sizes = {"b": q.shape[0], "h": q.shape[1], "s": q.shape[2], "d": v.shape[3]}
        layout, lse_layout = self.convention.layout, self.convention.lse_layout
        dtype = torch.bfloat16 if q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else q.dtype
        out = relayout(self._checked("out", out, layout, sizes, dtype, q.device), layout, "bhsd")
        if not return_lse:
            return out, None
        lse = self._checked("lse", self.convention.lse_from(lse), lse_layout, sizes, torch.float32, q.device)
        lse = relayout(lse, lse_layout, "bhs")
        return out, lse if self.convention.lse_base == math.e else lse * math.log(self.convention.lse_base)

    def raised(self, error: Exception) -> str:
        """What the implementation raised, and where in its own code, as a clause."""
        return f"raised {_first_line(error)}{_where(error, self.function)}"

    def _unpack(self, returned: Any, return_lse: bool) -> tuple[Any, Any]:
        """(out, lse) of what the function returned; neither is checked yet."""
        if returned is None:
            raise ImplementationError("returned None; an implementation returns its output, even if it fills a buffer")
        packed = isinstance(returned, (tuple, list))
        values = list(returned) if packed else [returned]
        wanted = 2 if return_lse else 1
        # (out,) is not out: a tuple is right only where the contract or the convention has one.
        if (packed == return_lse and len(values) == wanted) or (
            packed and self.convention.extras and len(values) >= wanted
        ):
            return values[0], values[1] if return_lse else None
        got = f"a {type(returned).__name__} of {len(values)}" if packed else _kind(returned)
        asked = "(out, lse), as return_lse asks" if return_lse else "one tensor, since return_lse was not given"
        raise ImplementationError(f"returned {got}; expected {asked}")

    def _checked(
        self, what: str, value: Any, layout: str, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """`value`, when it is a tensor as expected, with axes in the order of `layout`."""
        if not isinstance(value, Tensor):
            raise ImplementationError(f"returned {_kind(value)} as {what}; expected a tensor")
        if type(value) not in (Tensor, torch.nn.Parameter):
            # A subclass may compute when it is read, or not be what it shows: nothing measured of it would count.
            raise ImplementationError(f"returned {what} as {_article(type(value).__name__)}; expected a plain tensor")
        expected = tuple(sizes[axis] for axis in layout)
        if (shape := tuple(value.shape)) != expected:
            hint = ""
            swapped = layout.translate(str.maketrans("hs", "sh"))
            if shape == tuple(sizes[axis] for axis in swapped):
                hint = f", which is ({', '.join(_AXES[axis] for axis in swapped)})"
                if remedy := {"bshd": "bshd", "bhsd": "canonical"}.get(swapped):
                    hint += f": if it works in that layout, say --flashattn-convention={remedy}"
            raise ImplementationError(f"returned {what} of shape {shape}, expected {expected}{hint}")
        if value.dtype != dtype:
            raise ImplementationError(f"returned {what} in {_short(value.dtype)}, expected {_short(dtype)}")
        if value.device != device:
            raise ImplementationError(f"returned {what} on {value.device}, expected {device}")
        return value


_AXES = {"b": "B", "h": "H", "s": "L", "d": "D"}


def load(
    spec: str | Callable[..., Any],
    *,
    convention: str | None = None,
    support: str | Support | None = None,
    device: str = "auto",
) -> Implementation:
    """The implementation named "module:attribute" (dots allowed in both), or the callable itself.

    convention: a name in CONVENTIONS; None: inferred. support: "module:attribute" of a Support, or one; None: attached
    to the function, or inferred. device: "auto" takes CUDA where there is one, within what the support names.
    Raises UnknownImplementation, in one sentence with the remedy.
    """
    function = _resolve(spec, "an implementation") if isinstance(spec, str) else spec
    label = spec if isinstance(spec, str) else _label(spec)
    if inspect.isclass(function):
        raise UnknownImplementation(f"{label} is a class: name an instance of it, or a function that calls one")
    if not callable(function):
        raise UnknownImplementation(f"{label} is {_kind(function)}, which cannot be called: name a function")
    if convention is not None and convention not in CONVENTIONS:
        raise UnknownImplementation(
            f"convention {convention!r} is unknown{_nearest(convention, CONVENTIONS)}; known: {', '.join(CONVENTIONS)}"
        )
    try:
        chosen, served = infer(function, None if convention is None else CONVENTIONS[convention])
        attached = declared(function) is not None
    except ValueError as error:
        raise UnknownImplementation(f"{label} {error}") from error
    if support is not None:
        served, attached = _support(support), True
    if device == "auto":
        device = _pick_device(served.devices)
    if not attached:  # a declaration is taken at its word
        kind = device.partition(":")[0]
        served = replace(
            served,
            features=served.features - chosen.lacks_on.get(kind, frozenset()),
            gradient_sums=chosen.sums_on.get(kind, served.gradient_sums),
        )
    return Implementation(label, label.rpartition(":")[2], function, chosen, served, torch.device(device))


def _support(support: str | Support) -> Support:
    if isinstance(support, Support):
        return support
    found = _resolve(support, "a support")
    if not isinstance(found, Support):
        raise UnknownImplementation(f"{support} is {_kind(found)}; a support is a pytest_flashattn Support(...)")
    return found


def _pick_device(wanted: Iterable[str]) -> str:
    # Without any of the wanted devices the first is named all the same: the capability check reports it as unmet.
    choices = sorted(wanted, key=lambda d: (d != "cuda", d)) or ["cuda", "cpu"]
    return next((d for d in choices if present(d)), choices[0])


def present(device: str) -> bool:
    """Whether this machine has a device of this type ("cpu", "cuda", …)."""
    if device == "cpu":
        return True
    backend = getattr(torch, device, None)
    return backend is not None and bool(backend.is_available())


@contextlib.contextmanager
def _ignoring(warning: str | None) -> Iterator[None]:
    if warning is None:  # catch_warnings is not free: it makes every "once" warning appear again
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", warning)
        yield


# -- names to objects -------------------------------------------------------------------------------------------------


def _resolve(spec: str, what: str) -> Any:
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        parent, dot, last = spec.rpartition(".")
        hint = f", perhaps {parent}:{last}" if dot and not colon and last != "py" else ""
        raise UnknownImplementation(f"{spec!r} does not name {what}: write module:attribute{hint}")
    if module_name.endswith(".py") or os.sep in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise UnknownImplementation(f"{spec!r} names a file: write the module, {dotted}:{path}")
    found: Any = _import(module_name)
    walked = module_name
    for number, name in enumerate(path.split(".")):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            nearest = _nearest(name, [n for n in dir(found) if not n.startswith("_")])
            raise UnknownImplementation(f"{walked} has no attribute {name!r}{nearest}") from error
        except Exception as error:  # a lazy module imports now
            raise UnknownImplementation(f"{walked} cannot give {name!r}: {_first_line(error)}") from error
        walked += f"{'.' if number else ':'}{name}"
    return found


def _import(name: str) -> Any:
    here = os.getcwd()
    if not {"", here} & set(sys.path):  # as `python -m` does; the pytest command does not
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            if f"{name}.".startswith(f"{error.name}."):
                raise UnknownImplementation(
                    f"there is no module {error.name!r} in {here} or on sys.path: install it, or set PYTHONPATH to it"
                ) from error
            raise UnknownImplementation(
                f"module {name!r} is there but needs {error.name!r}, which is not: {_first_line(error)}"
            ) from error
        raise UnknownImplementation(f"module {name!r} does not import: {_first_line(error)}{_where(error)}") from error


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


# -- words for sentences ----------------------------------------------------------------------------------------------


def _label(function: Any) -> str:
    owner = next((layer for layer in layers(function) if hasattr(layer, "__qualname__")), type(function))
    return f"{owner.__module__}:{owner.__qualname__}"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    return _article(type(value).__name__)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    message = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _where(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """ " (at file:line)" of the innermost frame in the code of `function`, else of the innermost frame not ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in _OUR_FRAMES]
    frames = [f for f in frames if not f.filename.startswith("<frozen")]
    home = _home(function)
    own = [f for f in frames if home is not None and Path(f.filename).is_relative_to(home)]
    if not (frames := own or frames):
        return ""
    path = os.path.relpath(frames[-1].filename)
    return f" (at {frames[-1].filename if path.startswith(os.pardir) else path}:{frames[-1].lineno})"


_OUR_FRAMES = frozenset({__file__, importlib.__file__})


def _home(function: Callable[..., Any] | None) -> Path | None:
    """The file of the innermost layer of `function`, or the top directory of its package; None when it has none."""
    for layer in reversed(list(layers(function))):
        name = getattr(layer, "__module__", None) or type(layer).__module__
        top = sys.modules.get(name.partition(".")[0])
        if path := getattr(top, "__path__", None):
            return Path(path[0])
        if file := getattr(top, "__file__", None):
            return Path(file)
    return None
