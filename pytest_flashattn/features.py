"""The vocabulary of features: what an attention function may or may not be able to do.

One word a feature, used everywhere: in `Support`, in case ids, in `--flashattn-require`, in the summary table.
"""

from __future__ import annotations

FEATURES: dict[str, str] = {
    "causal": "rows see only keys up to their diagonal",
    "cross": "queries and keys of different lengths (Lq != Lk)",
    "gqa": "fewer key/value heads than query heads",
    "dv": "a value head dim that differs from the query/key head dim",
    "scale": "a softmax scale other than D^-0.5",
    "window": "a two-sided sliding window (left, right)",
    "softcap": "scores capped by c * tanh(s / c)",
    "alibi": "ALiBi slopes, one a head",
    "bias": "an additive bias broadcastable to (B, Hq, Lq, Lk)",
    "mask": "a boolean mask broadcastable to (B, Hq, Lq, Lk), True = visible",
    "sinks": "one learned extra logit a head in the denominator",
    "lse": "returns the log-sum-exp of the scores",
    "backward": "gradients of q, k, v through torch autograd",
    "bias_grad": "a gradient for the additive bias",
    "sinks_grad": "a gradient for the sinks",
    "lse_grad": "gradients that flow through the returned log-sum-exp",
    "descale_tensor": "FP8 q, k and v, each with one descale",
    "descale_group": "FP8 with one descale a kv head, for q too: (B, Hkv), as FlashAttention-3 has it",
    "descale_head": "FP8 with one descale a head: (B, H)",
    "descale_block": "FP8 with one descale a block of rows: (B, H, ceil(L / block))",
}

DTYPES: tuple[str, ...] = ("fp16", "bf16", "fp32")
"""Short names of dtypes that a case can have; every implementation is taken to serve them unless it says otherwise."""

FP8: tuple[str, ...] = ("e4m3", "e5m2")
"""The others: float8_e4m3fn and float8_e5m2, with descales. `TORCH_DTYPES` of `inputs.py` translates both."""

DESCALES: tuple[str, ...] = ("tensor", "group", "head", "block")
"""What shares a descale; the words of a case id after "descale.", and of features after "descale_"."""

FP8_SUMS: tuple[str, ...] = ("fp32", "14 bits", "14 bits a tile")
"""How products of FP8 are added up, as in `oracles.arithmetic`, which this half of the plugin does not import."""


def unknown(names: object) -> list[str]:
    """The members of `names` that are no feature, sorted; empty when all are known."""
    return sorted(str(n) for n in names if n not in FEATURES)  # type: ignore[attr-defined]
