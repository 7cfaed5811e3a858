"""The test module that `pytest -p qworker.testing --qworker-url URL` runs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from qworker.testing.clock import FakeClock
from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness

__all__ = ["TestBackend"]


class TestBackend(BackendContract):
    """The contract suite on the backend of `--qworker-url`."""

    @pytest_asyncio.fixture
    async def harness(self, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
        """Yield the harness of the store of `--qworker-url`."""
        option = request.config.option
        url: str = option.qworker_url
        tick: float | None = option.qworker_tick
        clock = FakeClock() if option.qworker_clock == "fake" else None
        async with Harness(url, clock=clock, tick=tick) as harness:
            yield harness
