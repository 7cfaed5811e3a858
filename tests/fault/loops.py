"""The event loops on which the most important tests of faults run: asyncio's own, and uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

__all__ = ["LOOPS", "both_loops"]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

both_loops = pytest.mark.asyncio(loop_factories=list(LOOPS))
