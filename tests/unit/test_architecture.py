"""The direction of imports of docs/architecture.md, and what start-up and collection may pull in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STDLIB = set(sys.stdlib_module_names) | {"__future__"}
TORCH_FREE = (
    "features", "support", "cases", "covering", "matrices", "tolerances", "chapters", "verdict", "options",
    "collection", "expectations", "ledger", "plugin", "fuzz", "strategies",
    *(f"performance.{name}" for name in ("work", "devices", "interval", "thresholds", "machine", "plan", "lane",
                                         "compare", "compare_command", "memory_command")),
)  # fmt: skip
ALLOWED = {
    "oracles": {"torch", "oracles"},
    "reference_kernels": {"torch", "triton", "reference_kernels"},
    "pytest_flashattn": {
        "torch", "pytest", "tabulate", "oracles", "pytest_flashattn", "_pytest", "xdist", "hypothesis",
    },
}  # fmt: skip


def _imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Absolute names of the modules a file imports; with top_level only what importing the file itself pulls in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        lazy = isinstance(node, (ast.FunctionDef, ast.Lambda)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if top_level and lazy:
            skipped |= set(ast.walk(node))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_the_table_allows(package: str) -> None:
    for path in _files(package):
        foreign = {name.partition(".")[0] for name in _imports(path)} - STDLIB - ALLOWED[package]
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_hypothesis_is_optional() -> None:
    users = [path.name for path in _files("pytest_flashattn") if any("hypothesis" in n for n in _imports(path))]
    assert users == ["strategies.py"]


def test_nothing_imports_the_plugin_or_the_suite() -> None:
    for package in ALLOWED:
        for path in _files(package):
            bad = {n for n in _imports(path) if n.startswith(("pytest_flashattn.plugin", "pytest_flashattn.suite"))}
            assert not bad, f"{path.relative_to(ROOT)} imports {sorted(bad)}"


def test_the_plugin_module_imports_only_stdlib_pytest_and_its_torch_free_siblings() -> None:
    names = {n.partition(".")[0] for n in _imports(ROOT / "pytest_flashattn" / "plugin.py", top_level=True)}
    assert names - STDLIB <= {"pytest", "pytest_flashattn"}


def test_torch_free_modules_are_torch_free() -> None:
    lines = "; ".join(f"import pytest_flashattn.{name}" for name in TORCH_FREE)
    code = f"import sys; {lines}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_every_check_has_its_suite_test_and_every_suite_test_its_check() -> None:
    from pytest_flashattn.chapters import CHAPTERS, DRAWN, TIMED
    from pytest_flashattn.checks.registry import checks_of

    for chapter in (*CHAPTERS, *TIMED, *DRAWN):
        tree = ast.parse((ROOT / "pytest_flashattn" / "suite" / f"{chapter}.py").read_text(encoding="utf-8"))
        tests = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert tests == {f"test_{c.name.partition('.')[2]}" for c in checks_of(chapter)}


def test_no_source_file_is_longer_than_400_lines() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for package in ALLOWED
        for p in _files(package)
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert not long


def test_every_marker_of_our_own_tests_is_registered(request: pytest.FixtureRequest) -> None:
    """Those of modules that skip on a machine without a GPU too, which `--strict-markers` sees on a GPU only."""
    known = {line.split(":")[0].split("(")[0] for line in request.config.getini("markers")}
    used = {
        node.attr: path.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    }
    assert {name: where for name, where in used.items() if name not in known} == {}
