"""The pytest plugin: fixtures for the tests of apps, and the options of the contract suite."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from qworker.app import Tasks
from qworker.backend.registry import open_backend
from qworker.duration import parse_duration
from qworker.errors import MissingExtra, QworkerError, UsageError
from qworker.testing.clock import FakeClock
from qworker.testing.helpers import in_memory

__all__ = ["qworker_clock", "qworker_memory"]

_SUITE = os.path.join(os.path.dirname(__file__), "suite.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the contract suite."""
    group = parser.getgroup("qworker", "qworker: the backend contract")
    group.addoption("--qworker-url", metavar="URL", help="run the backend contract suite against this store")
    group.addoption(
        "--qworker-clock",
        choices=("fake", "real"),
        default="fake",
        help="fake (default): the backend uses the clock of the suite; real: the store has its own clock, so wait",
    )
    group.addoption(
        "--qworker-tick",
        type=_duration,
        metavar="DURATION",
        help="a duration that is longer than any call takes (default: 60s for fake, 2s for real)",
    )


def _duration(text: str) -> float:
    try:
        return parse_duration(text, least=0.01)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def pytest_configure(config: pytest.Config) -> None:
    """Add the contract suite to the collected tests. If the command line names no files, collect only the suite.

    Raises:
        UsageError: The URL cannot be used, or pytest-asyncio is not installed.
    """
    url = config.getoption("--qworker-url")
    if url is None:
        return
    if not config.pluginmanager.hasplugin("asyncio"):
        raise pytest.UsageError(str(MissingExtra("testing", "the contract suite")))
    try:
        open_backend(url)
    except QworkerError as error:
        raise pytest.UsageError(str(error)) from error
    named = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.args = [*named, _SUITE]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return a line with the masked URL of the tested store."""
    url = config.getoption("--qworker-url")
    return None if url is None else f"qworker: contract of {open_backend(url).describe()}"


@pytest.fixture
def qworker_clock() -> FakeClock:
    """Return the clock of this test's queues. `qworker_clock.advance(60)` lets a minute pass."""
    return FakeClock()


@pytest.fixture
def qworker_memory(qworker_clock: FakeClock) -> Iterator[Callable[[Tasks], Tasks]]:
    """Yield a function that gives an app empty queues in memory until the end of the test."""
    with ExitStack() as stack:

        def swap(tasks: Tasks) -> Tasks:
            return stack.enter_context(in_memory(tasks, qworker_clock))

        yield swap
