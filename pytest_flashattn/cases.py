"""A case: one attention problem, frozen, with a readable id that is also its source.

    bf16-b2-h8-kv2-q1023-k1024-d128-causal

An id names everything that shapes the problem except the run's seed; `Case.parse(case.id) == case`. The tensors of a
case are drawn from its id and seed (`inputs.py`), so nothing depends on the order of the tests.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields
from functools import cached_property

from .features import DESCALES, DTYPES, FP8

LAYOUTS: dict[str, str] = {
    "plain": "contiguous in the implementation's own order of axes",
    "swapped": "contiguous in the other order: (B, L, H, D) memory for a (B, H, L, D) implementation and vice versa",
    "qkv": "q, k and v are views of one fused (B, L, Hq + 2 Hkv, D) buffer",
    "padded": "rows lie further apart than D, with NaN between them",
    "unaligned": "a storage offset of one element: the base address is not 16-byte aligned",
    "expanded": "k and v are expanded over the batch with stride 0",
    "headless": "k and v are expanded over their heads with stride 0, q over the batch",
    "mixed": "q and v in one order of axes, k in the other",
    "dmajor": "the head dim is not the fastest axis (stride(-1) != 1)",
    "cache": "k and v are the first rows of longer buffers, with NaN in the rows behind them",
    "far": "batch elements of q, k and v lie so far apart that the last starts 2^31 elements behind the first",
}
DOUTS: dict[str, str] = {
    "plain": "contiguous like the output",
    "swapped": "contiguous in the other order of axes",
    "expanded": "one scalar expanded with stride 0, as sum().backward() makes it",
    "padded": "rows lie further apart than Dv",
    "zero": "all zero: every gradient must be exactly zero",
}
FAMILIES: dict[str, str] = {
    "normal": "N(0, 1)",
    "peaked": "q six times larger: a few keys dominate each row",
    "ascending": "scores rise with the key index: the running maximum moves in every tile",
    "descending": "scores fall with the key index: the first tile holds the maximum",
    "outlier": "one element in a thousand is twenty times larger",
    "channel": "one channel of q and k is fifty times larger",
    "offset": "all logits share an offset of +1e5",
    "negoffset": "all logits share an offset of -1e5",
    "constant": "q and k are constant: every key weighs the same",
    "zerorows": "every third row of q and of k is zero",
    "vmean": "v has a mean of 5",
    "sinktoken": "key 0 attracts most of every row, as in trained models",
    "tiny": "v is so small that its products are subnormal in fp16",
    "zeroblocks": "in runs of 128 rows, every third of q, k and v is zero, as is the last head of v",
}
BIASES: tuple[str, ...] = ("1111", "b111", "1h11", "11qk", "bhqk", "b11k", "1hqk", "b1qk")
"""Broadcast patterns of bias and mask: a letter where the axis is full, 1 where it is broadcast."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem. Lengths in tokens, dims in elements; None: the default of the contract.

    holes: the additive bias is -inf at some keys, and in one whole row, as callers mask with it.
    descale: what shares a descale ("tensor", "group", "head", "block"); with dtypes e4m3 and e5m2, and only with them.

    Raises ValueError for a combination that is no attention problem (heads not divisible, an unknown word, …).
    """

    dtype: str = "bf16"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 0  # 0: as many as heads
    q: int = 128
    k: int = 128
    d: int = 64
    dv: int = 0  # 0: as d
    causal: bool = False
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: str | None = None
    mask: str | None = None
    holes: bool = False
    sinks: bool = False
    descale: str | None = None
    layout: str = "plain"
    dout: str = "plain"
    family: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.dv:
            object.__setattr__(self, "dv", self.d)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        for name, known in (("dtype", (*DTYPES, *FP8)), ("layout", LAYOUTS), ("dout", DOUTS), ("family", FAMILIES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        if self.descale is not None and self.descale not in DESCALES:
            raise ValueError(f"descale={self.descale!r} is unknown; known: {', '.join(DESCALES)}")
        if (self.dtype in FP8) != (self.descale is not None):
            raise ValueError(f"descales come with {' and '.join(FP8)}, and these with descales: add e.g. descale.head")
        for name in ("bias", "mask"):
            if getattr(self, name) is not None and getattr(self, name) not in BIASES:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(BIASES)}")
        if self.bias and self.mask:
            raise ValueError("bias and mask share one argument of the contract: a case has one of them")
        if self.holes and not self.bias:
            raise ValueError("holes are -inf in an additive bias: the case needs one")
        if self.layout == "qkv" and (self.q != self.k or self.d != self.dv):
            raise ValueError("layout=qkv needs Lq == Lk and Dv == D: the three are views of one buffer")
        if self.layout == "far" and self.batch < 2:
            raise ValueError("layout=far needs batch >= 2: it is the batch elements that lie far apart")
        if self.window == (None, None):
            raise ValueError("window=(None, None) is no window; write window=None")

    @cached_property
    def id(self) -> str:
        parts = [self.dtype, f"b{self.batch}", f"h{self.heads}"]
        if self.kv_heads != self.heads:
            parts.append(f"kv{self.kv_heads}")
        parts += [f"q{self.q}", f"k{self.k}", f"d{self.d}"]
        if self.dv != self.d:
            parts.append(f"dv{self.dv}")
        if self.causal:
            parts.append("causal")
        if self.scale is not None:
            parts.append(f"scale{_number(self.scale)}")
        if self.window is not None:
            parts.append("w" + ".".join("x" if side is None else _number(side) for side in self.window))
        if self.softcap is not None:
            parts.append(f"cap{_number(self.softcap)}")
        if self.alibi:
            parts.append("alibi")
        if self.bias:
            parts.append(f"bias.{self.bias}")
        if self.mask:
            parts.append(f"mask.{self.mask}")
        if self.holes:
            parts.append("holes")
        if self.sinks:
            parts.append("sinks")
        if self.descale:
            parts.append(f"descale.{self.descale}")
        if self.layout != "plain":
            parts.append(self.layout)
        if self.dout != "plain":
            parts.append(f"do.{self.dout}")
        if self.family != "normal":
            parts.append(self.family)
        return "-".join(parts)

    @classmethod
    def parse(cls, text: str, *, seed: int = 0) -> Case:
        """The case with this id. Raises ValueError naming the part that is not understood."""
        values: dict[str, object] = {"seed": seed}
        for part in text.split("-"):
            field, value = _parse_part(part, text)
            if field in values:
                raise ValueError(f"case id {text!r}: {field} is given twice")
            values[field] = value
        try:
            return cls(**values)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"case id {text!r}: {error}") from None

    @cached_property
    def features(self) -> frozenset[str]:
        """The words of `features.FEATURES` that an implementation needs for this case."""
        wanted = {
            "causal": self.causal,
            "cross": self.q != self.k,
            "gqa": self.kv_heads != self.heads,
            "dv": self.dv != self.d,
            "scale": self.scale is not None,
            "window": self.window is not None,
            "softcap": self.softcap is not None,
            "alibi": self.alibi,
            "bias": self.bias is not None,
            "mask": self.mask is not None,
            "sinks": self.sinks,
            f"descale_{self.descale}": self.descale is not None,
        }
        return frozenset(name for name, needed in wanted.items() if needed)

    @cached_property
    def rng_seed(self) -> int:
        """63 bits from the id and the seed: the same tensors on every machine, in any order of tests."""
        digest = hashlib.sha256(f"{self.id}|{self.seed}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def __str__(self) -> str:
        return self.id


def _number(value: float) -> str:
    # "-" separates the parts of an id and "." the sides of a window, so a sign is "m" and a decimal point "p".
    return f"{value:g}".replace("-", "m").replace(".", "p").replace("+", "")


def _unnumber(text: str) -> float:
    return float(text.replace("m", "-").replace("p", "."))


_INTEGERS = {"b": "batch", "h": "heads", "kv": "kv_heads", "q": "q", "k": "k", "d": "d", "dv": "dv"}


def _parse_part(part: str, text: str) -> tuple[str, object]:
    if part in DTYPES or part in FP8:
        return "dtype", part
    if part in ("causal", "alibi", "sinks", "holes"):
        return part, True
    if part in FAMILIES:
        return "family", part
    if part in LAYOUTS:
        return "layout", part
    if match := re.fullmatch(r"(bias|mask|do|descale)\.(\w+)", part):
        return {"do": "dout"}.get(match[1], match[1]), match[2]
    if match := re.fullmatch(r"(b|h|kv|q|k|d|dv)(\d+)", part):
        return _INTEGERS[match[1]], int(match[2])
    if match := re.fullmatch(r"scale(m?[\dp]+(?:em?\d+)?)", part):
        return "scale", _unnumber(match[1])
    if match := re.fullmatch(r"cap([\dp]+)", part):
        return "softcap", _unnumber(match[1])
    if match := re.fullmatch(r"w(x|\d+)\.(x|\d+)", part):
        return "window", tuple(None if side == "x" else int(side) for side in match.groups())
    raise ValueError(
        f"case id {text!r}: {part!r} is not understood; an id looks like bf16-b2-h8-kv2-q1023-k1024-d128-causal"
    )


_WORDS = [*DTYPES, *FP8, *LAYOUTS, *FAMILIES, "causal", "alibi", "sinks", "holes"]
assert len(set(_WORDS) - {"plain"}) == len(_WORDS) - 1, "a bare word of an id must have one meaning"

FIELDS: frozenset[str] = frozenset(f.name for f in fields(Case))
"""The names of the fields of a case: what a row of matrices.toml may set."""
