"""The pytest plugin: hook functions only, each a few lines that delegate.

Importing this file pulls in pytest and the standard library, nothing else; torch comes with the first implementation or
fixture that is used. A session that names no implementation and uses none of our markers or fixtures is left alone.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .state import State


def _run(config: pytest.Config) -> State:
    from . import state

    return state.of(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    from . import options

    options.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    from . import session

    run = session.configure(config)
    if not run.is_worker:
        config.pluginmanager.register(ControllerHooks(run), "flashattn-controller")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    from .session import start

    start(_run(session.config))


def pytest_report_header(config: pytest.Config) -> list[str]:
    from .session import header

    return header(_run(config))


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    from .session import collected

    return collected(_run(config), items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    from . import collection

    report = yield
    return collection.amend(collector, report)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from . import collection

    collection.parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from . import collection

    collection.mark_architecture(config, items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    from . import outcomes

    outcomes.gate(item, _run(item.config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    from . import outcomes
    from .watchdog import Watchdog

    if not outcomes.is_timed(item):
        return (yield)
    with Watchdog(item, _run(item.config)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    from . import outcomes

    report = yield
    if outcomes.concerns(item):
        outcomes.attach(item, call, report, _run(item.config))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    from . import outcomes

    outcomes.stop_if_poisoned(item, _run(item.config))


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> Any:
    from .outcomes import teststatus

    return teststatus(report)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist, in the controller, before a worker starts."""
    from .session import prepare_worker

    prepare_worker(node, _run(node.config))


class ControllerHooks:
    """The hooks of the process that reports: the only one, or the controller of xdist workers. Holds the run."""

    def __init__(self, run: State) -> None:
        self.run = run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from .session import book

        book(self.run, report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """xdist, when a worker died on a test."""
        from .session import explain_crash

        explain_crash(self.run, crashitem, report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> Generator[None]:
        from .session import conclude, say_closing

        conclude(self.run, session, exitstatus)
        yield
        say_closing(self.run)  # after everything else, so that it is the last line

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        from .session import summarise

        summarise(self.run, terminalreporter)
