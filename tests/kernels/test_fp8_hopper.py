"""The Hopper FP8 forward as far as no GPU is needed: what it refuses, its forms, and compiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels import compiling
from reference_kernels.fp8 import api
from reference_kernels.fp8 import cases as plain
from reference_kernels.fp8.hopper import cases, launch
from reference_kernels.fp8.hopper.configs import TABLE, lookup
from reference_kernels.fp8.hopper.interleaving import padding_refusal
from reference_kernels.fp8.hopper.launch import fixed, supports
from reference_kernels.hopper import backward as hopper_backward
from reference_kernels.hopper import cases as hopper_forward


def _like(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


Q, V = _like(1, 2, 80, 64), _like(1, 2, 64, 80).mT
AHEAD = lookup(128, causal=False)


@pytest.mark.parametrize(
    ("q", "v", "scale", "reason"),
    [
        (_like(1, 2, 80, 64, dtype=torch.float8_e5m2), V, 1.0, "float8_e5m2"),
        (_like(1, 2, 80, 80), _like(1, 2, 80, 80).mT, 1.0, "D 80"),
        (Q, V, 0.0, "scale 0.0"),
        (Q, V, -1.0, "scale -1.0"),
        (_like(1, 2, 0, 64), V, 1.0, "q is empty"),
        (Q, _like(1, 2, 80, 64), 1.0, "transposed=True"),
        (_like(1, 2, 64, 80).mT, V, 1.0, "q's last dimension is not contiguous"),
        (_like(1, 2, 80, 72)[..., 8:], V, 1.0, "16 bytes"),
        (Q, _like(1, 2, 64, 88)[..., :80].mT, 1.0, "multiples of 16 bytes"),
        (_like(1, 5000, 1, 64), V, 1.0, "heads"),
        (Q, V, 1.0, "compute capability"),
    ],
)
def test_what_it_cannot_serve_is_said_with_its_reason(q, v, scale, reason) -> None:
    said = supports(q, Q, v, scale=scale, causal=False)
    assert said is not None
    assert reason in said


def test_interleaved_keys_need_their_padding() -> None:
    memory = _like(1, 2, 64, 80).mT
    for v, interleaved, said in (
        (memory[:, :, :75], True, "compute capability"),
        (memory[:, :, 16:70], True, "compute capability"),
        (memory[:, :, 8:], True, "16 bytes"),
        (_like(1, 2, 64, 85)[..., :75].mT, False, "multiples of 16 bytes"),
    ):
        found = supports(Q, Q[:, :, : v.shape[2]], v, scale=1.0, causal=False, v_interleaved=interleaved)
        assert found is not None
        assert said in found
    assert padding_refusal(_like(1, 1, 64, 24).mT) == (
        "v's 24 keys are not stored up to a multiple of 16: interleaved, they must be"
    )


def test_only_the_hopper_kernel_takes_interleaved_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_check_device", lambda device: None)
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(()))
    for kernel, said in (
        ("triton", "plain Triton reads keys in their own order"),
        ("hopper", "hopper"),
        (None, "v_inter"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            api.flash_attention_fp8(Q, Q, V, **descales, kernel=kernel, v_interleaved=True)


def test_the_hopper_kernel_runs_by_default_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def one(name: str) -> Callable[..., tuple[str, str]]:
        return lambda q, k, v, **options: ran.append((name, options.get("v_interleaved"))) or ("out", "lse")

    monkeypatch.setattr(api, "_check_device", lambda device: None)
    monkeypatch.setattr(api, "machine", lambda device: None)
    monkeypatch.setattr(api, "forward", one("triton"))
    monkeypatch.setattr(launch, "forward", one("hopper"))
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(()))
    for reason, options in (
        (None, {}), (None, {"v_interleaved": True}), (None, {"kernel": "triton"}), ("not this", {}),
    ):  # fmt: skip
        monkeypatch.setattr(launch, "supports", lambda *tensors, reason=reason, **options: reason)
        assert api.flash_attention_fp8(Q, Q, V, **descales, return_lse=True, **options) == ("out", "lse")
    assert ran == [("hopper", False), ("hopper", True), ("triton", None), ("triton", None)]


def test_variants_with_interleaved_keys_declare_the_same() -> None:
    from pytest_flashattn.known_apis import infer
    from reference_kernels.fp8 import variants

    support = infer(variants.hopper)[1]
    assert infer(variants.hopper_interleaved)[1] == support
    assert support.head_dims == set(TABLE)


def test_tails_and_diagonals_are_code_of_their_own() -> None:
    code = {
        (causal, lk): fixed(128, lookup(128, causal=causal), causal=causal, lq=1024, lk=lk, by_blocks=True)
        for causal in (False, True)
        for lk in (1024, 1000)
    }
    assert code[False, 1000]["TAIL"]
    assert code[True, 1000]["DIAGONALS"]
    assert not code[False, 1024]["TAIL"]
    assert not code[True, 1024]["DIAGONALS"]
    assert all(c["V_BLOCKS"] and "FREEZE" not in c for c in code.values())
    # Tiles of 192 rows never end with the blocks of 128 keys.
    assert fixed(64, lookup(64, causal=True), causal=True, lq=1024, lk=1024, by_blocks=True)["DIAGONALS"]


def test_tiles_do_not_cross_the_borders_of_scales() -> None:
    from reference_kernels.fp8 import configs
    from reference_kernels.fp8.quantiser import BLOCK

    tiles = [*(row for rows in configs.TABLE.values() for row in rows.values()), configs.INTERPRETER]
    assert all(BLOCK % tile.block_m == 0 and BLOCK % tile.block_n == 0 for tile in tiles)
    # Of the rows of a Hopper tile each consumer asks for its own 64.
    assert BLOCK % 64 == 0
    assert all(BLOCK % tile.block_n == 0 for by_mask in TABLE.values() for tile in by_mask.values())


def test_kernels_compile_to_fp8_products() -> None:
    jobs = [(cases.forward_case(128, AHEAD, blocks=True, interleaved=both), 90) for both in (False, True)]
    jobs += [(plain.forward_case("e4m3", 64, causal=True, capability=c), c) for c in plain.PRODUCTS]
    for result in compiling.compile_all(jobs):
        assert compiling.violations(result) == []
        assert result.counts[result.instructions[0]] > 0


def test_the_lane_misses_products_in_16_bits() -> None:
    case = plain.forward_case("e4m3", 64)
    result = compiling.Compiled(case.name, 90, 4, instructions=case.instructions, counts={"wgmma": 8})
    assert compiling.violations(result) == [f"{case.name} for sm_90 has no wgmma e4m3 instruction."]


def test_a_launch_makes_no_constant_of_an_argument_that_is_1() -> None:
    """Triton specialises an integer of 1, and an aggregate's field, a tensor, takes no constant.

    So no integer of a kernel in Gluon may be left to be specialised: strides, heads and lengths are all 1 somewhere.
    None, a descriptor that is absent, is a constant rightly.
    """
    seen = set()
    for case in [*cases.compile_cases(90), *hopper_forward.compile_cases(90), *hopper_backward.compile_cases(90)]:
        seen.add(case.kernel.fn.__module__)
        left = [
            parameter.name
            for parameter in case.kernel.params
            if case.signature[parameter.name] in ("i32", "constexpr")
            and not (parameter.is_constexpr or parameter.do_not_specialize)
            and case.constexprs.get(parameter.name, 1) is not None
        ]
        assert left == [], f"{case.name} would be launched with constants for them"
    assert len(seen) == 9, seen


def test_every_case_is_listed_for_its_architectures() -> None:
    assert plain.compile_cases(80) == cases.compile_cases(89) == []
    listed = cases.compile_cases(90)
    assert {case.name for case in listed if not case.only_named} == cases.ALWAYS
    assert {case.constexprs["D"] for case in listed} == set(TABLE)
