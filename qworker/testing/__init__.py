"""For those who test: a fake clock, helpers for the tests of apps, and the backend contract as a suite.

As a pytest plugin: `pytest_plugins = ["qworker.testing"]` in the top `conftest.py` gives the fixtures of
`qworker.testing.plugin`; `pytest -p qworker.testing --qworker-url URL` runs the contract suite against a backend. Both need
pytest and pytest-asyncio; nothing here is imported by the rest of qworker.
"""

from __future__ import annotations

from qworker.testing.clock import FakeClock
from qworker.testing.helpers import EnqueuedCall, enqueued_calls, in_memory, run_until_idle
from qworker.testing.wait_until import wait_until
from qworker.testing.wait_until_blocked import wait_until_blocked

__all__ = [
    "EnqueuedCall",
    "FakeClock",
    "enqueued_calls",
    "in_memory",
    "run_until_idle",
    "wait_until",
    "wait_until_blocked",
]

# Read by pytest where this package is a plugin: importing it needs no pytest.
pytest_plugins = ("qworker.testing.plugin",)
