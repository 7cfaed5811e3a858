"""The event loop of a worker."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable
from typing import Literal, cast

from qworker.errors import MissingExtra

__all__ = ["loop_factory"]


def loop_factory(name: Literal["auto", "asyncio", "uvloop"]) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the loop, or None for asyncio's own. `auto` takes uvloop if it is installed.

    Raises:
        MissingExtra: uvloop is requested but not installed.
    """
    if name == "asyncio":
        return None
    if importlib.util.find_spec("uvloop") is None:
        if name == "uvloop":
            raise MissingExtra("fast", "--loop uvloop")
        return None
    factory = importlib.import_module("uvloop").new_event_loop
    return cast("Callable[[], asyncio.AbstractEventLoop]", factory)
