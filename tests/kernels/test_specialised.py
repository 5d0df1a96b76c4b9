"""The forward that the compiler specialises: whether it did, the results in the interpreter, what it refuses."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import check, python

pytest.importorskip("triton")

import triton
import triton.language as tl
from partition_rows import CAPABILITY, parts
from triton.runtime import _allocation

from reference_kernels import compiling, dispatch, specialised
from reference_kernels.cases import CompileCase
from reference_kernels.online import online_step
from reference_kernels.specialised import TABLE, SpecialisedCase, head_of, my_block
from reference_kernels.tiles import LN2, NEG_INF

KEYWORD_LOST = "is not warp-specialised: its TTGIR has no ttg.warp_specialize."


@triton.jit
def step(acc, m, l, qt, k, v, n, rows, unit, Lq, Lk, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):  # noqa: E741
    s = tl.dot(qt, tl.trans(k.load([n, 0])))
    if MASKED:
        s = tl.where(n + tl.arange(0, BLOCK_N)[None, :] <= rows[:, None] + (Lk - Lq), s, NEG_INF)
    p, alpha, m, l = online_step(s, unit, m, l, MASKED)  # noqa: E741
    vt = v.load([n, 0])
    return tl.dot(p.to(vt.dtype), vt, acc * alpha[:, None]), m, l


@triton.jit(do_not_specialize=["heads", "group", "Lq", "Lk"])
def two_loops(
    q, q_b, q_h, q_l, k, k_b, k_h, k_l, v, v_b, v_h, v_l, o, o_b, o_h, o_l, lse, unit, heads, group, Lq, Lk,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """specialised.device_kernel, causal, with two loops as in forward.py: tiles without a mask, then tiles with one."""
    batch, head, start = my_block(heads, Lq, BLOCK_M)
    kd = head_of(k, k_b, k_h, k_l, batch, head // group, Lk, BLOCK_N, D)
    vd = head_of(v, v_b, v_h, v_l, batch, head // group, Lk, BLOCK_N, D)
    od = head_of(o, o_b, o_h, o_l, batch, head, Lq, BLOCK_M, D)
    qt = head_of(q, q_b, q_h, q_l, batch, head, Lq, BLOCK_M, D).load([start, 0])
    rows = start + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    full = (start + Lk - Lq) // BLOCK_N * BLOCK_N
    for n in tl.range(0, full, BLOCK_N, warp_specialize=True):
        acc, m, l = step(acc, m, l, qt, kd, vd, n, rows, unit, Lq, Lk, BLOCK_N, False)  # noqa: E741
    for n in tl.range(full, tl.minimum(start + BLOCK_M + Lk - Lq, Lk), BLOCK_N, warp_specialize=True):
        acc, m, l = step(acc, m, l, qt, kd, vd, n, rows, unit, Lq, Lk, BLOCK_N, True)  # noqa: E741
    od.store([start, 0], (acc / l[:, None]).to(qt.dtype))
    tl.store(lse + (batch * heads + head).to(tl.int64) * Lq + rows, (m * unit + tl.log2(l)) * LN2, mask=rows < Lq)


CAUSAL = specialised.compile_case("device", "bf16", 128, causal=True)
SPLIT = replace(CAUSAL, name="split", kernel=two_loops)


@pytest.fixture(scope="module")
def compiled() -> dict[str, compiling.Compiled]:
    """Every case, and of device-bf16-d128-causal what is not specialised: with eight warps, and with two loops."""
    jobs: list[tuple[Any, int]] = [(case, case.capabilities[0]) for case in specialised.compile_cases()]
    jobs += [(replace(CAUSAL, name="eight", num_warps=8), 90), (SPLIT, 90)]
    jobs.append((replace(SPLIT, name="split-eight", num_warps=8), 90))
    return {result.name: result for result in compiling.compile_all(jobs)}


@pytest.mark.parametrize("case", specialised.compile_cases(), ids=lambda case: case.name)
def test_the_compiler_specialises_the_warps_and_keeps_every_limit(
    compiled: dict[str, compiling.Compiled], case: SpecialisedCase
) -> None:
    result = compiled[case.name]
    assert compiling.violations(result) == []
    # sm_90: one group asks the TMA, two multiply half of the rows each. sm_100: four kinds of work.
    assert result.partitions == (3 if result.capability == 90 else 4)
    assert result.counts["tma"] > 0
    assert result.local_in_loops == 0


def test_with_eight_warps_hopper_gets_nothing_and_the_lane_says_so(compiled: dict[str, compiling.Compiled]) -> None:
    assert compiling.violations(compiled["eight"]) == [f"eight for sm_90 {KEYWORD_LOST}"]


def test_two_loops_end_the_compiler_or_are_not_specialised(compiled: dict[str, compiling.Compiled]) -> None:
    (said,) = compiling.violations(compiled["split"])
    assert said.startswith("split for sm_90: it does not compile: ")
    assert f"split-eight for sm_90 {KEYWORD_LOST}" in compiling.violations(compiled["split-eight"])


@pytest.fixture(scope="module")
def ttgirs() -> dict[str, str]:
    """What Triton makes of partition_rows.cases(), by name."""
    built = python(str(Path(__file__).with_name("partition_rows.py")), interpret=False)
    assert built.returncode == 0, built.stderr
    return json.loads(built.stdout.splitlines()[-1])  # type: ignore[no-any-return]


LQ, LK, HEADS = 300, 400, 3
HEAD, START = 1, 128  # of program 4: three blocks a head, the last rows first


@pytest.mark.parametrize(
    "case",
    [case for case in specialised.compile_cases() if CAPABILITY in case.capabilities],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("n", [128, 256, 384])
def test_each_group_of_warps_masks_and_stores_the_rows_it_computes(
    ttgirs: dict[str, str], case: SpecialisedCase, n: int
) -> None:
    loading, *others = parts(ttgirs[case.name], {"Lq": LQ, "Lk": LK, "heads": HEADS, "group": 1}, 4, n)
    assert loading.loaded == [START, START + 64, n, n]
    assert [part.o for part in others] == [[START], [START + 64]]
    causal = bool(case.constexprs["CAUSAL"])
    assert {part.end for part in (loading, *others)} == {START + 128 + LK - LQ if causal else LK}
    keys = n + torch.arange(128)
    for part in others:
        rows = part.o[0] + torch.arange(64)
        assert torch.equal(part.lse, HEAD * LQ + rows)
        assert torch.equal(part.stored, rows < LQ)
        wanted = [keys[None, :] <= rows[:, None] + LK - LQ] if causal else [(keys < LK)[None, :]]
        wanted = wanted if causal or case.constexprs["TAIL"] else []
        assert len(part.visible) == len(wanted)
        assert all(torch.equal(*both) for both in zip(part.visible, wanted, strict=True))


def test_rows_beyond_the_end_are_not_stored(ttgirs: dict[str, str]) -> None:
    found = parts(ttgirs["specialised-device-fp16-d128"], {"Lq": 200, "Lk": 128, "heads": 1, "group": 1}, 0, 0)
    assert [int(part.stored.sum()) for part in found[1:]] == [64, 8]


def test_trap_1_an_offset_of_the_tma_added_to_a_tensor_is_moved_twice(ttgirs: dict[str, str]) -> None:
    found = parts(ttgirs["splatted"], {"L": 512}, 1, 0)[1:]
    assert [part.o for part in found] == [[128], [192]]
    assert [int(part.lse[0]) for part in found] == [128, 256]


def test_trap_2_rows_that_cannot_be_cut_are_computed_twice(ttgirs: dict[str, str]) -> None:
    loading, *others = parts(ttgirs["narrow"], {"Lq": LQ, "Lk": LK, "heads": 1, "group": 1}, 0, 0)
    assert loading.loaded[0] == 256
    assert [part.o for part in others] == [[256], [256]]


def test_a_case_that_asks_for_nothing_is_not_held_to_it() -> None:
    case = CompileCase("plain", None, {}, {}, 4, 1)
    result = compiling.Compiled("plain", 90, 4, specialised=getattr(case, "specialised", False))
    assert compiling.violations(result) == []


def test_every_form_and_head_dim_is_in_the_lane() -> None:
    names = {tuple(case.name.split("-")[1:4]) for case in specialised.compile_cases()}
    assert {(form, f"d{d}") for form, d in TABLE} == {(form, d) for form, _, d in names}


def test_both_forms_are_right() -> None:
    check(
        """
import itertools, torch, oracles
from reference_kernels.configs import Config
from reference_kernels.specialised import forward

torch.manual_seed(0)
shapes = ((2, 4, 2, 100, 170), (1, 2, 1, 150, 70), (1, 2, 1, 1, 45), (1, 1, 1, 64, 64))
for form, dtype, shape, causal in itertools.product(
    ("device", "host"), (torch.float16, torch.bfloat16), shapes, (False, True)
):
    b, h, kv, lq, lk = shape
    q = torch.randn(b, lq, h, 64).to(dtype).transpose(1, 2)
    k, v = (torch.randn(b, kv, lk, 64).to(dtype) for _ in "kv")
    spec = oracles.AttentionSpec(scale=0.2, causal=causal)
    truth = oracles.evaluate(q, k, v, spec, arithmetic=oracles.Arithmetic.of(dtype))
    o, lse = forward(q, k, v, scale=0.2, causal=causal, form=form, config=Config(64, 32, 4, 1))
    for name, got in (("o", o), ("lse", lse)):
        wrong = ~((got.double() - truth[name].value).abs() <= truth[name].limit(3.0)) & (got != truth[name].value)
        assert not wrong.any(), (form, dtype, shape, causal, name)
"""
    )


def test_the_suite_finds_it_conformant_by_name() -> None:
    check(
        """
from pytest_flashattn import run
from reference_kernels.variants import specialised

report = run(specialised, chapters=["causal", "lse"], matrix="smoke", device="cpu")
assert report.conformant, str(report)
assert report.totals["verified"] >= 3, report.totals
"""
    )


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape or (1, 2, 8, 64), dtype=dtype)


@pytest.mark.parametrize(
    ("q", "scale", "reason"),
    [
        (tensor(dtype=torch.float32), None, "float32"),
        (tensor(1, 2, 8, 256), None, "D 256"),
        (tensor(), -1.0, "scale -1.0"),
        (tensor(1, 2, 0, 64), None, "empty"),
        (tensor(1, 2, 64, 8).transpose(2, 3).expand(1, 2, 8, 64), None, "not contiguous"),
        (tensor(1, 2, 8, 65)[..., 1:], None, "16 bytes"),
        (tensor(1, 2, 1, 64).expand(1, 2, 8, 64), None, "strides"),
        (tensor(), None, "compute capability 9.0 or 10"),
    ],
)
def test_what_it_cannot_serve_is_said_with_its_reason(q: torch.Tensor, scale: float | None, reason: str) -> None:
    assert reason in (specialised.supports(q, q, q, scale=scale) or "")
    with pytest.raises(NotImplementedError, match=reason):
        specialised.forward(q, q, q, scale=scale)


@pytest.mark.parametrize(
    ("capability", "version", "form", "reason"),
    [
        ((9, 0), "3.6.0", "device", "races"),
        ((10, 3), "3.9.0", "host", "races"),
        ((8, 9), "3.9.0", None, "has 8.9"),
        ((12, 0), "3.9.0", None, "has 12.0"),
    ],
)
def test_the_machine_decides_the_form(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str, form: str | None, reason: str
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    assert specialised.form_for(gpu) == form
    dispatch.specialised_machine.cache_clear()
    said = dispatch.specialised_machine(gpu)
    dispatch.specialised_machine.cache_clear()
    assert reason in (said or "")


class _Launch:
    """Stands in for a kernel: notes what it is launched with, and whose allocator is set then."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.grid, self.arguments, self.options = grid, arguments, options
            self.scratch = _allocation._allocator.get()(640, 128, None)

        return launch


@pytest.mark.parametrize("form", ["device", "host"])
@pytest.mark.parametrize(("dtype", "d", "causal"), [("bf16", 64, True), ("fp16", 128, False)])
def test_what_is_launched_is_what_the_lane_compiles(
    monkeypatch: pytest.MonkeyPatch, form: specialised.Form, dtype: str, d: int, causal: bool
) -> None:
    kernel, fake = getattr(specialised, f"{form}_kernel"), _Launch()
    monkeypatch.setattr(specialised, f"{form}_kernel", fake)
    monkeypatch.setattr(specialised, "form_for", lambda device: form)
    before = _allocation._allocator.get()
    if form == "host":  # which asks for no memory
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    q, k = tensor(2, 6, 130, d, dtype=kind), tensor(2, 3, 256, d, dtype=kind)
    specialised.forward(q, k, k.clone(), causal=causal)
    assert fake.scratch.numel() == 640
    if form == "device":
        assert _allocation._allocator.get() is before  # a user's own is left alone
    _allocation._allocator.set(before)
    case = specialised.compile_case(form, dtype, d, causal=causal)
    options = {name: value for name, value in fake.options.items() if name in case.constexprs}
    assert options == case.constexprs
    assert (fake.options["num_warps"], fake.options["num_stages"]) == (case.num_warps, case.num_stages)
    given = inspect.signature(kernel.fn).bind(*fake.arguments, **options).arguments
    assert fake.grid == (2 * 6 * 2,)
    assert [given[name] for name in ("heads", "group", "Lq", "Lk")] == [6, 2, 130, 256]
    assert given["unit"] == pytest.approx(d**-0.5 / math.log(2))
    if form == "host":
        types = {name: f"tensordesc<{dtype}{given[name].block_shape}>" for name in "qkvo"}
        assert types == {name: case.signature[name] for name in "qkvo"}
    else:
        assert [given[f"k_{axis}"] for axis in "bhl"] == list(k.stride()[:3])


def test_named_it_serves_forward_and_plain_triton_backward() -> None:
    check(
        """
import torch
from reference_kernels import available, dispatch, flash_attention

assert [entry.reason for entry in available() if entry.kernel == "specialised"] == [""]
seen = []
for module, name in ((dispatch.specialised, "forward"), (dispatch.plain_backward, "backward")):
    def call(*tensors, kernel=getattr(module, name), of=module.__name__, **options):
        seen.append(of.rpartition(".")[2])
        return kernel(*tensors, **options)
    setattr(module, name, call)
q, k, v = (torch.randn(1, 2, 20, 64).half().requires_grad_() for _ in range(3))
out = flash_attention(q, k, v, causal=True, kernel="specialised")
assert torch.allclose(out, flash_attention(q, k, v, causal=True), atol=2e-3)
out.sum().backward()
assert seen == ["specialised", "backward"], seen
for options, reason in (({"softcap": 2.0}, "no softcap"), ({"window": (3, 0)}, "no window")):
    try:
        flash_attention(q, k, v, kernel="specialised", **options)
    except NotImplementedError as error:
        assert f"kernel='specialised': the specialised kernels have {reason}" in str(error)
    else:
        raise AssertionError(reason)
"""
    )
