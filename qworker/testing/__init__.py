"""Helpers for tests: a fake clock, queues in memory, and the contract suite for backends.

This package is a pytest plugin. `pytest_plugins = ["qworker.testing"]` in the top `conftest.py` enables the fixtures of
`qworker.testing.plugin`. `pytest -p qworker.testing --qworker-url URL` runs the contract suite against a backend. Both
need the extra `testing`: pytest and pytest-asyncio. The rest of qworker does not import this package.
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

# Pytest reads this list if the package is a plugin. The import of the package does not need pytest.
pytest_plugins = ("qworker.testing.plugin",)
