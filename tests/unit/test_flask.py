"""`qworker.flask` with the real Flask: handlers run in the context of the application."""

from __future__ import annotations

import pytest
from flask import Flask, current_app, g

from qworker import State
from qworker.flask import AppContext
from tests.unit.conftest import App


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_each_attempt_has_a_context_of_its_own_that_ends_with_it(kind: str) -> None:
    site = Flask("site")
    hook = AppContext()
    app = App(hooks=[hook])
    seen: list[object] = []
    site.teardown_appcontext(seen.append)

    def work(number: int) -> None:
        seen.append((current_app.name, g.get("number")))
        g.number = number
        if number == 2:
            raise KeyError(number)

    async def async_work(number: int) -> None:
        work(number)

    task = app.task(name="work", max_tries=1)(work if kind == "thread" else async_work)
    await task.enqueue(0)
    await app.burst()
    assert seen == []
    (failed,) = await app.found(State.FAILED)
    assert "AppContext has no app: set its `app` in create_app()" in str(failed.error)

    hook.app = site
    await app.enqueue_many([task.call(1), task.call(2)])
    await app.burst(concurrency=1)
    assert [type(one) for one in seen] == [tuple, type(None), tuple, KeyError]
    assert (seen[0], seen[2]) == (("site", None), ("site", None))
