"""The base class of the parts of the contract suite."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from qworker.testing.harness import Case, Harness

__all__ = ["Contract"]


class Contract:
    """A part of the contract suite. A subclass has a fixture `harness`."""

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def case(self, harness: Harness) -> AsyncIterator[Case]:
        """Yield a test case with a new queue, and delete the queue after the test."""
        case = Case(harness, await harness.open())
        yield case
        await case.backend.delete(case.queue)
