"""Cases, covering designs and matrices: ids are sources, tables are complete, broken tables get one sentence."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_flashattn import matrices
from pytest_flashattn.cases import BIASES, DOUTS, FAMILIES, LAYOUTS, Case
from pytest_flashattn.chapters import CHAPTERS, TIMED
from pytest_flashattn.covering import covering
from pytest_flashattn.features import FEATURES

CASES = st.builds(
    lambda group, kv, **rest: Case(heads=group * kv, kv_heads=kv, **rest),
    group=st.integers(1, 9), kv=st.integers(1, 4), dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    batch=st.integers(0, 3), q=st.integers(0, 4096), k=st.integers(0, 4096), d=st.integers(1, 256),
    dv=st.integers(1, 256),
    causal=st.booleans(), scale=st.none() | st.sampled_from([0.0, 0.3, -0.125, 1e-5]),
    window=st.none() | st.tuples(st.integers(0, 500), st.none() | st.integers(0, 500)),
    softcap=st.none() | st.sampled_from([5.0, 0.5]), alibi=st.booleans(), bias=st.none() | st.sampled_from(BIASES),
    sinks=st.booleans(), layout=st.sampled_from([x for x in LAYOUTS if x not in ("qkv", "far")]),
    dout=st.sampled_from(list(DOUTS)), family=st.sampled_from(list(FAMILIES)),
)  # fmt: skip


@given(CASES)
def test_an_id_is_the_source_of_its_case(case: Case) -> None:
    assert Case.parse(case.id) == case


def test_the_ids_of_the_documentation() -> None:
    assert Case.parse("bf16-b2-h8-kv2-q1023-k1024-d128-causal").id == "bf16-b2-h8-kv2-q1023-k1024-d128-causal"
    assert (
        Case(dtype="fp16", heads=4, kv_heads=2, q=257, k=257, causal=True).id == "fp16-b1-h4-kv2-q257-k257-d64-causal"
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [("bf16-b2-x3", "'x3' is not understood"), ("bf16-b2-b3", "batch is given twice"),
     ("bf16-h3-kv2", "not a multiple"), ("bf16-holes", "needs one"),
     ("bf16-mask.zzzz", "zzzz"), ("bf16-q4-k8-qkv", "needs Lq == Lk"), ("bf16-far", "needs batch >= 2"),
     ("bf16-wx.x", "no window")],
)  # fmt: skip
def test_an_id_that_is_no_case_names_the_part(text: str, part: str) -> None:
    with pytest.raises(ValueError, match="case id") as error:
        Case.parse(text)
    assert part in str(error.value)
    assert text in str(error.value)


def test_the_seed_changes_the_tensors_but_not_the_id() -> None:
    a, b = Case(seed=0), Case(seed=1)
    assert a.id == b.id
    assert a.rng_seed != b.rng_seed


def test_a_covering_design_has_every_valid_pair_and_few_rows() -> None:
    axes = [[f"{name}{i}" for i in range(size)] for name, size in (("a", 4), ("b", 3), ("c", 5), ("d", 2))]

    def valid(row: tuple[str, ...]) -> bool:
        return not (row[0] == "a0" and row[1] == "b0")

    rows = covering(axes, 2, valid)
    assert all(valid(row) for row in rows)
    for i, j in itertools.combinations(range(4), 2):
        seen = {(row[i], row[j]) for row in rows}
        wanted = set(itertools.product(axes[i], axes[j])) - {("a0", "b0")}
        assert seen == wanted
    assert len(rows) < 30  # the full product has 110 valid rows, the bound from below is 20
    assert rows == covering(axes, 2, valid), "not deterministic"


@pytest.mark.parametrize("level", matrices.LEVELS)
def test_every_chapter_has_cases_without_repetition(level: str) -> None:
    from pytest_flashattn.checks.registry import checks_of

    for chapter in (*CHAPTERS, *TIMED):
        for check in checks_of(chapter):
            cases = matrices.cases_for(chapter, check.name.partition(".")[2], level, 7)
            assert len({c.id for c in cases}) == len(cases) > 0
            assert all(c.seed == 7 for c in cases)


def test_the_default_matrix_uses_every_word_of_the_vocabulary() -> None:
    cases = [c for name in matrices._table() for c in matrices.cases_named(name, "default", 0)]
    assert {f for c in cases for f in c.features} == set(FEATURES) - {
        "lse",
        "backward",
        "bias_grad",
        "sinks_grad",
        "lse_grad",
    }
    assert {c.layout for c in cases} == set(LAYOUTS)
    assert {c.dout for c in cases} == set(DOUTS)
    assert {c.family for c in cases} == set(FAMILIES)


def test_every_set_of_the_table_is_used() -> None:
    from pytest_flashattn.checks.registry import checks_of

    used = set()
    for chapter in (*CHAPTERS, *TIMED):
        for check in checks_of(chapter):
            used.add(check.name if check.name in matrices._table() else chapter)
    assert used == set(matrices._table())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[forward", "not valid TOML"),
        ("[forward]\nsmoke = {}", "needs a `why`"),
        ('[forward]\nwhy = "x"\nsmokey = {}', "unknown key 'smokey'"),
    ],
)
def test_a_broken_table_gets_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(matrices.TableError, match=r"mine\.toml") as error:
        matrices.parse_table(text, "mine.toml")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value).strip()


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"why": "", "smoke": {"axes": [["bf61"]]}}, "'bf61' is not understood"),
        ({"why": "", "smoke": {"axis": []}}, "unknown key 'axis'"),
        ({"why": "", "smoke": {"axes": []}}, "gives no case"),
        ({"why": ""}, "missing"),
    ],
)
def test_a_broken_set_gets_one_sentence(entry: dict, sentence: str) -> None:
    with pytest.raises(matrices.TableError, match=r"\[mine\.smoke\]") as error:
        matrices.expand(entry, "smoke", "mine")
    assert sentence in str(error.value)
