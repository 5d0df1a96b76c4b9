"""Options: each bad value is a usage error of one sentence; the command line wins over the ini file."""

from __future__ import annotations

import pytest

from conftest import Run, error, load_json


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--flashattn-matrix=huge", "--flashattn-matrix: 'huge' is none of smoke, default, full"),
        ("--flashattn-suite=maybe", "--flashattn-suite: 'maybe' is none of auto, always, never"),
        ("--flashattn-seed=-1", "--flashattn-seed: '-1' is no seed; write a whole number, 0 or more"),
        ("--flashattn-device=tpu", "--flashattn-device: 'tpu' is no device; write auto, cpu, cuda or cuda:N"),
        ("--flashattn-timeout=soon", "--flashattn-timeout: 'soon' is no number of seconds"),
        ("--flashattn-require=sm90,bakward", "--flashattn-require: unknown bakward; known: causal, "),
        ("--flashattn-json=no/such/folder/x.json", "--flashattn-json: cannot write "),
        ("--flashattn-json=.", "--flashattn-json: cannot write "),
        ("--flashattn-expect=none.toml", "none.toml is no file"),
    ],
)
def test_bad_value(trial: Run, option: str, sentence: str) -> None:
    assert sentence in error(trial("good", option, matrix=None))


def test_bad_ini_value_names_the_key(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makeini("[pytest]\nflashattn_matrix = huge")
    assert "ini key flashattn_matrix: 'huge'" in error(trial("good", matrix=None))


def test_bad_implementation(pytester: pytest.Pytester, trial: Run) -> None:
    sentence = "--flashattn-impl=nowhere:attn: there is no module 'nowhere'"
    assert error(trial(None, "--flashattn-impl=nowhere:attn")) == sentence
    assert error(trial(None, "--flashattn-impl=nowhere:attn", "--flashattn-json=x.json")) == sentence
    assert not list(pytester.path.glob("x.json*"))
    assert error(trial(None, "--flashattn-impl=nowhere:attn", "-n2", process=True)) == sentence


def test_command_line_wins(pytester: pytest.Pytester, trial: Run) -> None:
    pytester.makeini("[pytest]\nflashattn_impl =\n  kern:bad\nflashattn_seed = 3\nflashattn_timeout =")
    result = trial("good", "--flashattn-json=out.json", "flashattn-suite/lse")
    assert result.ret == 0
    out = load_json(pytester.path / "out.json")
    assert [i["spec"] for i in out["implementations"]] == ["kern:good"]
    assert out["settings"]["seed"] == 3


def test_help_teaches(trial: Run) -> None:
    result = trial(None, "--help", matrix=None)
    result.stdout.fnmatch_lines(
        ["flashattn: attention implementations on trial*", "*--flashattn-impl=MODULE:ATTRIBUTE*"]
    )
    result.stdout.fnmatch_lines(["*flashattn_impl*(linelist)*"])


def test_markers_are_registered(trial: Run) -> None:
    result = trial(None, "--markers", matrix=None)
    result.stdout.fnmatch_lines(
        ["@pytest.mark.sm90(exact=False): *", "@pytest.mark.fp8: *", "@pytest.mark.flashattn_cases(*"]
    )
