"""What attention is, in float64, and how wrong a kernel may be: the oracles of pytest-flashattn.

    spec        AttentionSpec, Segments: the options of a problem
    dense       forward, probabilities, backward: the definition, with the whole score matrix
    streaming   forward, backward: the same in O(L) memory, written independently
    merge       joins attention over disjoint sets of keys
    bounds      evaluate: true outputs and a bound on every element's error; Arithmetic, Truth
    quantise    FP8 values and descales; the Hadamard rotation of outliers
    truncated   sums of FP8 products in 14 bits, as Hopper's tensor cores make them
    emulator    emulate: a flash-attention kernel in plain PyTorch, the noise floor

Part of the distribution pytest-flashattn; imports torch and the standard library only, and works by itself:

    spec = AttentionSpec(causal=True)
    truth = evaluate(q, k, v, spec, arithmetic=Arithmetic.of(q.dtype))["o"]
    assert ((my_attention(q, k, v) - truth.value).abs() <= truth.limit(3.0)).all()
"""

from . import dense, streaming
from .bounds import Arithmetic, Truth, evaluate
from .dense import Attention, Gradients
from .emulator import emulate
from .merge import merge
from .spec import AttentionSpec, Segments

__all__ = [
    "Arithmetic",
    "Attention",
    "AttentionSpec",
    "Gradients",
    "Segments",
    "Truth",
    "dense",
    "emulate",
    "evaluate",
    "merge",
    "streaming",
]
