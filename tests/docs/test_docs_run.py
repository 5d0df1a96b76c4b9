"""The documents are executed: every command and every python block that carries no `none`.

The comment above a block says what must come of it: `exit=N` (0), `ends="…"` (start of the last line), `prints="…"`,
`smoke` (the smallest matrix), `process` (not in this process), `after` (the block before it comes first), `none: why`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from documents import PAGES, ROOT, Block, blocks

# pytester drops the modules that a run imports: what the outer process holds already is not imported again each time.
from pytest_flashattn import expectations, options, strategies, trial  # noqa: F401
from pytest_flashattn.performance import thresholds

ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in ALL if block.language == "sh" and "none" not in block.mark]
PYTHON = [block for block in ALL if block.language == "python" and block.mark[:1] == ("test:",)]

SET_UP = ("python3 -m venv .venv", ".venv/bin/pip install '.[cpu]'", ".venv/bin/pip install -e '.[cpu,test]'")
INSTALLED = any(entry.name == "flashattn" for entry in metadata.entry_points(group="pytest11"))


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds docs/examples, like the repository, and nothing else."""
    shutil.copytree(ROOT / "docs/examples", pytester.path / "docs/examples")
    for name in [path.stem for path in (ROOT / "docs/examples").glob("*.py")]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return pytester.path


def enter(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = folder if block.page == "README.md" else folder / "docs/examples"
    monkeypatch.chdir(where)
    monkeypatch.syspath_prepend(folder / "docs/examples")


def execute(block: Block, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a block of commands: each line that begins with pytest, after the set-up that the line may begin with."""
    added = ["-p", "no:benchmark", "-p", "no:cacheprovider"]
    added += [] if INSTALLED else ["-p", "pytest_flashattn.plugin"]
    added += ["--flashattn-matrix=smoke"] if block.flag("smoke") else []
    monkeypatch.setenv("PYTEST_ADDOPTS", shlex.join(added))
    for line in block.text.splitlines():
        *before, command = line.split(" && ")
        assert all(part in SET_UP for part in before), before
        program, *args = shlex.split(command)
        if program == "cd":
            monkeypatch.chdir(args[0])
            continue
        assert program in ("pytest", ".venv/bin/pytest")
        if block.flag("process"):
            paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
            result = pytester.run(sys.executable, "-m", "pytest", *args)
        else:
            result = pytester.runpytest_inprocess(*args)
        check(block, int(result.ret), result.stdout.str())


def check(block: Block, status: int, output: str) -> None:
    assert status == int((block.values("exit") or ["0"])[0]), output
    last = output.rstrip().rpartition("\n")[2]
    for text in block.values("ends"):
        assert text in last
    for text in block.values("prints"):
        assert text in output


def perform(block: Block) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(block.text, block.id, "exec"), {"__name__": "__main__"})
    check(block, 0, said.getvalue())


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.id)
def test_command(block: Block, folder: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(block, folder, monkeypatch)
    execute(block, pytester, monkeypatch)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.id)
def test_python(block: Block, folder: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(block, folder, monkeypatch)
    if block.flag("after"):
        execute(ALL[ALL.index(block) - 1], pytester, monkeypatch)
    perform(block)


def test_what_the_guide_says_of_a_root_conftest(folder: Path, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        from pathlib import Path
        import pytest
        @pytest.fixture(autouse=True)
        def reached():
            Path("fixture.log").touch()
        def pytest_collection_modifyitems(items):
            Path("session.log").touch()
        def pytest_runtest_setup(item):
            Path("item.log").touch()
        """
    )
    pytester.syspathinsert(folder / "docs/examples")
    result = pytester.runpytest_inprocess(
        "-p", "no:benchmark", "flashattn-suite/forward", "--flashattn-impl=my_attention:attention",
        "--flashattn-matrix=smoke", *([] if INSTALLED else ["-p", "pytest_flashattn.plugin"]),
    )  # fmt: skip
    assert result.ret == 0
    assert (folder / "fixture.log").exists()
    assert (folder / "session.log").exists()
    assert not (folder / "item.log").exists()


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "toml"], ids=lambda block: block.id)
def test_toml(block: Block, tmp_path: Path) -> None:
    parsed = tomllib.loads(block.text)
    if "expect" in parsed:
        path = tmp_path / "flashattn-expect.toml"
        path.write_text(block.text, encoding="utf-8")
        assert expectations.load(path)
    elif block.page == "docs/performance.md":
        assert thresholds.parse(block.text, block.id).ratio
    else:
        assert set(parsed["tool"]["pytest"]["ini_options"]) <= {o.key for o in options.OPTIONS if o.ini}


def test_every_command_and_python_block_says_what_becomes_of_it() -> None:
    bare = [b.id for b in ALL if b.language in ("sh", "python") and b.mark[:1] not in (("test:",), ("file:",))]
    assert not bare
