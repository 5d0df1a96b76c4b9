"""Dense, streaming, the bounds' own pass, and a row-by-row autograd implementation give the same numbers to 1e-12."""

from __future__ import annotations

import functools

import pytest
import torch
from oracle_problems import PROBLEMS, Problem, assert_agree, every_problem, problem, row_by_row

from oracles import Arithmetic, AttentionSpec, Segments, dense, evaluate, streaming

_reference = functools.cache(lambda name: row_by_row(problem(**PROBLEMS[name])))


def _named(gradients: dense.Gradients) -> dict[str, torch.Tensor]:
    return {name: x for name, x in gradients._asdict().items() if x is not None}


@every_problem
def test_dense_matches_autograd(name: str) -> None:
    p = problem(**PROBLEMS[name])
    o, lse, gradients = _reference(name)
    found = dense.forward(p.q, p.k, p.v, p.spec)
    assert_agree(found.o, o, "o")
    assert_agree(found.lse, lse, "lse")
    found_gradients = _named(dense.backward(p.q, p.k, p.v, p.spec, p.do, p.dlse))
    assert found_gradients.keys() == gradients.keys()
    for key, expected in gradients.items():
        assert_agree(found_gradients[key], expected, key)


@every_problem
@pytest.mark.parametrize("block", [5, 1024])
def test_streaming_matches_dense(name: str, block: int) -> None:
    p = problem(**PROBLEMS[name])
    found, expected = streaming.forward(p.q, p.k, p.v, p.spec, block=block), dense.forward(p.q, p.k, p.v, p.spec)
    assert_agree(found.o, expected.o, "o")
    assert_agree(found.lse, expected.lse, "lse")
    found_gradients = _named(streaming.backward(p.q, p.k, p.v, p.spec, p.do, p.dlse, block=block))
    for key, x in _named(dense.backward(p.q, p.k, p.v, p.spec, p.do, p.dlse)).items():
        assert_agree(found_gradients[key], x, key)


@every_problem
@pytest.mark.parametrize("rows_per_block", [None, 3])
def test_evaluate_values_match_dense(name: str, rows_per_block: int | None) -> None:
    p = problem(**PROBLEMS[name])
    arithmetic = Arithmetic.of(torch.float16)
    truth = evaluate(p.q, p.k, p.v, p.spec, do=p.do, dlse=p.dlse, arithmetic=arithmetic, rows_per_block=rows_per_block)
    expected = dense.forward(p.q, p.k, p.v, p.spec)._asdict()
    expected |= _named(dense.backward(p.q, p.k, p.v, p.spec, p.do, p.dlse))
    assert truth.keys() == expected.keys()
    for key, x in expected.items():
        assert_agree(truth[key].value, x, key)
        for part in (truth[key].random, truth[key].fixed):
            assert part.shape == x.shape
            assert part.isfinite().all()
            assert (part >= 0).all()


@every_problem
def test_blocks_of_rows_do_not_change_the_bound(name: str) -> None:
    p = problem(**PROBLEMS[name])
    whole, split = (
        evaluate(p.q, p.k, p.v, p.spec, do=p.do, arithmetic=Arithmetic.of(torch.float16), rows_per_block=rows)
        for rows in (None, 4)
    )
    for key, truth in whole.items():
        assert_agree(split[key].random, truth.random, key)


def test_large_problems_are_evaluated_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows make evaluate loop over batches and key heads: same values, same bounds, same reduced dbias."""
    from oracles import bounds

    p = problem(
        lk=23,
        bias=lambda normal: normal(1, 4, 1, 23),
        sinks=lambda normal: normal(4),
        alibi_slopes=lambda normal: normal(2, 4),
    )
    arithmetic = Arithmetic.of(torch.bfloat16)
    together = evaluate(p.q, p.k, p.v, p.spec, do=p.do, dlse=p.dlse, arithmetic=arithmetic)
    apart = [(slice(n, n + 1), slice(h, h + 1), slice(i, i + 8)) for n in (0, 1) for h in (0, 1) for i in (0, 8, 16)]
    monkeypatch.setattr(
        bounds, "_blocks", lambda q, k, rows: [(n, h, slice(r.start, min(r.stop, 17))) for n, h, r in apart]
    )
    for key, truth in evaluate(p.q, p.k, p.v, p.spec, do=p.do, dlse=p.dlse, arithmetic=arithmetic).items():
        assert_agree(truth.value, together[key].value, key)
        assert_agree(truth.random, together[key].random, key)


def test_streaming_gives_the_rows_asked_for() -> None:
    p = problem(**PROBLEMS["everything"])
    rows = torch.tensor([16, 3, 3, 0])
    found, whole = streaming.forward(p.q, p.k, p.v, p.spec, rows=rows, block=3), dense.forward(p.q, p.k, p.v, p.spec)
    assert_agree(found.o, whole.o[:, :, rows], "o")
    assert_agree(found.lse, whole.lse[:, :, rows], "lse")
    with pytest.raises(ValueError, match="between 0 and 16"):
        streaming.forward(p.q, p.k, p.v, p.spec, rows=torch.tensor([17]))


def test_gradcheck() -> None:
    """The analytic gradients against finite differences, through an autograd Function made of the two."""

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, bias, sinks):  # type: ignore[no-untyped-def]
            ctx.spec = AttentionSpec(causal=True, softcap=1.3, bias=bias, sinks=sinks)
            ctx.save_for_backward(q, k, v)
            return tuple(dense.forward(q, k, v, ctx.spec))

        @staticmethod
        def backward(ctx, do, dlse):  # type: ignore[no-untyped-def]
            return tuple(dense.backward(*ctx.saved_tensors, ctx.spec, do, dlse))

    p = problem(
        b=1, hq=2, hkv=1, lq=3, lk=4, d=3, dv=2, bias=lambda normal: normal(2, 1, 4), sinks=lambda normal: normal(2)
    )
    inputs = [x.clone().requires_grad_() for x in (p.q, p.k, p.v, p.spec.bias, p.spec.sinks) if x is not None]
    assert torch.autograd.gradcheck(Attend.apply, inputs)


def _packed(p: Problem, segments: Segments, options: dict) -> None:
    whole = dense.forward(p.q, p.k, p.v, AttentionSpec(segments=segments, **options))
    for (a, b), (c, d) in zip(
        zip(segments.cu_q, segments.cu_q[1:], strict=False),
        zip(segments.cu_k, segments.cu_k[1:], strict=False),
        strict=True,
    ):
        alone = dense.forward(p.q[:, :, a:b], p.k[:, :, c:d], p.v[:, :, c:d], AttentionSpec(**options))
        assert_agree(whole.o[:, :, a:b], alone.o, "o")
        assert_agree(whole.lse[:, :, a:b], alone.lse, "lse")
    assert (whole.o[:, :, segments.cu_q[-1] :] == 0).all()
    assert (whole.lse[:, :, segments.cu_q[-1] :] == -torch.inf).all()


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (2, 1)}, {"alibi_slopes": torch.rand(4)}], ids=str
)
def test_segments_are_separate_problems(alignment: str, options: dict) -> None:
    segments = Segments((0, 0, 6, 6, 9, 15), (0, 4, 9, 12, 12, 22))
    _packed(problem(), segments, {"alignment": alignment, **options})


def test_low_precision_inputs_are_taken_as_exact() -> None:
    p = problem(dtype=torch.bfloat16)
    wide = dense.forward(p.q.double(), p.k.double(), p.v.double(), p.spec)
    for found in (dense.forward(p.q, p.k, p.v, p.spec), streaming.forward(p.q, p.k, p.v, p.spec)):
        assert_agree(found.o, wide.o, "o")


def test_inputs_that_require_grad_are_welcome() -> None:
    p = problem(bias=lambda normal: normal(17, 23).requires_grad_())
    q = p.q.clone().requires_grad_()
    assert not dense.forward(q, p.k, p.v, p.spec).o.requires_grad
    assert not streaming.backward(q, p.k, p.v, p.spec, p.do).dq.requires_grad
