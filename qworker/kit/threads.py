"""Threads for calls that block for long, with a limit for each kind of call.

One slow disk takes only the threads of its kind. None of these calls runs in the default executor of the event loop,
in which asyncio resolves host names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, Unpack
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from anyio import CapacityLimiter

__all__ = ["BlockingCall", "run_in_thread"]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class BlockingCall(Enum):
    """A kind of call that runs in threads of its own."""

    CHECK = "check of a store"
    DELETE = "removal of files"
    EXTEND = "extension of a client's leases"
    # Apart from STAGE: while some wait for a lock, its holder needs a thread to finish.
    LOCK = "wait for a file lock"
    READ = "read of a large body"
    PROBE = "request to a health port"
    STAGE = "sync or clean-up of staged messages"


_LIMITS = {
    BlockingCall.CHECK: 2,
    BlockingCall.DELETE: 2,
    BlockingCall.EXTEND: 8,
    BlockingCall.LOCK: 8,
    BlockingCall.READ: 4,
    BlockingCall.PROBE: 8,
    BlockingCall.STAGE: 4,
}
# A limiter belongs to the event loop on which it was made.
_limiters: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[BlockingCall, CapacityLimiter]] = WeakKeyDictionary()


async def run_in_thread(kind: BlockingCall, function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """Return the result of a function that runs in a thread. If this call is cancelled, the function still finishes."""
    # A process that makes no such call does not load anyio.
    from anyio import CapacityLimiter, to_thread

    loop = asyncio.get_running_loop()
    if loop not in _limiters:
        _limiters[loop] = {each: CapacityLimiter(limit) for each, limit in _LIMITS.items()}
    return await to_thread.run_sync(function, *arguments, limiter=_limiters[loop][kind])
