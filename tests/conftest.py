"""What every test begins with: this process as if no test had run in it before."""

from __future__ import annotations

import os
import signal

import pytest
import structlog

from qworker import logs
from tests.support.depth import pytest_collection_modifyitems
from tests.support.noskip import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_collection_modifyitems", "pytest_make_collect_report", "pytest_runtest_makereport"]


@pytest.fixture(autouse=True)
def _nothing_of_the_test_before() -> None:
    # pytest-xdist gives its processes a width, to which tables would be cut.
    os.environ.pop("COLUMNS", None)
    # A command that ran in this process has set logging up for a stderr that is closed by now.
    structlog.reset_defaults()
    logs._configured.clear()
    # A worker that ran in this process may have left its own handlers.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # And a command that could not even start held back signals, which each process that a test starts would then hold
    # back.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
