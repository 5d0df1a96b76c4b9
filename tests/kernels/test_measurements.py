"""The scripts that measure the Hopper kernels, as far as no GPU is needed: cells, workers, files, sanitizers' words."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "measurements"))
import cells
import contenders
import faulty
import hopper
import hopper_backward
import hopper_proof
import sanitizers

from pytest_flashattn.cases import Case
from reference_kernels import compiling
from reference_kernels.hopper import kernel as hopper_kernel

SCRIPTS = (hopper, hopper_backward, hopper_proof)
PARTS = [(module, part) for module in SCRIPTS for part in module.SCRIPT.parts]


@pytest.mark.parametrize(("module", "part"), PARTS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_the_cells_of_a_part_are_distinct_and_their_cases_parse(module: Any, part: str) -> None:
    planned = module.SCRIPT.parts[part]()
    assert planned
    assert len(set(planned)) == len(planned)
    planned += module.SCRIPT.ahead.get(part, list)()
    for word in {word for cell in planned for word in cell.split() if word.startswith(("bf16-", "fp16-"))}:
        assert Case.parse(word).id == word


PROOF_CELLS = sorted({cell for part, ask in hopper_proof.SCRIPT.parts.items() for cell in ask()} | {
    cell for ask in hopper_proof.SCRIPT.ahead.values() for cell in ask()
})  # fmt: skip


def test_every_cell_of_the_proof_has_a_function_that_takes_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("repeat", "right", "touch", "fault", "warm", "turns", "control", "spared", "sanitized"):
        signature = inspect.signature(getattr(hopper_proof, name))
        monkeypatch.setattr(
            hopper_proof, name, lambda *words, signature=signature: asked.append(signature.bind(*words)) or {"ok": True}
        )
    import graphs

    for name in ("graph", "compiled", "unseen"):
        signature = inspect.signature(getattr(graphs, name))
        monkeypatch.setattr(
            graphs, name, lambda *words, signature=signature: asked.append(signature.bind(*words)) or {"ok": True}
        )
    for cell in PROOF_CELLS:
        assert hopper_proof.run_cell(cell) == {"ok": True}
    assert len(asked) == len(PROOF_CELLS)


def test_every_kernel_that_a_cell_names_exists() -> None:
    names = {cell.split()[1] for cell in PROOF_CELLS if cell.split()[0] in ("repeat", "right", "touch", "warm")}
    names |= {
        tile for kernels, _, _ in hopper_proof.TURNS.values() for name in kernels for tile in contenders.tiled(name)
    }
    for name in names:
        found = contenders.backward_named(name) if contenders.is_backward(name) else contenders.forward_named(name)
        assert callable(found)
    for wrong in ("stage4", "v1x@64,64,4,2"):
        with pytest.raises(ValueError, match=f"no forward '{wrong.partition('@')[0]}'"):
            contenders.forward_named(wrong)


def test_ratios_are_taken_of_what_is_timed() -> None:
    for kernels, peers, pairs in hopper_proof.TURNS.values():
        assert "cudnn" in peers  # whose results all others must agree with
        assert {name for pair in pairs for name in pair} <= {*kernels, *peers}


def test_the_kernels_on_which_sanitizers_are_tried_compile() -> None:
    cases = faulty.compile_cases()
    results = {result.name: result for result in compiling.compile_all([(case, 90) for case in cases])}
    assert {name: result.fault for name, result in results.items()} == {case.name: "" for case in cases}
    assert {name for _, name in (*sanitizers.WRONG, *sanitizers.RIGHT)} == set(results)
    assert all(callable(getattr(faulty, name)) for name in results)
    assert {name for name, result in results.items() if result.counts["tma"]} == {"waited", "unwaited"}
    assert {name for name, result in results.items() if result.partitions} == {"handed", "unhanded"}


ACCESSES = r"""
import json, re, subprocess, sys
from pathlib import Path
import triton
sys.path[:0] = {folders!r}
import faulty
from reference_kernels.compiling.worker import _build
from reference_kernels.hopper import cases, stage3

tool = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "nvdisasm"
found = []
for case in (faulty.compile_cases()[-1], cases.stage_case(stage3.STAGE, "bf16", 64, causal=False)):
    compiled, _ = _build(case.kernel, case.signature, case.constexprs, case.num_warps, case.num_stages, 90)
    Path(sys.argv[1]).write_bytes(compiled.asm["cubin"])
    sass = subprocess.run([tool, "-g", "-c", sys.argv[1]], capture_output=True, text=True, check=True).stdout
    place = ("", 0)
    for line in sass.splitlines():
        if source := re.search(r'## File "([^"]+)", line (\d+)', line):
            place = (source[1], int(source[2]))
        elif access := re.search(r"\b(?:LDS|STS|LDSM|STSM)\b.*\[(.*)\]", line):
            last = access[1].split("+")[-1]
            found.append([case.kernel.__name__, *place, int(last, 16) if last.startswith("0x") else 0])
print(json.dumps(found))
"""


def test_no_access_to_a_tile_has_the_line_of_the_dispatch(tmp_path: Path) -> None:
    script = ACCESSES.format(folders=[str(cells.ROOT), str(cells.ROOT / "measurements")])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "cubin")], capture_output=True, text=True, check=True
    )
    accesses = json.loads(done.stdout.splitlines()[-1])
    stage3_tiles = (2 * 64 + 2 * 2 * 128) * 64 * 2
    for kernel, tiles in (("hand_kernel", faulty.ROWS * faulty.COLUMNS * 2), ("stage3_kernel", stage3_tiles)):
        lines = {True: [], False: []}
        for name, file, line, offset in accesses:
            if name == kernel:
                lines[sanitizers._starts_partitions(kernel, file, line)].append(offset)
        assert len(lines[True]) >= 3  # the partition's number, twice written, once read
        assert all(offset >= tiles for offset in lines[True])
        assert any(offset < tiles for offset in lines[False])


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)
def test_a_script_teaches_and_says_what_is_missing(module: Any) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, module.__file__, *arguments], capture_output=True, text=True)

    text = run("--help").stdout
    assert all(f"--part {part} --out" in text for part in module.SCRIPT.parts)
    (part, ask), *_ = module.SCRIPT.parts.items()
    assert run("--part", part, "--list").stdout.splitlines() == ask()
    for words, said in (
        ([], f"say --part {part} or"),
        (["--part", part], "say --out FILE"),
        (["--part", part, "--only", "no-such-word", "--out", "x"], "no cell of"),
    ):
        done = run(*words)
        assert done.returncode == 2
        assert said in done.stderr


FAKE = """
import os, sys, time
sys.path.insert(0, {folder!r})
from cells import Script, counted, main

def answer(cell):
    kind = cell.split()[0]
    if kind == "die":
        os._exit(7)
    if kind == "hang":
        time.sleep(60)
    if kind == "raise":
        raise ValueError("a reason\\nin two lines")
    if kind == "poison":
        raise RuntimeError("CUDA error: an illegal memory access")
    print("a library talks")
    return {{"ok": kind == "good", "pid": os.getpid()}}

SCRIPT = Script(__file__, __doc__, {{"all": list}}, answer, lambda answers: counted(answers, {{}}))
if __name__ == "__main__":
    sys.exit(main(SCRIPT))
"""


def test_a_cell_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fake.py"
    file.write_text(FAKE.format(folder=str(cells.ROOT / "measurements")))
    planned = ["good 1", "raise", "good 2", "die", "good 3", "hang", "good 4", "poison", "good 5", "bad"]

    def summary(answers: list[cells.Answer]) -> dict[str, Any]:
        return cells.counted(answers, {"x": [1.0, 4.0]})

    script = cells.Script(str(file), "", {"all": lambda: planned}, lambda cell: {}, summary)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    out = tmp_path / "folder" / "out.json"
    assert cells.main(script, ["--part", "all", "--out", str(out), "--limit", "10"]) == 1
    report = json.loads(out.read_text())
    assert list(report) == ["command", "date", "device", "versions", "summary", "cells"]
    assert report["command"] == "python measurements/fake.py --part all"
    assert report["summary"] == {"cells": 10, "ok": 5, "x": {"geometric mean": 2.0, "least": 1.0}}
    found = {answer["cell"]: answer for answer in report["cells"]}
    assert list(found) == planned
    assert [cell for cell in planned if found[cell]["ok"]] == [f"good {n}" for n in range(1, 6)]
    assert found["raise"]["error"] == "ValueError: a reason in two lines"
    assert found["die"]["error"] == "the worker died (exit status 7)"
    assert found["hang"]["error"] == "no answer within 10 s"
    workers = [found[f"good {n}"]["pid"] for n in range(1, 6)]
    assert workers[0] == workers[1]  # an exception is no reason to begin again
    assert len(set(workers[1:])) == 4  # a death, a hang and an error of the GPU are
    assert cells.main(script, ["--part", "all", "--out", str(out), "--only", "good"]) == 0
    assert cells.main(script, ["--part", "all", "--out", str(out), "--only", "good", "--budget", "0"]) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"ok": False, "cell": "a", "error": "why"}, "FAIL a: why"),
        ({"ok": True, "cell": "a", "calls": 9, "differing": 0}, "ok   a: calls 9  differing 0"),
        ({"ok": True, "cell": "a", "ratios": {"o bound": 0.5, "lse": "inf"}, "notes": []}, "o bound 0.50  lse inf"),
        ({"ok": False, "cell": "a", "ratios": {"dq": {"bound": 0.5, "noise": "2.0"}}, "notes": ["n"]}, "dq 2.00  n"),
        ({"ok": True, "cell": "a", "tflops": {"x": 12.34}, "ratios": {"x/y": 0.5}}, "x   12.3   x/y 0.500"),
    ],
)
def test_an_answer_is_one_line(answer: dict[str, Any], said: str) -> None:
    assert said in cells.line_of(answer)


RACES = "========= RACECHECK SUMMARY: {} displayed "
GOOD = '{"cell": "touch a b", "ok": true}\n'
BAD = '{"cell": "touch a b", "ok": false, "error": "RuntimeError: CUDA error: device-side assert"}\n'


# Of hand_kernel: by the line of its `def` and that of the call of warp_specialize; and by lines in its partitions.
SOURCE = Path(faulty.__file__).read_text().splitlines()
DEFINED = 1 + next(n for n, line in enumerate(SOURCE) if line.startswith("def hand_kernel("))
CALLED = 1 + next(n for n, line in enumerate(SOURCE) if "gl.warp_specialize(" in line)
STORED = 1 + next(n for n, line in enumerate(SOURCE) if "tile.store(" in line)
DISPATCH = f"""\
========= Error: Race reported between Read access at hand_kernel+0x120 in faulty.py:{DEFINED}
=========     and Write access at hand_kernel+0x8a0 in faulty.py:{DEFINED} [4 hazards]
=========     and Write access at hand_kernel+0xf20 in faulty.py:{CALLED} [4 hazards]
=========
"""
TILE = DISPATCH.replace(f":{CALLED}", f":{STORED}")


@pytest.mark.parametrize(
    ("tool", "output", "want"),
    [
        ("memcheck", GOOD + "========= ERROR SUMMARY: 0 errors\n", (True, 0, 0)),
        ("memcheck", GOOD + "========= Invalid __global__ write\n========= ERROR SUMMARY: 3 errors\n", (False, 3, 0)),
        ("memcheck", BAD + "========= ERROR SUMMARY: 0 errors\n", (False, 0, 0)),
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", (False, 0, 0)),
        ("memcheck", GOOD, (False, None, 0)),
        ("racecheck", GOOD + RACES.format("0 hazards") + "(0 errors, 0 warnings)\n", (True, 0, 0)),
        ("racecheck", GOOD + RACES.format("1 hazard") + "(0 errors, 1 warning)\n", (False, 0, 1)),
        (
            "racecheck",
            GOOD + RACES.format("2 hazards") + "(2 errors, 0 warnings)\n",
            (False, 2, 0),
        ),
        ("racecheck", GOOD + DISPATCH + RACES.format("1 hazard") + "(1 error, 0 warnings)\n", (True, 1, 0)),
        ("racecheck", GOOD + DISPATCH + RACES.format("2 hazards") + "(2 errors, 0 warnings)\n", (False, 2, 0)),
        ("racecheck", GOOD + TILE + RACES.format("1 hazard") + "(1 error, 0 warnings)\n", (False, 1, 0)),
        ("racecheck", DISPATCH + RACES.format("1 hazard") + "(1 error, 0 warnings)\n", (False, 1, 0)),
        ("consan", GOOD, (True, 0, 0)),
        ("consan", BAD, (False, 1, 0)),
        ("consan", "", (False, None, 0)),
    ],
)
def test_what_a_sanitizer_says_is_read(tool: str, output: str, want: tuple[bool, int | None, int]) -> None:
    found = sanitizers.read(tool, output, 1)
    assert (found["ok"], found["errors"], found["warnings"]) == want


def test_a_control_is_good_only_if_the_tool_names_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["fault unwaited: it does not compile"]
    monkeypatch.setattr(sanitizers, "under", lambda *_: {"errors": 1, "said": said, "ok": not said})
    assert not hopper_proof.control("consan", "unwaited")["ok"]
    assert not hopper_proof.spared("consan", "waited")["ok"]
    said.append("x.py:1: Assertion `Buffer being accessed has outstanding writes.` failed.")
    assert hopper_proof.control("consan", "unwaited")["ok"]


def test_a_report_is_of_the_dispatch_if_all_its_accesses_are() -> None:
    (dispatch,), (tile,) = sanitizers.races(DISPATCH), sanitizers.races(TILE)
    assert [len(dispatch), len(tile)] == [3, 3]
    assert sanitizers.of_dispatch(dispatch)
    assert not sanitizers.of_dispatch(tile)
    forward = Path(hopper_kernel.__file__).read_text().splitlines()
    for line, text in enumerate(forward, start=1):
        report = [f"Error: Race reported between Read access at forward_kernel+0x1c0 in kernel.py:{line}"]
        starts = text.startswith("def forward_kernel(") or "gl.warp_specialize(" in "".join(
            forward[line - 1 : line + 1]
        )
        assert sanitizers.of_dispatch(report) == starts
    assert not sanitizers.of_dispatch([*dispatch, "and Write access at hand_kernel+0x10"])  # of no known line
    assert not sanitizers.of_dispatch([line.replace("hand_kernel", "stage3_kernel") for line in dispatch])
    assert sanitizers.read("racecheck", GOOD + TILE + RACES.format("1") + "(1 error, 0 warnings)", 1)["said"] == tile


def test_a_tool_that_finds_something_in_a_right_kernel_is_named() -> None:
    answers = [{"cell": "spared racecheck handed", "ok": False, "said": ["Error: Race reported"]}]
    found = hopper_proof.summary([*answers, {"cell": "spared racecheck waited", "ok": True, "said": []}])
    assert found["does not apply"] == ["racecheck handed, which is right: Error: Race reported"]


def test_a_tool_that_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="compute-sanitizer is not on the PATH"):
        sanitizers.under("memcheck", "x.py", ["touch a b"], 5)
