"""The plugin's options: one table for the command line and the ini file, and the frozen `Settings` made from it.

The command line wins over the ini file, the ini file over the default. A bad value is a usage error of one sentence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from .features import DTYPES, FEATURES, FP8

LEVELS = ("smoke", "default", "full")  # matrices.LEVELS, repeated so that start-up reads no table
SUITE_MODES = ("auto", "always", "never")
HARDWARE = ("sm80", "sm90", "sm100", "fp8")
"""Words of hardware: markers, and words of --flashattn-require."""


@dataclass(frozen=True)
class Option:
    """One row of the table. `ini`: the key exists in the ini file too. `repeat`: a list on both sides."""

    name: str
    default: Any
    metavar: str
    help: str
    ini: bool = True
    repeat: bool = False
    parse: Callable[[str], Any] = str

    @property
    def flag(self) -> str:
        return f"--flashattn-{self.name}"

    @property
    def key(self) -> str:
        return f"flashattn_{self.name}"


def _one_of(*known: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r} is none of {', '.join(known)}")
        return text

    return parse


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError(f"{text!r} is no device; write auto, cpu, cuda or cuda:N")
    return text


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise ValueError(f"{text!r} is no seed; write a whole number, 0 or more")
    return int(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text):
        raise ValueError(f"{text!r} is no number of cases; write a whole number such as 200")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?", text):
        raise ValueError(f"{text!r} is no number of seconds; write for instance 60, or 0 for no limit")
    return float(text)


def _words(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    known = (*FEATURES, *DTYPES, *FP8, *HARDWARE)
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return words


OPTIONS: tuple[Option, ...] = (
    Option("impl", (), "MODULE:ATTRIBUTE", "the attention function on trial; the bundled suite then runs on it. "
           "Give it several times to compare several side by side", repeat=True),
    Option("suite", "auto", "WHEN", "when the bundled suite is collected: 'auto' (an implementation is named and no "
           "paths are given), 'always' (whatever paths are given), 'never'", parse=_one_of(*SUITE_MODES)),
    Option("convention", None, "NAME", "how the implementation is called, if its signature does not tell: "
           "the name of a calling convention"),
    Option("support", None, "MODULE:ATTRIBUTE", "a pytest_flashattn.Support that says what the implementation can do, "
           "instead of what its signature tells"),
    Option("matrix", "default", "LEVEL", "how many cases a check runs on: 'smoke' (seconds), 'default' (every pair of "
           "values), 'full'", parse=_one_of(*LEVELS)),
    Option("fuzz", 0, "N", "draw N more cases (chapter fuzz) from all that an implementation declares, and shrink one "
           "that fails to the smallest; needs Hypothesis", ini=False, parse=_count),
    Option("seed", 0, "N", "seed of all tensors and drawn cases; the same seed gives the same ones on every machine",
           parse=_seed),
    Option("device", "auto", "DEVICE", "where cases run: auto (CUDA if there is a device), cpu, cuda or cuda:N",
           parse=_device),
    Option("json", None, "PATH", "write every result to PATH as JSON, also when the run is cut short", ini=False),
    Option("expect", None, "PATH", "failures you expect, as TOML, each with its reason; "
           "flashattn-expect.toml in the root directory is read unasked"),
    Option("require", (), "WORDS", "features, dtypes or hardware (sm80, sm90, sm100, fp8) that must be verified, "
           "separated by commas: lacking one is a failure", parse=_words),
    Option("baseline", None, "MODULE:ATTRIBUTE", "chapter performance: the attention function to compare with, in "
           "turns in the same run; without it the bundled kernel of the device"),
    Option("thresholds", "ratio", "NAME", "chapter performance: when a time is good enough: 'ratio' (to the "
           "baseline), 'chapter' (also TFLOP/s of the FlashAttention chapter, on its GPU), or the path of a TOML file"),
    Option("timeout", 300.0, "SECONDS", "a case that takes longer is a hang: it fails, and the process ends; "
           "0: no limit", parse=_seconds),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the user asked for. Every field is named after its option."""

    impl: tuple[str, ...]
    suite: str
    convention: str | None
    support: str | None
    matrix: str
    fuzz: int
    seed: int
    device: str
    json: Path | None
    expect: Path | None
    require: tuple[str, ...]
    baseline: str | None
    thresholds: str
    timeout: float

    def names(self) -> dict[str, str]:
        """A short name for each implementation, without importing it: `attn`, or `mykernels.attn` if two share it."""
        tails = [spec.rpartition(":")[2] for spec in self.impl]
        return {
            (tail if tails.count(tail) == 1 else spec.replace(":", ".")): spec
            for spec, tail in zip(self.impl, tails, strict=True)
        }

    def replay_options(self, spec: str) -> str:
        """The options, ready to paste, that put `spec` on trial as this run did; defaults are left out."""
        chosen = [f"--flashattn-impl={shlex.quote(spec)}"]
        for option in OPTIONS:
            if option.name in ("convention", "support", "matrix", "seed", "device", "baseline", "thresholds"):
                value = getattr(self, option.name)
                if value != option.default:
                    chosen.append(f"{option.flag}={shlex.quote(str(value))}")
        return " ".join(chosen)


SETTINGS = pytest.StashKey[Settings]()


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashattn", "flashattn: attention implementations on trial against float64 oracles")
    for option in OPTIONS:
        ini = f" (ini key: {option.key})" if option.ini else ""
        group.addoption(
            option.flag,
            dest=option.key,
            action="append" if option.repeat else "store",
            default=None,
            metavar=option.metavar,
            help=option.help.replace("%", "%%") + ini,
        )
        if option.ini:
            # No default here: an ini key that is absent must be told from one that repeats the default.
            kind: Literal["linelist", "string"] = "linelist" if option.repeat else "string"
            parser.addini(option.key, option.help, type=kind, default=None)


def read(config: pytest.Config) -> Settings:
    """The settings of this run. Raises UsageError for a value that cannot be used."""
    values = {option.name: _value(config, option) for option in OPTIONS}
    values["impl"] = tuple(dict.fromkeys(values["impl"]))
    for name in ("json", "expect"):
        if values[name] is not None:
            values[name] = config.invocation_params.dir / values[name]
    return Settings(**values)


def _value(config: pytest.Config, option: Option) -> Any:
    source, raw = option.flag, config.getoption(option.key)
    if raw is None and option.ini:
        source, raw = f"ini key {option.key}", config.getini(option.key)
    if raw is None or raw == [] or (raw == "" and source != option.flag):
        return option.default
    try:
        return tuple(option.parse(text) for text in raw) if option.repeat else option.parse(raw)
    except ValueError as error:
        raise pytest.UsageError(f"{source}: {error}") from None
