"""A failed call runs once more with other arguments, and only once, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from qworker import Draft, Tasks
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.errors import AlreadyEnqueued, BackendUnavailable, InvalidArguments, UsageError
from qworker.failures.edit import Arguments, Edited, enqueue_edited, read_arguments
from qworker.jobs.source import JobSource
from qworker.message import Query, Selection, SettleAction, Settlement, State, StoredMessage

QUEUE = "mail"
CALL = {"task": "send", "args": ["a"], "headers": {"tenant": "acme"}, "options": {"result": 60}}


@pytest_asyncio.fixture(params=["memory", "file"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    name = secrets.token_hex(4)
    backend = open_backend(f"memory://edit-{name}" if request.param == "memory" else f"file://{tmp_path}/s?sync=off")
    yield backend
    await backend.aclose()


def source() -> JobSource:
    tasks = Tasks("memory://")

    @tasks.task(name="send", queue=QUEUE)
    async def send(to: str, copies: int = 1) -> None: ...

    return JobSource(tasks, None)


async def failed(backend: Backend, message_id: str = "a", **options: Any) -> StoredMessage:
    body = json.dumps(CALL).encode()
    await backend.publish(QUEUE, [Draft(body=body, id=message_id, task="send", **options)])
    return await fail(backend)


async def fail(backend: Backend) -> StoredMessage:
    (lease,) = await backend.lease(QUEUE, 1, 60.0)
    await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="OSError: no")])
    return (await backend.find(QUEUE, [lease.message.id]))[0]


async def edit(backend: Backend, stored: StoredMessage, *args: Any) -> Edited:
    return await enqueue_edited(backend, source(), QUEUE, stored, Arguments([*args]))


async def ids(backend: Backend, state: State) -> list[str]:
    return [one.message.id for one in await list_messages(backend, QUEUE, Query(state))]


async def test_an_edited_call_keeps_its_options_and_can_be_edited_once_more(backend: Backend) -> None:
    stored = await failed(backend, priority=3)
    assert await edit(backend, stored, "b") == Edited("a:e1", is_new=True, removed=True)
    assert (await ids(backend, State.READY), await ids(backend, State.FAILED)) == (["a:e1"], [])
    stored = await fail(backend)
    assert stored.message.priority == 3
    assert json.loads(stored.message.body) == {
        **CALL,
        "args": ["b"],
        "headers": {"tenant": "acme", "qworker-edited": "a"},
    }
    assert (await edit(backend, stored, "c")).id == "a:e2"


async def test_an_edit_that_was_interrupted_is_completed_by_its_repetition(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_args: Any) -> int:
        raise BackendUnavailable("it does not answer")

    stored = await failed(backend)
    with monkeypatch.context() as patched:
        patched.setattr(backend, "remove", broken)
        with pytest.raises(BackendUnavailable):
            await edit(backend, stored, "b")
    assert (await ids(backend, State.READY), await ids(backend, State.FAILED)) == (["a:e1"], ["a"])
    with pytest.raises(AlreadyEnqueued, match="with other arguments: a:e1"):
        await edit(backend, stored, "c")
    # It runs before the repetition.
    (lease,) = await backend.lease(QUEUE, 1, 60.0)
    await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)])
    assert await edit(backend, stored, "b") == Edited("a:e1", is_new=False, removed=True)
    assert (await ids(backend, State.READY), await ids(backend, State.FAILED)) == ([], [])


async def test_a_message_that_was_requeued_meanwhile_is_not_removed(backend: Backend) -> None:
    stored = await failed(backend)
    await backend.requeue(QUEUE, Selection(ids=["a"]))
    assert (await edit(backend, stored, "b")).removed is False
    assert sorted(await ids(backend, State.READY)) == ["a", "a:e1"]


async def test_what_cannot_be_edited_is_refused_and_nothing_is_changed(backend: Backend) -> None:
    stored = await failed(backend, unique_key="k")
    with pytest.raises(InvalidArguments, match="copies"):
        await edit(backend, stored, "b", "many")
    await backend.publish(QUEUE, [Draft(body=b"other", id="other", unique_key="k")])
    with pytest.raises(AlreadyEnqueued, match="other has the unique key k"):
        await edit(backend, stored, "b")
    (ready,) = await backend.find(QUEUE, ["other"])
    with pytest.raises(UsageError, match="other is ready: only a failed message"):
        await edit(backend, ready, "b")
    with pytest.raises(UsageError, match="not a valid call"):
        await edit(backend, await fail(backend), "b")
    assert await ids(backend, State.READY) == []
    assert sorted(await ids(backend, State.FAILED)) == ["a", "other"]


def test_a_text_that_is_no_object_of_arguments_is_refused() -> None:
    for text in ("", "[1]", '{"args": 1}', '{"arg": []}', b"\xff"):
        with pytest.raises(UsageError, match="the arguments must be JSON such as"):
            read_arguments(text)


APP = """
from qworker import Tasks
tasks = Tasks()

@tasks.task(name="send", queue="mail")
async def send(to: str, copies: int = 1) -> None: ...
"""


async def _store_with_a_failure(url: str) -> None:
    backend = open_backend(url)
    await failed(backend)
    await backend.aclose()


@pytest.mark.parametrize(
    ("found", "new", "status", "said"),
    [
        ('"a"', '"b", 2', 0, "enqueued a:e1 in mail"),
        ('"a"', '"b", "many"', 2, "argument 2 (copies)"),
        ('"a"', '"b"]', 2, "the arguments must be JSON"),
        ("absent", "", 1, "nothing is changed: the arguments were not saved"),
    ],
)
def test_the_command_opens_the_arguments_in_the_editor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    found: str,
    new: str,
    status: int,
    said: str,
) -> None:
    url = f"file://{tmp_path}/spool?sync=off"
    asyncio.run(_store_with_a_failure(url))
    (tmp_path / "edit_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    editor = tmp_path / "editor"
    # As people do, it does not save a text that is not changed.
    editor.write_text(f"#!/bin/sh\ngrep -q '{found}' \"$1\" && sed -i 's/{found}/{new}/' \"$1\" || true\n")
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    assert main(["requeue", url, QUEUE, "a", "--edit", "--app", "edit_app:tasks"]) == status
    told = capfd.readouterr()
    assert said in told.out + told.err
