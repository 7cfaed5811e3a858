"""The rules of the contract that a backend can deviate from, by the names that `Backend.deviations` uses.

The suite does not skip a deviation. It proves that the backend really deviates, in the way that is described here.
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

# The rules by name. The text after "otherwise" describes the deviation. Without it, the call raises NotSupported.
RULES: dict[str, str] = {
    "priority": "a higher priority is leased first",
    "unique_key": "a message with a unique key is stored once at a time",
    "unique_replace": "another message with a unique key can take the place of the waiting one",
    "unique_app": "a unique key can count in all queues of the store",
    "given_ids": "a message keeps the id that its publisher chose",
    "hold": "an id can stay taken after its message is gone",
    "delay": "a message can be published with a delay",
    "fifo": "messages are leased in the order published; otherwise: all are leased, in any order",
    "tries_carried": "tries and enqueued_at of a draft are kept; otherwise: tries is 0 and enqueued_at is now",
    "tries_counted": "temporary failures and expired leases raise tries; otherwise: tries stays 0",
    "deaths": "expired leases and deaths of handlers raise deaths; otherwise: deaths stays 0",
    "expiry": "a lease expires when its time has passed; otherwise: it lasts until its holder ends it or dies",
    "extend": "a lease can be extended",
    "fencing": "a holder that has lost its lease cannot settle; otherwise: its settlement is accepted",
    "retry_delay": "a temporary failure waits for its delay; otherwise: it is ready at once",
    "release_delay": "a release waits for its delay; otherwise: it is ready at once",
    "release_in_place": "a released message is leased before later ones; otherwise: its place can change",
    "fail_kept": "a permanently failed message is kept; otherwise: it is deleted",
    "keep_done": "acked messages can be kept as done; otherwise: they are deleted, and the URL option is refused",
    "errors_kept": "the error of a permanent failure is kept; otherwise: find returns no error",
    "retry_errors": "the whole error of a failed attempt is kept while the message waits;"
    " otherwise: find returns a part of it, or none",
    "requeue": "a failed message can be made ready again",
    "pause": "a queue can be paused",
    "remove": "a message can be removed by its id",
    "remove_leased": "a leased message can be removed",
    "remove_by_state": "messages can be removed by their state",
    "cancel": "a message can be cancelled in any state, also while a worker holds it",
    "lost_leases": "reap names the leases of this instance that are gone; otherwise: it names none",
    "exact_counts": "stats counts each state exactly; otherwise: its total is right",
    "browse_delayed": "delayed messages are listed in the order in which they become due; otherwise: in any order",
    "browse_leased": "leased messages are listed; otherwise: the list is empty",
    "after_removed": "browse after a removed message returns the messages that follow it;"
    " otherwise: the message counts as leased, and browse returns all ready messages",
    "binary_bodies": "a body can have any bytes",
    "empty_bodies": "a body can be empty",
    "big_bodies": "a body can have 1 MiB",
    "max_body": "the largest body can be set in the URL; otherwise: the URL option is refused",
    "max_body_stored": "a message that is stored and larger than max_body is not leased, and all others are;"
    " otherwise: it is leased",
    "fields": "a message can have fields",
    "argv": "a message can have argv",
    "cells": "a queue has cells",
    "many_queues": "a store can have several queues",
}

Test = Callable[Concatenate[Any, Case, P], Awaitable[None]]


def rule(name: str, otherwise: Callable[[Case], Awaitable[None]] | None = None) -> Callable[[Test[P]], Test[P]]:
    """Mark a test that proves a rule.

    Args:
        name: The name of the rule in `RULES`.
        otherwise: The test for a backend that declares the deviation. None: the test must raise `NotSupported`.
    """
    assert name in RULES, name

    def decorate(test: Test[P]) -> Test[P]:
        # Without its other rules, which would expect the same refusal.
        bare: Test[P] = getattr(test, "__wrapped__", test)

        @functools.wraps(test)
        async def proved(self: Any, case: Case, *args: P.args, **kwargs: P.kwargs) -> None:
            if name not in case.harness.deviations:
                await test(self, case, *args, **kwargs)
            elif otherwise is not None:
                await otherwise(case)
            else:
                with pytest.raises(NotSupported):
                    await bare(self, case, *args, **kwargs)

        proved.__wrapped__ = bare
        return cast("Test[P]", proved)

    return decorate
