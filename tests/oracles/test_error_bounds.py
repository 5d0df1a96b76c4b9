"""The bounds: correct kernels stay within lam = 3, forward and backward; wrong ones do not."""

from __future__ import annotations

import functools

import pytest
import torch
from oracle_problems import PROBLEMS, Problem, every_problem, problem
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from oracles import Arithmetic, AttentionSpec, Truth, emulate, evaluate

LAM = 3.0
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
FAMILIES = [
    "normal",
    "peaked",
    "outliers",
    "ascending",
    "offset values",
    "offset keys",
    "drifting values",
    "values are keys",
]


def needed(truth: Truth, found: Tensor) -> float:
    """The lam that the worst element needs; infinities must be where the truth has them."""
    finite = truth.value.isfinite()
    assert torch.equal(found.isfinite(), finite)
    beyond = ((found.double() - truth.value).abs() - truth.fixed)[finite].clamp_min(0)
    return float((beyond / truth.random[finite].clamp_min(1e-300)).max()) if beyond.numel() else 0.0


def family(name: str, dtype: torch.dtype, *, seed: int = 0, **options) -> Problem:  # type: ignore[no-untyped-def]
    p = problem(**{"b": 1, "hq": 2, "hkv": 2, "lq": 130, "lk": 130, "d": 64, "dv": 64, "seed": seed, **options})
    q, k, v, do = p.q, p.k, p.v, p.do
    if name == "peaked":
        q *= 6
    elif name == "outliers":
        for x in (q, k, v):
            x[torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.001] *= 20
    elif name == "ascending":
        q.abs_().mul_(0.3)
        k.abs_().mul_(0.1).add_(torch.linspace(0, 1, k.shape[2])[:, None])
    elif name == "offset values":
        v += 5
        do += 1
    elif name == "offset keys":
        q += 1
        k += 3
    elif name == "drifting values":
        v.mul_(0.01).add_(torch.linspace(-1, 1, v.shape[2])[:, None])
    elif name == "values are keys":
        v = k.clone() if v.shape == k.shape else v
    p.q, p.k, p.v, p.do = (x.to(dtype) for x in (q, k, v, do))
    return p


def sdpa(p: Problem, backend: SDPBackend) -> dict[str, Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(q, k, v, is_causal=p.spec.causal, enable_gqa=True)
    o.backward(p.do)
    return {"o": o.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_correct_kernels_pass(name: str, dtype: torch.dtype, record_property) -> None:  # type: ignore[no-untyped-def]
    for seed, options in enumerate(({}, {"causal": True}, {"hkv": 1, "lq": 40, "lk": 260}, {"d": 16, "dv": 32})):
        p = family(name, dtype, seed=seed, **options)
        truth = evaluate(p.q, p.k, p.v, p.spec, do=p.do, arithmetic=Arithmetic.of(dtype))
        kernels = {"emulator": emulate(p.q, p.k, p.v, p.spec, do=p.do)}
        kernels["sdpa math"] = sdpa(p, SDPBackend.MATH)
        fused = sdpa(p, SDPBackend.FLASH_ATTENTION) if p.q.shape[-1] == p.v.shape[-1] else {}
        kernels["sdpa fused"] = fused
        # PyTorch's CPU kernel adds up dk and dv in 16 bits from one block of queries to the next: see the test below.
        summed = evaluate(p.q, p.k, p.v, p.spec, do=p.do, arithmetic=Arithmetic.of(dtype, sums=True))
        for kernel, found in kernels.items():
            for quantity, x in found.items():
                lam = needed((summed if kernel == "sdpa fused" else truth)[quantity], x)
                record_property(f"{kernel} {quantity}", round(lam, 3))
                assert lam <= LAM, f"{kernel}, {quantity}: needs lam {lam:.2f}"


@every_problem
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_option_passes(name: str, dtype: torch.dtype) -> None:
    for seed in range(2):
        p = problem(**PROBLEMS[name], dtype=dtype, seed=seed)
        dlse = p.dlse.float()
        truth = evaluate(p.q, p.k, p.v, p.spec, do=p.do, dlse=dlse, arithmetic=Arithmetic.of(dtype))
        found = emulate(p.q, p.k, p.v, p.spec, do=p.do, dlse=dlse, block=8)
        assert found.keys() == truth.keys()
        for quantity, x in found.items():
            lam = needed(truth[quantity], x)
            assert lam <= LAM, f"{quantity}: needs lam {lam:.2f}"


def test_gradients_added_up_in_16_bits_pass_only_when_declared() -> None:
    """PyTorch's fused CPU kernel keeps dk and dv in the input dtype between blocks of queries; one block is fine."""
    for length, passes in ((32, True), (257, False)):
        p = family("offset values", torch.bfloat16, lq=length, lk=length)
        truth = evaluate(p.q, p.k, p.v, p.spec, do=p.do, arithmetic=Arithmetic.of(torch.bfloat16))
        dv = sdpa(p, SDPBackend.FLASH_ATTENTION)["dv"]
        lam = needed(truth["dv"], dv)
        assert (lam <= LAM) == passes, f"needs lam {lam:.2f}"
        declared = evaluate(p.q, p.k, p.v, p.spec, do=p.do, arithmetic=Arithmetic.of(torch.bfloat16, sums=True))
        assert needed(declared["dv"], dv) <= LAM
        assert needed(declared["dv"], dv * 1.05) > LAM, "the declared arithmetic excuses its own error only"


def faulty(p: Problem, fault: str) -> Tensor:
    """Attention with float32 scores and rounded P, and one fault."""
    q, k, v = p.q.float(), p.k.float(), p.v.float()
    s = q @ k.mT * p.q.shape[-1] ** -0.5 * (1.01 if fault == "scale 1 % off" else 1)
    if fault == "scores rounded to bf16":
        s = s.bfloat16().float()
    if fault == "last key dropped":
        s[..., -1] = -torch.inf
    if fault == "tile skipped for the last 128 rows":
        s[..., -128:, 64:128] = -torch.inf
    if fault == "leak of one future key" and p.spec.causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(2), -torch.inf)
    elif p.spec.causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = torch.exp(s - s.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    rounded = weights.to(torch.float8_e4m3fn if fault == "P in e4m3" else p.q.dtype).float()
    return (rounded @ v / total).to(p.q.dtype)


@functools.cache
def _judged(dtype: torch.dtype, causal: bool) -> list[tuple[Problem, Truth]]:
    problems = [family("normal", dtype, seed=seed, lq=256, lk=256, causal=causal) for seed in range(3)]
    return [(p, evaluate(p.q, p.k, p.v, p.spec, arithmetic=Arithmetic.of(dtype))["o"]) for p in problems]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        "none",
        "scale 1 % off",
        "scores rounded to bf16",
        "last key dropped",
        "tile skipped for the last 128 rows",
        "P in e4m3",
        "leak of one future key",
    ],
)
def test_faults_are_rejected(fault: str, causal: bool, dtype: torch.dtype) -> None:
    if fault == "leak of one future key" and not causal:
        fault = "none"
    lams = [needed(truth, faulty(p, fault)) for p, truth in _judged(dtype, causal)]
    if fault == "none":
        assert max(lams) <= LAM
    else:
        assert min(lams) > LAM, f"passed at lam {min(lams):.2f}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantity", ["dq", "dk", "dv"])
@pytest.mark.parametrize("fault", ["last key dropped", "Delta forgotten", "dS in e4m3", "scale forgotten"])
def test_faulty_gradients_are_rejected(fault: str, quantity: str, dtype: torch.dtype) -> None:
    p = family("normal", dtype, lq=96, lk=96)
    truth = evaluate(p.q, p.k, p.v, p.spec, do=p.do, arithmetic=Arithmetic.of(dtype))
    spec, do, options = p.spec, p.do, {}
    if fault == "last key dropped":
        spec = AttentionSpec(mask=torch.arange(96) < 95)
    if fault == "dS in e4m3":
        options["p_dtype"] = torch.float8_e4m3fn
    dlse = (do.double() * truth["o"].value).sum(-1) if fault == "Delta forgotten" else None  # cancels it
    found = emulate(p.q, p.k, p.v, spec, do=do, dlse=dlse, **options)
    if fault == "scale forgotten":
        found["dq"], found["dk"] = found["dq"] * 8, found["dk"] * 8
    untouched = quantity == "dv" and fault in ("Delta forgotten", "scale forgotten")
    assert (needed(truth[quantity], found[quantity]) <= LAM) == untouched


def test_a_shifted_lse_is_rejected() -> None:
    p = family("normal", torch.bfloat16)
    truth = evaluate(p.q, p.k, p.v, p.spec, arithmetic=Arithmetic.of(torch.bfloat16))["lse"]
    found = emulate(p.q, p.k, p.v, p.spec)["lse"]
    assert needed(truth, found) <= LAM
    assert needed(truth, found + 1e-4) > LAM
    assert needed(truth, found.bfloat16()) > LAM


def test_tf32_is_rejected_as_fp32_and_accepted_as_declared() -> None:
    """Operands cut to 11 bits, by rounding and by truncation."""
    p = family("normal", torch.float32)
    arithmetics = {tf32: Arithmetic.of(torch.float32, tf32=tf32) for tf32 in (False, True)}
    truth = {tf32: evaluate(p.q, p.k, p.v, p.spec, arithmetic=a)["o"] for tf32, a in arithmetics.items()}
    for half_ulp in (0x1000, 0):
        q, k, v = (((x.view(torch.int32) + half_ulp) & ~0x1FFF).view(torch.float32) for x in (p.q, p.k, p.v))
        found = emulate(q, k, v, p.spec)["o"]
        assert needed(truth[True], found) <= LAM
        assert needed(truth[False], found) > 10 * LAM


def test_fp16_underflow_is_allowed_for_where_p_is_fp16_only() -> None:
    """One key takes almost all; the others are subnormal in fp16 and are lost in part, but their values are large."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 65, 16)
    q[..., 0], k[..., 1:, 0] = 4.0, -16.0  # exp(-16) is 4 subnormal units
    v = torch.randn(1, 1, 65, 16, generator=torch.Generator().manual_seed(0)) * 1000
    v[:, :, 0] = 0
    q, k, v = (x.half() for x in (q, k, v))
    found = emulate(q, k, v, AttentionSpec())["o"]
    for p_dtype, passes in ((torch.float16, True), (torch.float32, False)):
        arithmetic = Arithmetic.of(torch.float16, p_dtype=p_dtype)
        lam = needed(evaluate(q, k, v, AttentionSpec(), arithmetic=arithmetic)["o"], found)
        assert (lam <= LAM) == passes


def test_what_is_exact_has_no_random_error_to_speak_of() -> None:
    p = family("normal", torch.bfloat16, scale=0.0, lk=1)
    truth = evaluate(p.q, p.k, p.v, p.spec, do=p.do, arithmetic=Arithmetic.of(torch.bfloat16))
    assert (truth["dq"].limit(LAM) == 2.0**-126).all()
    assert (truth["lse"].limit(LAM) < 1e-5).all()


def test_limit_is_linear_in_lam() -> None:
    truth = Truth(torch.zeros(2), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25]))
    assert truth.limit(3).tolist() == [3.5, 6.25]


def test_arithmetic_of_a_dtype() -> None:
    half, single = Arithmetic.of(torch.float16), Arithmetic.of(torch.float32, tf32=True)
    assert (half.u_out, half.u_p, half.u_acc, half.tiny_out) == (2.0**-11, 2.0**-11, 2.0**-24, 2.0**-25)
    assert (single.u_out, single.u_p, single.u_operand) == (2.0**-24, 2.0**-10, 2.0**-10)
    mixed = Arithmetic.of(torch.bfloat16, p_dtype=torch.float32)
    assert (mixed.u_out, mixed.u_p, mixed.u_operand) == (2.0**-8, 2.0**-24, 0.0)
    with pytest.raises(ValueError, match="tf32 is a way to multiply float32"):
        Arithmetic.of(torch.bfloat16, tf32=True)
    with pytest.raises(ValueError, match="p_dtype must be one of"):
        Arithmetic.of(torch.bfloat16, p_dtype=torch.int8)


def test_dlse_alone_is_refused() -> None:
    p = problem()
    with pytest.raises(ValueError, match="pass do too"):
        evaluate(p.q, p.k, p.v, p.spec, dlse=p.dlse, arithmetic=Arithmetic.of(torch.float16))
