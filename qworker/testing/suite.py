"""What `pytest -p qworker.testing --qworker-url URL` runs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from qworker.testing.clock import FakeClock
from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness

__all__ = ["TestBackend"]


class TestBackend(BackendContract):
    """The contract on the backend of `--qworker-url`."""

    @pytest_asyncio.fixture
    async def harness(self, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
        """The store of `--qworker-url`."""
        option = request.config.getoption
        clock = FakeClock() if option("--qworker-clock") == "fake" else None
        async with Harness(option("--qworker-url"), clock=clock, tick=option("--qworker-tick")) as harness:
            yield harness
