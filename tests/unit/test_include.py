"""`include` that is refused: nothing has moved to the other app."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from qworker import Attempt, FailedCall, Hook, Tasks
from qworker.errors import UsageError


def nothing() -> None: ...


def take(message: Any) -> None: ...


async def take_report(failed: FailedCall) -> None: ...


class OnlyAround(Hook):
    async def around(self, attempt: Attempt, go: Callable[[], Awaitable[object]]) -> object:
        return await go()


@pytest.mark.parametrize(
    ("app", "text"),
    [
        (Tasks(hooks=[OnlyAround()]), "task 'lib.plain' is a plain function, and hook OnlyAround has only around"),
        (Tasks("mq:/nowhere"), "task 'lib.plain': on_failure needs holds, which mq: does not support"),
    ],
    ids=["hook", "on_failure"],
)
def test_an_include_that_is_refused_leaves_tasks_schedules_and_imports_as_they_were(app: Tasks, text: str) -> None:
    lib = Tasks(imports=["shop.tasks"])
    lib.raw_handler(queue="raw")(take)
    report = lib.task(take_report)
    plain = lib.task(name="plain", on_failure=None if app.hooks else report)(nothing)
    if app.hooks:
        lib.every(60)(plain)
    with pytest.raises(UsageError, match=text):
        app.include(lib, prefix="lib.")
    assert (sorted(lib.registered_tasks), list(lib.raw_handlers)) == (["plain", "take_report"], ["raw"])
    assert list(lib.schedules.in_code) == (["plain"] if app.hooks else [])
    assert (app.registered_tasks, app.raw_handlers, app.schedules.in_code, app.imports) == ({}, {}, {}, ())
    assert (plain.belongs_to(lib), plain.name) == (True, "plain")
