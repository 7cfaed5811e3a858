"""The depth of the tests: a factor for kills, seeds and examples. `make test-deep` uses a higher one than 1."""

from __future__ import annotations

import os

import pytest

__all__ = ["DEEP", "DEPTH", "WITH_SYNC", "pytest_collection_modifyitems"]

DEPTH = int(os.environ.get("QWORKER_TEST_DEPTH", "1"))
DEEP = DEPTH > 1
# Values of `sync`, for tests that die at each step: without it, there are fewer steps.
WITH_SYNC = ("full", "off") if DEEP else ("full",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deeper tests take longer."""
    for item in items if DEEP else []:
        if limit := item.get_closest_marker("timeout"):
            longer = pytest.mark.timeout(*(2 * DEPTH * seconds for seconds in limit.args), **limit.kwargs)
            item.add_marker(longer, append=False)
