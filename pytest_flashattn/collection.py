"""Collecting the bundled suite: node ids `flashattn-suite/<chapter>::test_<check>[<case id>]`.

A `Suite` collector is put under the Session by wrapping `pytest_make_collect_report`. Editing `config.args` instead
collects nothing when the virtual environment lies inside the project (pytest does not recurse into it), and node ids
would then depend on where the plugin is installed. The suite's files are not named test_*.py, so nothing collects them
twice. Torch-free: collecting touches neither a device nor the implementation. The matrices are imported where they are
used, since a session without the suite must not pay for them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .chapters import CHAPTERS, DRAWN, TIMED
from .options import SETTINGS, Settings

if TYPE_CHECKING:
    from .cases import Case

ROOT = "flashattn-suite"
PACKAGE = "pytest_flashattn.suite"
ARCHITECTURES = ("sm80", "sm90", "sm100")
BY_NAME_ONLY: tuple[str, ...] = (*TIMED, *DRAWN)
"""Chapters that run only when they are named: a whole suite means CHAPTERS."""

IMPLEMENTATION = "_flashattn_implementation"
"""The private fixture that carries the short name of an implementation when there are several."""


@dataclass(frozen=True)
class Pick:
    """One suite argument of the command line, `text`, taken apart."""

    text: str
    chapter: str = ""
    check: str = ""
    case: str = ""

    def takes(self, chapter: str, check: str = "", case: str = "") -> bool:
        """`case` is what stands between the brackets; a pick without `@implementation` takes all of them."""
        if self.chapter and self.chapter != chapter:
            return False
        if not self.chapter and chapter in BY_NAME_ONLY:
            return False
        if check and self.check and self.check != check:
            return False
        return not (case and self.case) or self.case in (case, case.partition("@")[0])


@dataclass(frozen=True)
class Selection:
    """What of the suite this run collects; empty: nothing of it."""

    picks: tuple[Pick, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.picks)

    @property
    def whole(self) -> bool:
        return any(not pick.chapter for pick in self.picks)

    def takes(self, chapter: str, check: str = "", case: str = "") -> bool:
        return any(pick.takes(chapter, check, case) for pick in self.picks)

    def chapters(self) -> list[str]:
        return [chapter for chapter in (*CHAPTERS, *BY_NAME_ONLY) if self.takes(chapter) and _file(chapter).is_file()]

    def extra_cases(self, chapter: str, check: str) -> list[str]:
        """Case ids asked for by name: they run whatever the matrix is, so a replay line needs no matrix."""
        return [p.case.partition("@")[0] for p in self.picks if p.case and (p.chapter, p.check) == (chapter, check)]


SELECTION = pytest.StashKey[Selection]()


def select(config: pytest.Config, settings: Settings) -> Selection:
    """Take the suite's arguments out of `config.args`; decide whether the whole suite belongs to the run."""
    own, picks = [], []
    for arg in config.args:
        pick = _parse(arg, config)
        picks.append(pick) if pick else own.append(arg)
    if picks:
        config.args = own
    given = config.args_source is pytest.Config.ArgsSource.ARGS
    automatic = settings.suite == "auto" and bool(settings.impl) and not given
    if not picks and (settings.suite == "always" or automatic):
        picks.append(Pick(ROOT))
    if settings.fuzz and any(not pick.chapter for pick in picks):
        picks += [Pick(f"{ROOT}/{chapter}", chapter) for chapter in DRAWN]
    config.stash[SETTINGS] = settings
    config.stash[SELECTION] = selection = Selection(tuple(picks))
    return selection


def _parse(arg: str, config: pytest.Config) -> Pick | None:
    path, _, names = arg.partition("::")
    path = path.rstrip("/")
    if config.getoption("pyargs") and (path == PACKAGE or path.startswith(f"{PACKAGE}.")):
        path = ROOT + path[len(PACKAGE) :].replace(".", "/")
    elif (path != ROOT and not path.startswith(f"{ROOT}/")) or (config.invocation_params.dir / path).exists():
        return None  # an existing path of the user wins over our name
    name, _, case = names.partition("[")
    return Pick(arg, path[len(ROOT) + 1 :], name.removeprefix("test_"), case.removesuffix("]"))


def validate(config: pytest.Config) -> None:
    """Raises UsageError when a pick matches nothing or a table is broken: one sentence, with the nearest matches."""
    from . import matrices

    settings, selection = config.stash[SETTINGS], config.stash[SELECTION]
    for pick in selection.picks:
        if pick.chapter and pick.chapter not in [c for c in (*CHAPTERS, *BY_NAME_ONLY) if _file(c).is_file()]:
            raise _nothing(pick, f"{ROOT}/{pick.chapter}", [f"{ROOT}/{c}" for c in CHAPTERS if _file(c).is_file()])
        checks = checks_of(pick.chapter) if pick.chapter else []
        if pick.check and pick.check not in checks:
            raise _nothing(pick, f"test_{pick.check}", [f"test_{check}" for check in checks])
        if pick.case:
            _validate_case(pick, settings)
    try:
        for chapter in selection.chapters():
            for check in checks_of(chapter):
                if chapter in CHAPTERS:
                    matrices.cases_for(chapter, check, settings.matrix, settings.seed)
    except matrices.TableError as error:
        raise pytest.UsageError(str(error)) from None


def _validate_case(pick: Pick, settings: Settings) -> None:
    from . import matrices
    from .cases import Case

    case, _, name = pick.case.partition("@")
    if name and settings.impl and (name not in settings.names() or len(settings.impl) == 1):
        raise _nothing(pick, name, list(settings.names()) if len(settings.impl) > 1 else [])
    try:
        Case.parse(case)
    except ValueError as error:
        named = pick.chapter in CHAPTERS
        cases = matrices.cases_for(pick.chapter, pick.check, settings.matrix, settings.seed) if named else []
        raise _nothing(pick, case, [c.id for c in cases], str(error)) from None


def _nothing(pick: Pick, wrong: str, known: list[str], why: str = "") -> pytest.UsageError:
    import difflib

    near = difflib.get_close_matches(wrong, known, n=3, cutoff=0.5) or known[:12]
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return pytest.UsageError(f"{pick.text} matches nothing in the suite{': ' + why if why else ''}{hint}")


def _file(chapter: str) -> Path:
    return Path(__file__).parent / "suite" / f"{chapter}.py"


def checks_of(chapter: str) -> list[str]:
    """The names of a chapter's checks, in the order of its file."""
    module = importlib.import_module(f"{PACKAGE}.{chapter}")
    return [name.removeprefix("test_") for name in vars(module) if name.startswith("test_")]


def catalogue(level: str, seed: int) -> Iterator[str]:
    """The node ids of the whole suite at a level, for one implementation."""
    from . import matrices

    for chapter in Selection((Pick(ROOT),)).chapters():
        for check in checks_of(chapter):
            for case in matrices.cases_for(chapter, check, level, seed):
                yield f"{ROOT}/{chapter}::test_{check}[{case.id}]"


class Suite(pytest.Collector):
    """The root of the suite: one child a chapter."""

    def collect(self) -> list[pytest.Collector]:
        chapters = self.config.stash[SELECTION].chapters()
        return [
            SuiteModule.from_parent(self, path=_file(chapter), name=chapter, nodeid=f"{ROOT}/{chapter}")
            for chapter in chapters
        ]


class SuiteModule(pytest.Module):
    """A chapter: the tests of one file of the suite, cut down to the selection."""

    _children: list[pytest.Item | pytest.Collector] | None = None

    def _getobj(self) -> Any:
        # The documented way to import (pytest's import modes) would depend on the user's rootdir and ini file.
        return importlib.import_module(f"{PACKAGE}.{self.name}")

    # Fixed names: the user's python_functions and python_classes are about the user's files.
    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")

    def classnamefilter(self, name: str) -> bool:
        return False

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        if self._children is None:
            selection = self.config.stash[SELECTION]
            self._children = [item for item in super().collect() if selection.takes(self.name, *_names(item.name))]
            for item in self._children:
                # Shown in verbose runs; without it every line would end in "<- …/site-packages/…".
                item.location = (self.nodeid, None, item.name)  # type: ignore[union-attr]
        return self._children

    def report(self) -> pytest.CollectReport:
        """This chapter's collect report. `--lf` would skip the file, since its path is none of the user's."""
        return pytest.CollectReport(self.nodeid, "passed", None, list(self.collect()))


def amend(collector: pytest.Collector, report: pytest.CollectReport) -> pytest.CollectReport:
    """The collect report of any collector, with the suite put under the Session."""
    if isinstance(collector, SuiteModule):
        return collector.report()
    if isinstance(collector, pytest.Session) and collector.config.stash[SELECTION]:
        report.result.append(Suite.from_parent(collector, name=ROOT, nodeid=ROOT))
    return report


def _names(name: str) -> tuple[str, str]:
    check, _, case = name.removeprefix("test_").partition("[")
    return check, case.removesuffix("]")


def facts(nodeid: str, settings: Settings) -> dict[str, Any]:
    """What a node id says: chapter, check, case, implementation (its spec); empty where it says nothing."""
    path, _, rest = nodeid.partition("::")
    check, case = _names(rest)
    case, _, name = case.partition("@")
    spec = settings.names().get(name) or (settings.impl[0] if len(settings.impl) == 1 else "")
    inside = path.startswith(f"{ROOT}/")
    return {
        "implementation": spec,
        "chapter": path[len(ROOT) + 1 :] if inside else path,
        "check": check,
        "case": case,
        "suite": inside,
    }


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Cases times implementations, as one parametrisation so that the id reads `<case id>@<implementation>`."""
    names = list(metafunc.config.stash[SETTINGS].names())
    cases = _cases_of(metafunc) if "flashattn_case" in metafunc.fixturenames else None
    if cases is not None and len(names) > 1:
        drawn = _drawn(metafunc)
        pairs = [(case, name) for case in cases for name in names if case not in drawn or name in drawn[case]]
        ids = [f"{case.id}@{name}" for case, name in pairs]
        metafunc.parametrize(("flashattn_case", IMPLEMENTATION), pairs, ids=ids, indirect=True)
    elif cases is not None:
        metafunc.parametrize("flashattn_case", cases, ids=[case.id for case in cases], indirect=True)
    elif len(names) > 1 and IMPLEMENTATION in metafunc.fixturenames:
        metafunc.parametrize(IMPLEMENTATION, names, ids=names, indirect=True, scope="session")


def _cases_of(metafunc: pytest.Metafunc) -> list[Case] | None:
    from . import matrices
    from .cases import Case

    settings, selection = metafunc.config.stash[SETTINGS], metafunc.config.stash[SELECTION]
    node = metafunc.definition
    try:
        if (module := node.getparent(SuiteModule)) is not None:
            check = metafunc.function.__name__.removeprefix("test_")
            if module.name in DRAWN:
                cases = list(_drawn(metafunc))
            else:
                cases = matrices.cases_for(module.name, check, settings.matrix, settings.seed)
            asked = (Case.parse(text, seed=settings.seed) for text in selection.extra_cases(module.name, check))
            return list(dict.fromkeys([*cases, *asked]))
        if (marker := node.get_closest_marker("flashattn_cases")) is not None:
            return _marked(*marker.args, settings=settings, **marker.kwargs)
    except (ValueError, TypeError) as error:  # TableError is a ValueError; TypeError: the marker's arguments
        raise pytest.Collector.CollectError(f"{node.nodeid}: {error}") from None
    return None


def _drawn(metafunc: pytest.Metafunc) -> dict[Case, list[str]]:
    """The drawn cases of the fuzz chapter, each with the implementations that it was drawn for."""
    module = metafunc.definition.getparent(SuiteModule)
    if module is None or module.name not in DRAWN or not metafunc.config.stash[SETTINGS].fuzz:
        return {}
    from . import fuzz

    found: dict[Case, list[str]] = {}
    for name, cases in fuzz.draws(metafunc.config).items():
        for case in cases:
            found.setdefault(case, []).append(name)
    return found


def _marked(name: str, matrix: str | None = None, *, settings: Settings) -> list[Case]:
    from . import matrices

    return matrices.cases_named(name, matrix or settings.matrix, settings.seed)


def mark_architecture(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-m sm90` with an implementation means the suite on that architecture: give the suite's items the marker."""
    expression = str(config.getoption("markexpr") or "")
    words = [word for word in ARCHITECTURES if re.search(rf"(?<!not )\b{word}\b", expression)]
    for item in items:
        if words and item.nodeid.startswith(f"{ROOT}/"):
            for word in words:
                item.add_marker(word)


def with_seed(case: Case | str, seed: int) -> Case:
    """A case as a user's own parametrisation gives it: an id, or a Case."""
    from .cases import Case

    return Case.parse(case, seed=seed) if isinstance(case, str) else replace(case, seed=case.seed or seed)
