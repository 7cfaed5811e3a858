"""The index of failed messages: each is read once, and what is gone is not counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from qworker import Draft
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.failures import index
from qworker.failures.index import FailureIndex
from qworker.message import FinishedMessage, Query, Selection, SettleAction, Settlement, State, StoredMessage
from qworker.testing import FakeClock
from qworker_file.backend import FileBackend
from tests.support.servers import RedisServer

QUEUE = "jobs"
REFUSED, BROKEN = "OSError: host # refused", "ValueError: no"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture(params=["memory", "file", "redis"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Backend]:
    urls = {"memory": "memory:", "file": f"file://{tmp_path}/spool"}
    url = request.getfixturevalue("server").url if request.param == "redis" else urls[request.param]
    backend = open_backend(url, clock=clock)
    await backend.create(QUEUE)
    yield backend
    await backend.delete(QUEUE)
    await backend.aclose()


async def fail(backend: Backend, *errors: str) -> None:
    await backend.publish(QUEUE, [Draft(body=b"x") for _ in errors])
    leases = await backend.lease(QUEUE, len(errors), 60)
    await backend.settle(
        [
            Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=error)
            for lease, error in zip(leases, errors, strict=True)
        ]
    )


async def failed(backend: Backend) -> list[StoredMessage]:
    return [one async for page in backend.browse(QUEUE, Query(State.FAILED)) for one in page]


async def counts(index: FailureIndex) -> dict[str, int]:
    return {one.group.error if one.group else "": one.count for one in await index.refresh()}


async def test_groups_follow_what_fails_and_what_is_requeued_or_removed(backend: Backend, clock: FakeClock) -> None:
    index = FailureIndex(backend, QUEUE)
    assert await counts(index) == {}
    await fail(backend, "OSError: host 1 refused", "OSError: host 2 refused", "ValueError: no")
    assert await counts(index) == {REFUSED: 2, BROKEN: 1}
    largest = index.groups[0]
    assert largest.group is not None
    assert largest.last_at is not None
    assert (largest.count_since(largest.last_at), largest.count_since(largest.last_at + 60.0)) == (2, 0)
    newest = await index.read_newest(largest.group.key)
    assert {one.error for one in newest} == {"OSError: host 1 refused", "OSError: host 2 refused"}
    clock.advance(5.0)
    await backend.requeue(QUEUE, Selection(ids=[newest[0].message.id]))
    await backend.remove(QUEUE, Selection(ids=[newest[1].message.id]))
    assert await index.read_newest(largest.group.key) == []
    assert await counts(index) == {BROKEN: 1}
    # The requeued one fails again.
    (lease,) = await backend.lease(QUEUE, 1, 60)
    await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="ValueError: no")])
    assert await counts(index) == {BROKEN: 2}


async def test_a_message_is_read_once(backend: Backend, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_finished = FileBackend.read_finished

    async def counted(self: FileBackend, queue: str, found: Sequence[FinishedMessage]) -> AsyncIterator[object]:
        read.extend(one.id for one in found)
        async for page in read_finished(self, queue, found):
            yield page

    monkeypatch.setattr(FileBackend, "read_finished", counted)
    index = FailureIndex(backend, QUEUE)
    await fail(backend, "ValueError: no", "ValueError: no")
    await index.refresh()
    clock.advance(5.0)
    await fail(backend, "ValueError: no")
    assert await counts(index) == {BROKEN: 3}
    assert sorted(read) == (
        sorted(one.message.id for one in await failed(backend)) if isinstance(backend, FileBackend) else []
    )


async def test_only_the_newest_are_indexed_and_groups_are_bounded(
    backend: Backend, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MOST_INDEXED", 2)
    monkeypatch.setattr(index, "_MOST_GROUPS", 1)
    for error in ("OldError: a", "ValueError: no", "KeyError: b"):
        await fail(backend, error)
        clock.advance(60.0)
    found = await FailureIndex(backend, QUEUE).refresh()
    assert sum(one.count for one in found) == 2
    assert [one.group is None for one in found] == [False, True]
    assert "OldError" not in {one.group.error_type for one in found if one.group}
