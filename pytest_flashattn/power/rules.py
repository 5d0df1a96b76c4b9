"""How other projects decide that an attention kernel is right, so that the same faults can be put to their rules.

Each rule is one small function of one output tensor and of what its project compares it with. All rules get our cases
and our inputs, not the few shapes and the N(0, 1) or uniform inputs of their own tests; what is compared comes from
`attempt`, so an exception, an input changed in place and a wrong kind of output are faults under every rule. An option
that a project does not test (sinks, ALiBi, …) is added to its reference as our contract has it; its numbers stand.
Quantities that a project does not compare, most often the log-sum-exp, pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import oracles

from ..attempt import Outputs
from ..cases import Case
from ..implementation import Implementation
from ..inputs import TORCH_DTYPES, Inputs

# -- what they compare with -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """Where a naive attention, which materialises S and P, rounds; products themselves accumulate in float32.

    upcast: q, k, v are float32 from the start, and nothing is rounded. scaled: what is scaled, "q", "k" or "s".
    rounded: S = q k^T is rounded to the input dtype, and so is all that autograd makes of it. wide: softcap, masks and
    softmax are float32, else what S is (ALiBi slopes and sinks, float32 themselves, widen S in any case). P has the
    input dtype.
    """

    upcast: bool = False
    scaled: str = "s"
    rounded: bool = True
    wide: bool = False


STYLES = {
    "float32": Style(upcast=True),  # fa2, fa3, sdpa, xformers, cudnn_frontend
    "naive": Style(),  # allclose_1e2
    "eager": Style(scaled="k"),  # fa2, fa3
    "served": Style(scaled="q", wide=True),  # vllm
    "mixed": Style(rounded=False, wide=True),  # flex
}


@dataclass(frozen=True, eq=False)
class Baseline:
    """What the rules compare with on one case: "o", "lse" and, with gradients, "dq", "dk", "dv", "dbias", "dsinks".

    float64: the oracle. references: a naive attention for each of STYLES; "float32" is not rounded to the input dtype.
    honest: outputs of kernels known to be right; the first is `oracles.emulate`.
    """

    case: Case
    float64: Outputs
    references: dict[str, Outputs]
    honest: tuple[Outputs, ...]

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.case.dtype]

    @cached_property
    def trusted(self) -> dict[str, frozenset[str]]:
        """By name of a rule: the quantities of this case in which it passes all honest kernels."""
        known = set(self.honest[0])
        refused = {
            name: {q for outputs in self.honest for q, x in outputs.items() if not one.passes({q: x}, self)}
            for name, one in RULES.items()
        }
        return {name: frozenset(known - quantities) for name, quantities in refused.items()}


def baseline(
    implementation: Implementation, inputs: Inputs, *, backward: bool = True, honest: Iterable[Outputs] = ()
) -> Baseline:
    """Compute it, once per case; the implementation says only where its diagonal ends (`Support.alignment`).

    backward: with what the gradients are compared with; without it the rules judge "o" and "lse" only.
    honest: what other right kernels return on these inputs. A rule with no room between noise and limit passes one of
    them and fails the next; the more there are, the less of that counts as a catch.
    """
    spec = inputs.spec(implementation.support.alignment)
    o, lse = oracles.dense.forward(inputs.q, inputs.k, inputs.v, spec)
    exact = {"o": o, "lse": lse}
    if backward:
        gradients = oracles.dense.backward(inputs.q, inputs.k, inputs.v, spec, inputs.dout)._asdict()
        exact |= {name: x for name, x in gradients.items() if x is not None}
    references = {name: _reference(inputs, spec, style, backward=backward) for name, style in STYLES.items()}
    emulated = oracles.emulate(inputs.q, inputs.k, inputs.v, spec, do=inputs.dout if backward else None)
    if "dsinks" in emulated and inputs.sinks is not None:
        emulated["dsinks"] = emulated["dsinks"].to(inputs.sinks.dtype)
    return Baseline(inputs.case, exact, references, (emulated, *honest))


def _reference(inputs: Inputs, spec: oracles.AttentionSpec, style: Style, *, backward: bool) -> Outputs:
    """o and lse of a naive attention, and by autograd its gradients, in the dtype of `style`."""
    given = {name: x for name in ("q", "k", "v", "bias", "sinks") if (x := getattr(inputs, name)) is not None}
    leaves = {name: (x.float() if style.upcast else x).detach().requires_grad_(backward) for name, x in given.items()}
    with torch.enable_grad():
        o, lse = _attention(leaves, spec, style)
    out = {"o": o.detach(), "lse": lse.detach()}
    if backward:
        gradients = torch.autograd.grad(o, list(leaves.values()), inputs.dout.to(o.dtype))
        out |= {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return out


def _attention(x: dict[str, Tensor], spec: oracles.AttentionSpec, style: Style) -> tuple[Tensor, Tensor]:
    """o (B, Hq, Lq, Dv) in the dtype of q and lse (B, Hq, Lq) float32."""
    q, bias, sinks = x["q"], x.get("bias"), x.get("sinks")
    k, v = (x[name].repeat_interleave(q.shape[1] // x["k"].shape[1], dim=1) for name in ("k", "v"))
    dtype, scale, lq, lk = q.dtype, spec.scale_for(q.shape[-1]), q.shape[2], k.shape[2]
    rows, keys = torch.arange(lq, device=q.device), torch.arange(lk, device=q.device)

    q, k = (q * scale if style.scaled == "q" else q), (k * scale if style.scaled == "k" else k)
    s = q.float() @ k.float().mT
    if style.rounded:
        s = s.to(dtype)
    elif s.requires_grad:
        s.register_hook(lambda ds: ds.to(dtype).float())  # an operand of dQ and dK
    s = s * scale if style.scaled == "s" else s
    s = s.float() if style.wide else s
    if spec.softcap is not None:
        s = torch.tanh(s / spec.softcap) * spec.softcap
    if (slopes := spec.slopes()) is not None:
        s = s - slopes.float() * (spec.diagonal(rows, lq, lk)[:, None] - keys).abs()
    if bias is not None:
        s = s + bias
    seen = torch.ones(1, 1, lq, lk, dtype=torch.bool, device=q.device)
    if (visible := spec.visible(rows, keys, lq, lk)) is not None:
        seen = seen & visible
    if bias is not None:
        seen = seen & (bias > -math.inf)
    s = s.masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1, keepdim=True)
    if sinks is not None:  # one more key, whose value is 0
        s = torch.cat([s.float(), sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
        v = F.pad(v, (0, 0, 0, 1))
    lse = s.detach().float().logsumexp(-1)
    if not style.rounded:
        return _Mixed.apply(s, v, empty), lse
    # A row that sees nothing is NaN after softmax; every project sets it to 0, its gradient too.
    p = s.softmax(-1).masked_fill(empty, 0)
    return (p.to(dtype).float() @ v.float()).to(dtype), lse


class _Mixed(torch.autograd.Function):
    """softmax(s) v as eager flex_attention does it: P rounded as an operand, delta from the rounded output."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        p = s.softmax(-1).masked_fill(empty, 0)
        o = (p.to(v.dtype).float() @ v.float()).to(v.dtype)
        ctx.save_for_backward(p, v, o)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, None]:
        p, v, o = ctx.saved_tensors
        delta = (do.float() * o.float()).sum(-1, keepdim=True)
        dv = p.to(v.dtype).float().mT @ do.float()
        return p * (do.float() @ v.float().mT - delta), dv.to(v.dtype), None


# -- the rules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """about: what is compared with what, and how closely. source: repository, commit where known, file, tests.

    passes(outputs, baseline): whether the project's tests would accept these outputs.
    """

    name: str
    about: str
    source: str
    passes: Callable[[Outputs, Baseline], bool]

    def catches(self, outputs: Outputs, base: Baseline) -> bool:
        """Whether the rule rejects the outputs in a quantity in which it accepts every honest kernel.

        No project keeps a test that a right kernel fails: what such a test rejects is not to its credit.
        """
        return not self.passes({q: x for q, x in outputs.items() if q in base.trusted[self.name]}, base)


RULES: dict[str, Rule] = {}

Judge = Callable[[str, Tensor, Baseline], bool]


def rule(*compares: str) -> Callable[[Judge], Judge]:
    """Register a judge of one quantity under its own name; its docstring ends with "Source: …".

    The rule passes outputs if each has the shape and dtype of the contract and, where it is one of `compares`, passes
    the judge. What holds no element passes.
    """

    def register(judge: Judge) -> Judge:
        about, _, source = " ".join((judge.__doc__ or "").split()).partition(" Source: ")

        def accepts(quantity: str, got: Tensor, base: Baseline) -> bool:
            right = base.honest[0][quantity]
            if got.shape != right.shape or got.dtype != right.dtype:
                return False
            return quantity not in compares or not got.numel() or judge(quantity, got, base)

        def passes(outputs: Outputs, base: Baseline) -> bool:
            return all(accepts(quantity, got, base) for quantity, got in outputs.items())

        RULES[judge.__name__] = Rule(judge.__name__, about, source, passes)
        return judge

    return register


def _off(got: Tensor, want: Tensor) -> float:
    """The largest error, subtracted in the wider dtype of the two; NaN, which is never <=, where either holds NaN."""
    return float((got - want).abs().max())


@rule("o", "dq", "dk", "dv")
def allclose_1e2(quantity: str, got: Tensor, base: Baseline) -> bool:
    """torch.allclose with atol = rtol = 1e-2 against naive attention in the input dtype: S, scaled after the product,
    and P are rounded to it.

    Source: custom of tutorials and kernel benchmarks; triton-lang/triton python/tutorials/06-fused-attention.py has
    rtol = 0, ScalingIntelligence/KernelBench both for fp16 and bf16
    """
    return torch.allclose(got, base.references["naive"][quantity], atol=1e-2, rtol=1e-2)


@rule("o", "dq", "dk", "dv")
def fa2(quantity: str, got: Tensor, base: Baseline) -> bool:
    """max|x - ref| <= 2 max|pt - ref| for the output, 3 max|pt - ref| for gradients; causal: 2 max|pt - ref| + 1e-5 for
    both. ref: naive attention in float32, rounded to the input dtype. pt: the same in the input dtype, K scaled
    instead of Q. Differences are taken in the input dtype.

    Source: Dao-AILab/flash-attention 0251105a, tests/test_flash_attn.py: test_flash_attn_output, test_flash_attn_causal
    """
    ref = base.references["float32"][quantity].to(got.dtype)
    times, extra = (2, 1e-5) if base.case.causal else (2 if quantity == "o" else 3, 0.0)
    return _off(got, ref) <= times * _off(base.references["eager"][quantity], ref) + extra


@rule("o", "dq", "dk", "dv")
def fa3(quantity: str, got: Tensor, base: Baseline) -> bool:
    """max|x - ref| <= 2 max|pt - ref| + 2 max|(ref + 0.3 - 0.3) - ref|, ref and pt as for fa2, all in the input dtype;
    with softcap 3 max|pt - ref|, and 3e-4 on top for gradients.

    Source: Dao-AILab/flash-attention 0251105a, hopper/test_flash_attn.py: test_flash_attn_output
    """
    ref = base.references["float32"][quantity].to(got.dtype)
    capped = base.case.softcap is not None
    # On a CPU the constant itself would be rounded; on a GPU, where that rule is run, only the sums are.
    nudged = ((ref.float() + 0.3).to(ref.dtype).float() - 0.3).to(ref.dtype)
    extra = 2 * _off(nudged, ref) + (3e-4 if capped and quantity != "o" else 0.0)
    return _off(got, ref) <= (3 if capped else 2) * _off(base.references["eager"][quantity], ref) + extra


SDPA_FUDGE = {"o": 4, "dq": 180, "dk": 16, "dv": 4}
SDPA_FUDGE_WITH_MASK = {"o": 4, "dq": 160, "dk": 25, "dv": 8, "dbias": 45}


@rule("o", "dq", "dk", "dv", "dbias")
def sdpa(quantity: str, got: Tensor, base: Baseline) -> bool:
    """max|x - golden| <= max(1e-5, fudge max|ref - golden|), fudge 4 for the output, 180, 16, 4 for dq, dk, dv; with a
    mask or bias 160, 25, 8, and 45 for the gradient of the bias. golden: math attention in float32 (fp32 inputs:
    float64). ref: the math backend on the inputs as they are, which takes 16-bit inputs to float32 and rounds only what
    it returns.

    Source: pytorch/pytorch, test/test_transformers.py: check_out_and_grad, test_flash_attention_vs_math_ref_grads,
    test_mem_efficient_attention_attn_mask_vs_math_ref_grads; aten/src/ATen/native/transformers/attention.cpp
    """
    single = base.references["float32"][quantity]
    golden = base.float64[quantity] if base.dtype == torch.float32 else single
    fudge = SDPA_FUDGE_WITH_MASK if base.case.bias or base.case.mask else SDPA_FUDGE
    return _off(got, golden) <= max(1e-5, fudge[quantity] * _off(single.to(got.dtype), golden))


@rule("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
def flex(quantity: str, got: Tensor, base: Baseline) -> bool:
    """mean|x - golden| <= 1.1 mean|ref - golden|, or 10 where ref is float32 (fp32 inputs, log-sum-exp). golden: eager
    flex_attention in float64. ref: the same in the input dtype, which has S and softmax in float32 and rounds P and dS
    for the second products. Bias and sinks count as captured tensors. Equal infinities, which its tests do not have,
    are no error.

    Source: pytorch/pytorch, test/inductor/test_flex_attention.py and test_flex_decoding.py: _check_equal, _check_out,
    _check_out_and_grad; torch/_higher_order_ops/flex_attention.py of torch 2.13
    """
    golden, ref = base.float64[quantity], base.references["mixed"][quantity]
    error, noise = (torch.where(x == golden, 0.0, (x - golden).abs()).mean() for x in (got, ref))
    return bool(error <= (10 if ref.dtype == torch.float32 else 1.1) * noise)


XFORMERS = {  # (atol, rtol) of the output, (atol, rtol) of gradients
    torch.float32: ((3e-4, 2e-5), (5e-4, 1e-4)),
    torch.float16: ((4e-3, 4e-4), (9e-2, 2e-2)),
    torch.bfloat16: ((2e-2, 5e-3), (0.7, 0.1)),
}


@rule("o", "lse", "dq", "dk", "dv", "dbias")
def xformers(quantity: str, got: Tensor, base: Baseline) -> bool:
    """torch.allclose (atol, rtol) against naive attention in float32. Output: bf16 2e-2, 5e-3; fp16 4e-3, 4e-4; fp32
    3e-4, 2e-5. Gradients, against those rounded to the input dtype: bf16 0.7, 0.1; fp16 9e-2, 2e-2; fp32 5e-4, 1e-4.
    Log-sum-exp: 2e-4, 1e-5.

    Source: facebookresearch/xformers, xformers/ops/fmha/common.py 00aeeafc: AttentionFwOpBase, AttentionBwOpBase (some
    operators widen them); tests/test_mem_eff_attention.py ca6d2aa0: test_forward, test_backward, test_logsumexp
    """
    forward, backward = XFORMERS[base.dtype]
    atol, rtol = (2e-4, 1e-5) if quantity == "lse" else forward if quantity == "o" else backward
    ref = base.references["float32"][quantity]
    if quantity == "o":
        return torch.allclose(got.float(), ref, atol=atol, rtol=rtol)
    return torch.allclose(got, ref.to(got.dtype), atol=atol, rtol=rtol)


@rule("o", "dq", "dk", "dv")
def vllm(quantity: str, got: Tensor, base: Baseline) -> bool:
    """torch.testing.assert_close with atol 1.5e-2, rtol 1e-2 against naive attention in the input dtype: Q is scaled,
    S rounded, softmax float32, P rounded. It has no backward; gradients get the same numbers here.

    Source: vllm-project/vllm 0001b995, tests/kernels/attention/test_flash_attn.py: test_varlen_with_paged_kv
    """
    return torch.allclose(got, base.references["served"][quantity], atol=1.5e-2, rtol=1e-2)


CUDNN_ATOL = {"dk": 7e-2, "dv": 7e-2, "dsinks": 4e-2}  # else 2e-2; dk and dv of fp16 too


@rule("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
def cudnn_frontend(quantity: str, got: Tensor, base: Baseline) -> bool:
    """torch.isclose with rtol 2e-2 against naive attention in float32, not rounded; atol 2e-2, but 7e-2 for dk and dv
    unless fp16, and 4e-2 for the gradient of sinks. NaN equals NaN, which its reference never is here.

    Source: NVIDIA/cudnn-frontend 3929da2e, test/python/sdpa/fp16.py: compute_and_compare_reference; fp16_ref.py
    """
    narrow = base.dtype == torch.float16 and quantity in ("dk", "dv")
    atol = 2e-2 if narrow else CUDNN_ATOL.get(quantity, 2e-2)
    return torch.allclose(got.float(), base.references["float32"][quantity], rtol=2e-2, atol=atol, equal_nan=True)
