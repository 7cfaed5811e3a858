"""The rules of the contract that a protocol may deviate from, by the names that `Backend.deviations` uses.

A deviation is never skipped: the suite proves that the backend really deviates, and in the way that stands here.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, cast

import pytest

from qworker.errors import NotSupported
from qworker.testing.harness import Case

__all__ = ["RULES", "rule"]

P = ParamSpec("P")

# Name: the rule — and how a deviation shows, where it is more than that the call raises NotSupported.
RULES: dict[str, str] = {
    "priority": "a higher priority is leased first",
    "unique_key": "a pending key is published once",
    "given_ids": "a message keeps the id that its publisher chose",
    "delay": "a message may be published for later",
    "fifo": "messages are leased in the order published; otherwise: all are leased, in any order",
    "tries_carried": "tries and enqueued_at of a draft are kept; otherwise: they start afresh",
    "tries_counted": "temporary failures and expired leases raise tries; otherwise: tries stays 0",
    "expiry": "a lease expires when its time has passed; otherwise: it lasts until its holder ends it or dies",
    "extend": "a lease can be extended",
    "fencing": "a stale holder can settle nothing; otherwise: its settlement is accepted",
    "retry_delay": "a temporary failure waits for its delay; otherwise: it is ready at once",
    "release_delay": "a release waits for its delay; otherwise: it is ready at once",
    "release_in_place": "a released message is leased before those published after it; otherwise: it comes back anywhere",
    "fail_kept": "a permanent failure is kept; otherwise: it is gone",
    "keep_done": "acked messages can be kept as done; otherwise: they are gone, and the URL option is refused",
    "errors_kept": "the reason of a permanent failure is kept; otherwise: find shows none",
    "retry_errors": "the error of a failed attempt is kept whole while the message waits; otherwise: find shows less or none",
    "requeue": "a failed message can be made ready again",
    "pause": "a queue can be paused",
    "remove": "a message can be removed by its id",
    "remove_leased": "a leased message can be removed",
    "remove_by_state": "messages can be removed by their state",
    "exact_counts": "stats counts each state exactly; otherwise: its total is right",
    "browse_delayed": "delayed messages are listed in the order in which they become due; otherwise: in any order",
    "browse_leased": "leased messages are listed; otherwise: the list is empty",
    "after_removed": "what follows a removed message in line is given; otherwise: it is taken for leased, and the whole line follows",
    "binary_bodies": "a body is any bytes",
    "empty_bodies": "a body may be empty",
    "big_bodies": "a body may have 1 MiB",
    "fields": "a message carries fields",
    "argv": "a message carries arguments",
    "many_queues": "a store holds several queues",
}

Test = Callable[Concatenate[Any, Case, P], Awaitable[None]]


def rule(name: str, otherwise: Callable[[Case], Awaitable[None]] | None = None) -> Callable[[Test[P]], Test[P]]:
    """Say that a test proves a rule.

    Args:
        name: The rule, one of `RULES`.
        otherwise: What holds on a backend that declares the deviation; None: the test ends in `NotSupported`.
    """
    assert name in RULES, name

    def decorate(test: Test[P]) -> Test[P]:
        @functools.wraps(test)
        async def proved(self: Any, case: Case, *args: P.args, **kwargs: P.kwargs) -> None:
            if name not in case.harness.deviations:
                await test(self, case, *args, **kwargs)
            elif otherwise is not None:
                await otherwise(case)
            else:
                with pytest.raises(NotSupported):
                    await test(self, case, *args, **kwargs)

        return cast("Test[P]", proved)

    return decorate
