"""What every part of the contract suite shares."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from qworker.testing.harness import Case, Harness

__all__ = ["Contract"]


class Contract:
    """Test classes of the suite; a subclass gives a fixture `harness`."""

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def case(self, harness: Harness) -> AsyncIterator[Case]:
        """A queue of its own in the store, removed after the test."""
        case = Case(harness, await harness.open())
        yield case
        await case.backend.delete(case.queue)
