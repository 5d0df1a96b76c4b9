"""The power command: who is run on what, who counts as killed, what is said of it."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import power_cast
import pytest
import torch

import oracles
from pytest_flashattn import __main__ as program
from pytest_flashattn.cases import Case
from pytest_flashattn.chapters import CHAPTERS
from pytest_flashattn.features import FP8
from pytest_flashattn.power import campaign, cast, crew, memo, plan, reach, suggest, tables, worker
from pytest_flashattn.power.plan import Job, Step
from pytest_flashattn.power.worker import Alone, At, Cost, Done, Kill
from tests import mutants as bundled

HERE = "power_cast"
SMALL, LARGER = (Step("forward.matches_oracle", Case.parse(f"fp16-b1-h2-{x}-d64")) for x in ("q64-k64", "q128-k128"))


def job(*mutants: str, steps: tuple[Step, ...] = (SMALL, LARGER), **more: Any) -> Job:
    return Job("smoke", "forward", steps, mutants, **more)


def performed(wanted: Job) -> list[worker.Event]:
    with memo.oracles_remembered() as answers:
        return list(worker.perform(wanted, worker.Stage(cast.load(HERE)), answers))


# -- who and what -----------------------------------------------------------------------------------------------------


def test_the_bundled_cast_is_complete() -> None:
    who = cast.load("tests.mutants")
    assert who.device == "cpu"
    assert len(who.mutants) > 130
    assert {"hang_on_empty", "causal_top_left"} <= who.mutants.keys()
    here = {number for number, (_, status) in who.catalogue.items() if status == "here"}
    assert here == {m.number for m in who.mutants.values()} - {0}
    assert sum(map(len, campaign.absent(who).values())) + len(here) == len(who.catalogue)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"MUTANTS": {}}, "has no MUTANTS"),
        ({"MUTANTS": {"a": SimpleNamespace(name="a", number=0, about="", killer="")}}, "has no attribute 'make'"),
        ({"EQUIVALENTS": {"b": power_cast.EQUIVALENTS["honest"]}}, "has no 'honest'"),
        ({"EQUIVALENTS": power_cast.EQUIVALENTS | {"hangs": power_cast.MUTANTS["hangs"]}}, "'hangs' is both"),
    ],
)
def test_a_module_that_is_no_cast_is_named(
    change: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("some_cast")
    vars(module).update({"MUTANTS": power_cast.MUTANTS, "EQUIVALENTS": power_cast.EQUIVALENTS} | change)
    monkeypatch.setitem(sys.modules, "some_cast", module)
    with pytest.raises(cast.UnusableModule, match=sentence):
        cast.load("some_cast")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mutants", "no_such_module"], "there is no module no_such_module"),
        (["--mutants", HERE, "--only", "zzz*"], "no mutant or equivalent matches 'zzz*'; there are unscaled"),
        (["--mutants", HERE, "--json", "no/folder/x.json"], "there is no folder no/folder"),
        (["--mutants", HERE, "--matrix", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        program.main(["power", *arguments])
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err.replace("\n", " ")


def test_the_bundled_mutants_are_missed_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir("/")
    with pytest.raises(cast.UnusableModule, match="run the command in a checkout of its source"):
        cast.load(cast.BUNDLED)


def test_every_case_is_in_one_job_and_cheap_ones_come_first() -> None:
    for level in ("smoke", "default"):
        jobs = [*plan.hunts(level, ["a"], ["b"]), *plan.hunts(level, ["a"], [], large=True)]
        steps = [step for one in jobs for step in one.steps]
        assert sorted(map(str, steps)) == sorted(map(str, plan.all_steps(level)))
        for one in jobs:
            costs = [plan.work(step.case) for step in one.steps]
            assert costs == sorted(costs)


def test_comparisons_pose_every_small_case_once_but_none_of_fp8() -> None:
    cases = [step.case for one in plan.comparisons("smoke", ["a"], []) for step in one.steps]
    whole = {step.case.id: step.case for step in plan.all_steps("smoke")}.values()
    small = [case.id for case in whole if plan.work(case) <= plan.LARGE and case.dtype not in FP8]
    assert sorted(case.id for case in cases) == sorted(small)
    assert len(small) < len(whole)


def test_whom_fp8_alone_shows_is_not_compared() -> None:
    plain, fp8 = (
        {"case": f"{dtype}-b1-h1-q1-k1-d64{words}"} for dtype, words in (("fp16", ""), ("e4m3", "-descale.head"))
    )
    levels = [{"kills": {"both": {"fp8": fp8}, "alone": {"fp8": fp8}}}, {"kills": {"both": {"forward": plain}}}]
    found = {name: campaign._in_fp8_alone(name, levels) for name in ("both", "alone", "survivor")}
    assert found == {"both": False, "alone": True, "survivor": False}


def test_no_case_of_smoke_is_large() -> None:
    assert not plan.hunts("smoke", ["a"], [], large=True)


def test_work_counts_whole_tiles() -> None:
    assert plan.work(Case.parse("fp16-b1-h1-q1-k1-d8")) == plan.work(Case.parse("fp16-b1-h1-q64-k64-d8"))
    assert plan.work(Case.parse("fp16-b1-h1-q65-k64-d8")) == 2 * 64 * 64 * 16


# -- what is saved ----------------------------------------------------------------------------------------------------


def test_oracles_answer_once_and_keep_no_tensor() -> None:
    q = torch.randn(1, 1, 7, 11)
    spec, arithmetic = oracles.AttentionSpec(), oracles.Arithmetic.of(q.dtype)
    want = oracles.evaluate(q, q, q, spec, arithmetic=arithmetic)["o"]
    original = oracles.evaluate
    with memo.oracles_remembered() as answers:
        assert oracles.evaluate is not original
        for _ in range(2):
            got = oracles.evaluate(q, q, q, spec, arithmetic=arithmetic)["o"]
            assert torch.equal(got.value, want.value)
            assert torch.equal(got.random, want.random)
            got.value.fill_(3)  # the answer is a copy
        assert len(answers._answers) == 1
        del got, want
        # Of this problem's shape: other tests of the process may keep tensors of theirs.
        kept = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.float64]
        assert not [x for x in kept if x.shape == q.shape]
        other = oracles.evaluate(q, q, 2 * q, spec, arithmetic=arithmetic)["o"]
        assert len(answers._answers) == 2
        assert not torch.equal(other.value, oracles.evaluate(q, q, q, spec, arithmetic=arithmetic)["o"].value)
    assert oracles.evaluate is original


@pytest.mark.parametrize(
    "step",
    [
        Step("gqa.head_map", Case.parse("bf16-b1-h6-kv2-q33-k65-d64")),
        Step("forward.matches_oracle", Case.parse("fp32-b1-h2-q65-k65-d40-scale0p3")),
        Step("features.sinks", Case.parse("bf16-b1-h2-q65-k65-d64-causal-sinks")),
    ],
    ids=str,
)
def test_a_fault_out_of_reach_makes_no_difference(step: Step) -> None:
    """What is skipped would have passed: all bundled mutants that the trace says a step cannot reach."""
    stage = worker.Stage(cast.load("tests.mutants"))
    honest = stage.fresh(cast.HONEST)
    read = reach.watched(honest.function)
    judge = worker.judge_of(step)
    assert not judge.base(honest)
    skipped = 0
    for name in bundled.MUTANTS:
        subject = stage.fresh(name)
        if not reach.reaches(stage.overridden[name], read):
            skipped += 1
            assert not judge.faults(subject), name
    assert skipped > 10


def test_what_a_mutant_overrides() -> None:
    honest = power_cast.Honest()
    assert reach.overridden(power_cast.Unscaled(), honest) == {"scores"}
    assert reach.overridden(honest, honest) == frozenset()
    assert reach.overridden(power_cast.negated, honest) is None
    assert reach.overridden(power_cast.Second(), honest) is None  # __call__ is looked up on the type
    own = power_cast.Honest()
    own.block = 3  # type: ignore[attr-defined]
    assert reach.overridden(own, honest) == {"block"}
    read = reach.watched(honest)
    honest(*torch.zeros(3, 1, 1, 2, 2))
    assert read is not None
    assert "scores" in read
    assert reach.reaches(frozenset({"scores"}), read)
    assert not reach.reaches(frozenset({"block"}), read)
    assert reach.watched(power_cast.negated) is None


# -- who is killed ----------------------------------------------------------------------------------------------------


def test_a_mutant_is_done_at_its_first_kill() -> None:
    events = performed(job("unscaled", "unused", "second", equivalents=("honest",)))
    assert [(e.name, e.step) for e in events if isinstance(e, Kill)] == [("unscaled", 0), ("second", 1)]
    assert [e for e in events if isinstance(e, Alone)] == [Alone("unscaled", 0, True), Alone("second", 1, False)]
    tried = [(e.name, e.step) for e in events if isinstance(e, At)]
    assert ("unscaled", 1) not in tried
    assert not [name for name, _ in tried if name == "unused"]
    assert len([e for e in events if isinstance(e, Cost)]) == 2


def test_a_survey_finds_every_step_that_kills_by_itself() -> None:
    events = performed(job("unscaled", "second", every=True))
    assert [(e.name, e.step) for e in events if isinstance(e, Kill)] == [("unscaled", 0), ("unscaled", 1)]


def test_a_step_that_accuses_the_honest_one_convicts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(power_cast.EQUIVALENTS, "honest", power_cast.MUTANTS["negated"])
    events = performed(job("unscaled"))
    assert [(e.name, e.step) for e in events if isinstance(e, Kill)] == [("honest", 0), ("honest", 1)]


def test_a_rule_gets_no_credit_for_refusing_who_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (Step("", SMALL.case),)
    caught = {e.rule for e in performed(job("negated", "unscaled", steps=steps)) if isinstance(e, Kill)}
    assert caught == set(worker.names(steps[0]))
    monkeypatch.setitem(power_cast.EQUIVALENTS, "right", power_cast.MUTANTS["negated"])
    events = performed(job("negated", steps=steps, equivalents=("right",)))
    assert {e.name for e in events if isinstance(e, Kill)} == {"right"}


def test_hangs_and_crashes_count_and_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "PATIENCE", 1.0)
    events: list[worker.Event] = []
    names = ("hangs", "unscaled", "aborts", "second", "hangs_later", "negated")
    crew.perform([job(*names)], HERE, lambda _, event: events.append(event))
    kills = {e.name: (e.step, e.reason) for e in events if isinstance(e, Kill)}
    assert kills.keys() == set(names)
    for name, step in (("hangs", 0), ("hangs_later", 1)):
        assert kills[name][0] == step
        assert kills[name][1].startswith("did not return within")
    assert kills["aborts"] == (0, "the process died (signal 6)")
    assert kills["second"][0] == 1
    assert kills["negated"][0] == 0
    assert events.count(Done()) == 1
    alone = {e.name: e.killed for e in events if isinstance(e, Alone)}
    assert alone == dict.fromkeys(kills, True) | {"second": False, "hangs_later": False}


def test_a_survey_goes_on_behind_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "PATIENCE", 1.0)
    events: list[worker.Event] = []
    crew.perform([job("hangs", "unscaled", every=True)], HERE, lambda _, event: events.append(event))
    kills = sorted((e.name, e.step) for e in events if isinstance(e, Kill))
    assert kills == [("hangs", 0), ("unscaled", 0), ("unscaled", 1)]


# -- what is said -----------------------------------------------------------------------------------------------------


def test_the_command_measures_and_judges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plan, "steps_of", lambda level, chapter, seed=0: [SMALL, LARGER] if chapter == "forward" else []
    )
    path = tmp_path / "power.json"
    ask = ["power", "--mutants", HERE, "--matrix", "smoke", "--json", str(path), "--only"]
    assert program.main([*ask, "[unh]n*"]) == 1  # unscaled falls, unused survives
    printed = capsys.readouterr().out
    assert "Survivors of smoke (1): unused" in printed
    assert "gpu (1): race; later: paged caches (1): paged" in printed
    document = json.loads(path.read_text(encoding="utf-8"))
    kill = document["levels"]["smoke"]["kills"]["unscaled"]["forward"]
    assert kill["case"] == SMALL.case.id
    assert "beyond the bound" in kill["reason"]
    assert document["mutants"]["unscaled"]["cheapest"]["check"] == "forward.matches_oracle"
    assert str(tmp_path) not in json.dumps(document["levels"])
    assert program.main([*ask, "unscaled", "--rules"]) == 0
    assert "allclose_1e2" in capsys.readouterr().out
    assert program.main([*ask, "unscaled", "--suggest-smoke"]) == 0
    assert SMALL.case.id in capsys.readouterr().out


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["power", "--help"]):
        with pytest.raises(SystemExit) as end:
            program.main(arguments)
        assert not end.value.code
    printed = capsys.readouterr().out
    assert "flashattn-suite" in printed
    assert "--suggest-smoke" in printed


def test_the_cover_is_small_and_takes_the_cheap_one() -> None:
    gqa = Step("gqa.matches_oracle", SMALL.case)
    kills = {SMALL: {"a", "b"}, LARGER: {"a", "b"}, gqa: {"b", "c"}}
    assert [(c.set, c.case, c.new) for c in suggest.cover(kills)] == [
        ("forward", SMALL.case, ("a", "b")),
        ("gqa", SMALL.case, ("c",)),
    ]
    found = suggest.document(kills, ["a", "b", "c", "d"], [LARGER])
    assert found["smoke"] == {"cases": 1, "killed": 2, "missed": ["c"]}
    assert found["never"] == ["d"]
    assert [row[3:5] for row in tables.cover(found)[1]] == [[2, "50.0%"], [1, "75.0%"]]
    assert [row[1:] for row in tables.smoke(found)[1]] == [[2, ""], [1, "c"], [1, "d"]]


def test_cells_of_the_matrix() -> None:
    kill = {"check": "causal.x", "case": "c", "work": 4, "reason": ""}
    document = {
        "mutants": {"m": {"number": 7, "cheapest": kill}, "n": {"number": 0, "cheapest": None}},
        "levels": {
            "smoke": {"kills": {"m": {"causal": kill}}},
            "default": {"kills": {"m": {"causal": kill, "lse": kill | {"alone": False}}}},
        },
    }
    head, rows = tables.matrix(document)
    cells = dict(zip(head, rows[0], strict=True))
    assert (cells["cau"], cells["lse"], cells["for"]) == ("s", "D", ".")
    assert rows[1][-1] == "SURVIVES"
    assert len(head) == len(CHAPTERS) + 3
