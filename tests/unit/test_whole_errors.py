"""An error is shown as one line everywhere, and completely on request, even while a message waits for its retry."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from qworker import Backoff, Fail, Retry, Tasks
from qworker.backend.listing import list_messages
from qworker.cli.main import main
from qworker.message import Query, State
from qworker.task import Job
from qworker.testing import run_until_idle

LINES = "1 validation error for Order\namount\n  Input should be valid\n    For further information visit https://errors.example.org"
NEWS = "ValueError: 1 validation error for Order"


def check() -> None:
    raise ValueError(LINES)


def app(url: str) -> Tasks:
    tasks = Tasks(url)

    @tasks.task(retry=Backoff(initial=1e6, maximum=1e6))
    async def work() -> None:
        raise ValueError(LINES)

    @tasks.task
    async def polite() -> None:
        try:
            check()
        except ValueError as error:
            raise Retry("told to slow down", delay=1000) from error

    @tasks.task
    async def never() -> None:
        try:
            check()
        except ValueError as error:
            raise Fail("bad order") from error

    return tasks


@pytest.mark.parametrize("scheme", ["file", "fsq", "mq"])
@pytest.mark.parametrize(("task", "news"), [("work", NEWS), ("polite", "told to slow down"), ("never", "bad order")])
def test_the_last_failure_is_one_line_and_whole_on_request(tmp_path: Path, capsys, scheme, task, news):
    url = f"{scheme}://{tmp_path}/spool" + ("?history=1" if scheme != "file" else "")
    job = asyncio.run(_failed(app(url), task))

    assert _run(capsys, "explain", url, "default", job.id).splitlines()[0].count(news) == 1
    assert "Traceback" not in _run(capsys, "explain", url, "default", job.id)
    full = _run(capsys, "explain", url, "default", job.id, "--full")
    assert f"\n\n{news}\n" in full or "\n\nTraceback (most recent call last):\n" in full
    assert full.rstrip().endswith(LINES)
    assert json.loads(_run(capsys, "explain", url, "default", job.id, "--json"))["error"].endswith(LINES)
    assert news in _run(capsys, "history", url, "default", "--event", "failed" if task == "never" else "retried")
    assert (news in _run(capsys, "browse", url, "default")) == (task == "never")


async def _failed(tasks: Tasks, task: str) -> Job:
    job = await tasks[task].enqueue()
    counts = await run_until_idle(tasks)
    assert counts.retried + counts.failed == 1
    if task == "never":
        (found,) = await list_messages(await tasks.backend(), "default", Query(State.FAILED))
        assert found.error.startswith("bad order\n\nTraceback (most recent call last):\n")
    return job


def _run(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


async def test_a_failure_that_many_have_in_common_is_told_once():
    tasks = app("memory://whole-errors")
    backend = await tasks.backend()
    records = []
    backend.deviations, backend.history.append = {"retry_errors": "as on file:"}, records.extend
    for _ in range(10):
        await tasks["work"].enqueue()
    await run_until_idle(tasks)
    told = [batch for batch in records if batch.kind == "retried"]
    assert all(isinstance(batch.text, str) for batch in told)
    events = [event for batch in told for event in batch.events() if event.kind == "retried"]
    assert [(event.error, event.text.endswith(LINES)) for event in events] == [(NEWS, True)] * 10
