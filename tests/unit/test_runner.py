"""`run()`: verdicts without pytest, and errors of one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pytest_flashattn
from pytest_flashattn import run


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    s = q.float() @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(
            ~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(s.shape[-1] - s.shape[-2]), -torch.inf
        )
    return (s.softmax(-1).nan_to_num() @ v).to(q.dtype)


def test_a_right_function_is_conformant() -> None:
    seen: list[Any] = []
    report = run(right, chapters=["forward", "causal.matches_oracle"], progress=seen.append)
    assert report.conformant
    assert len(seen) == len(report.results) > 5
    assert report.totals["failed"] == 0
    assert "conformant: " in str(report)


def test_a_wrong_function_is_not_and_the_report_says_where() -> None:
    report = run(lambda q, k, v: right(q, k[:, :, :-1], v[:, :, :-1]), chapters=["forward"], matrix="smoke")
    assert not report.conformant
    assert report.failures
    assert "beyond the bound" in str(report)
    assert "not conformant: " in str(report)


def test_cases_by_id_and_seed() -> None:
    report = run(right, chapters=["forward"], cases=["bf16-b1-h2-q7-k9-d16"], seed=3)
    assert [(r.case.id, r.case.seed) for r in report.results] == [("bf16-b1-h2-q7-k9-d16", 3)]


def test_nothing_verified_is_not_conformant() -> None:
    report = run(lambda q, k, v: right(q, k, v), chapters=["causal"])
    assert not report.conformant
    assert report.totals["declared"] == len(report.results)
    assert "not judged" in str(report)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"implementation": "nowhere:attn"}, ValueError, "nowhere"),
        ({"implementation": right, "chapters": ["foreward"]}, KeyError, "known: forward"),
        ({"implementation": right, "chapters": ["forward.matches"]}, KeyError, "forward.matches_oracle"),
        ({"implementation": right, "cases": ["bf61"]}, ValueError, "bf61"),
        ({"implementation": right, "matrix": "tiny"}, ValueError, "smoke, default, full"),
    ],
)
def test_what_does_not_exist_is_one_sentence(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        run(**arguments)
    assert words in str(caught.value)


def test_public_names_resolve_and_others_do_not() -> None:
    for name in pytest_flashattn.__all__:
        assert getattr(pytest_flashattn, name) is not None
    assert set(pytest_flashattn.__all__) <= set(dir(pytest_flashattn))
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = pytest_flashattn.nothing_here  # type: ignore[attr-defined]


def test_running_out_of_memory_is_unmet_and_not_implemented_is_declared() -> None:
    def fails_with(error: Exception) -> Any:
        def attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            raise error

        return attn

    for error, status in (
        (torch.OutOfMemoryError("tried to allocate 99 GiB"), "unmet"),
        (NotImplementedError("head dim 64"), "declared"),
        (RuntimeError("boom"), "failed"),
    ):
        report = run(fails_with(error), chapters=["forward"], cases=["fp32-b1-h1-q4-k4-d8"])
        assert report.totals[status] == 1, status
