"""Move messages from each kind of store to each other one and back to memory: their properties survive."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from qworker import Tasks
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Message, Query, SettleAction, Settlement, State
from qworker.parcel import pack, unpack
from qworker.testing import run_until_idle
from qworker.tools.move import MoveResult, move
from tests.support.servers import RedisServer, free_port

QUEUE = "jobs"
KINDS = ("memory", "file", "fsq", "mq", "redis", "rfq", "sq", "vsqs")
# Kept in an extended attribute, which not every file system has.
PERHAPS_ORIGIN = ("fsq",)
_numbers = itertools.count()

MESSAGES = (
    Draft(body=b'{"task":"noop","args":[1]}', task="noop"),
    Draft(body=b"text"),
    Draft(body=bytes(range(256))),
    Draft(body=b""),
    Draft(body=b"tried", tries=3),
    Draft(body=b"", fields={"tile": "T32U0", "ä": "☃\n"}),
    Draft(body=b"both", fields={"": "empty name", "qworker-like": "{}"}),
    Draft(body=b"args", argv=("a", "b c", "ü/_%\n")),
    Draft(body=b"long", argv=("x" * 150, "y" * 150)),
    Draft(body=b"\xff\xfe", fields={"k": "v"}, argv=("\udcff", "plain")),
    Draft(body=b"later", delay=500.0, fields={"k": "delayed"}),
)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


Make = Callable[[str], Backend]


@pytest.fixture
async def make(server: RedisServer, tmp_path: Path) -> AsyncIterator[Make]:
    opened: list[Backend] = []
    dbs = itertools.count()
    with server.client() as client:
        client.flushall()

    def open_one(kind: str) -> Backend:
        number = next(_numbers)
        urls = {
            "memory": f"memory://pairs-{number}",
            "redis": f"redis://127.0.0.1:{server.port}/{next(dbs)}",
            "rfq": f"rfq://127.0.0.1:{server.port}/{next(dbs)}",
        }
        # Without syncs: what is told is where messages are, not what they survive.
        sync = "?max_tries=0" if kind == "fsq" else "?sync=off"
        opened.append(open_backend(urls.get(kind, f"{kind}://{tmp_path}/{number}{sync}")))
        return opened[-1]

    yield open_one
    for backend in opened:
        await backend.aclose()


def content(message: Message) -> tuple[object, ...]:
    message = unpack(message)
    # A directory labels what is a task's call.
    arguments = tuple(word for word in message.argv if word != "noop")
    return message.body, dict(message.fields or {}), arguments, message.tries


async def stored(backend: Backend) -> list[Message]:
    rows = [row for state in (State.READY, State.DELAYED) for row in await list_messages(backend, QUEUE, Query(state))]
    return [row.message for row in rows]


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
async def test_a_message_survives_the_move_between_any_two(make: Make, first: str, second: str) -> None:
    start, source, target, end = (make(kind) for kind in ("memory", first, second, "memory"))
    await start.publish(QUEUE, MESSAGES)
    begun = await stored(start)
    expected = [content(message) for message in begun]
    times = pytest.approx([message.enqueued_at for message in begun], abs=0.01)
    counts: list[MoveResult] = []
    renamed: dict[str, str] = {}
    counts.append(await move(start, source, QUEUE))
    there = await stored(source)
    counts.append(await move(source, target, QUEUE, renamed=renamed.__setitem__))
    moved = await stored(target)
    assert [content(message) for message in moved] == expected
    if "given_ids" in target.deviations:
        assert [renamed[message.id] for message in there] == [message.id for message in moved]
        for old, new in zip(there, moved, strict=True):
            assert new.original_id == old.id or (second in PERHAPS_ORIGIN and new.original_id is None)
    else:
        assert [message.id for message in moved] == [message.id for message in there]
    counts.append(await move(target, end, QUEUE))
    assert [content(message) for message in await stored(end)] == expected
    assert [message.enqueued_at for message in moved] == times
    for one in counts:
        assert (one.ready, one.delayed, one.left_leased) == (len(MESSAGES) - 1, 1, 0)
    for emptied in (start, source, target):
        assert await stored(emptied) == []


async def test_a_message_that_is_moved_where_its_fields_have_a_place_is_no_parcel_there(make: Make) -> None:
    start, middle, end = make("memory"), make("vsqs"), make("rfq")
    await start.publish(QUEUE, [Draft(body=b"", fields={"k": "v"})])
    await move(start, middle, QUEUE)
    (packed,) = await stored(middle)
    assert packed.body == b'{"qworker":"message","fields":{"k":"v"}}'
    await move(middle, end, QUEUE)
    (message,) = await stored(end)
    assert (message.body, message.fields) == (b"", {"k": "v"})


@pytest.mark.parametrize("kind", ["fsq", "mq", "rfq", "vsqs"])
async def test_a_move_that_was_killed_and_is_run_again_stores_nothing_twice(make: Make, kind: str) -> None:
    start, target = make("memory"), make(kind)
    await start.publish(QUEUE, [Draft(body=b"%d" % n, enqueued_at=1e9 + n) for n in range(5)])
    copies = [Draft(body=m.body, original_id=m.id, enqueued_at=m.enqueued_at) for m in await stored(start)]
    # As it was killed: the target has them, and so has the source.
    await target.publish(QUEUE, copies)
    await target.aclose()
    target = open_backend(target.describe())
    await move(start, target, QUEUE)
    assert [message.body for message in await stored(target)] == [b"0", b"1", b"2", b"3", b"4"]
    await target.aclose()


@pytest.mark.parametrize(
    "body", [b'{"qworker":"message"', b'{"qworker":"message","fields":3}', b'{"qworker":"message"}x']
)
def test_a_damaged_parcel_is_a_body_like_any_other(body: bytes) -> None:
    message = Message(id="x", queue=QUEUE, body=body)
    assert unpack(message) is message


@pytest.mark.parametrize("draft", [m for m in MESSAGES if m.fields or m.argv])
def test_packing_and_unpacking_loses_nothing(draft: Draft) -> None:
    packed = pack(draft)
    assert (packed.fields, packed.argv) == (None, ())
    message = unpack(Message(id="x", queue=QUEUE, body=packed.body, tries=draft.tries))
    assert (message.body, message.fields, message.argv) == (draft.body, draft.fields, draft.argv)


async def test_a_raw_handler_gets_a_parcel_as_it_was_published() -> None:
    tasks = Tasks(f"memory://pairs-{next(_numbers)}")
    seen: list[Message] = []

    @tasks.raw_handler(queue=QUEUE)
    async def on_message(message: Message) -> None:
        seen.append(message)

    sent = Draft(body=b"\xff", fields={"k": "v"}, argv=("a",))
    await (await tasks.backend()).publish(QUEUE, [pack(sent)])
    assert await run_until_idle(tasks)
    assert [(m.body, m.fields, m.argv) for m in seen] == [(sent.body, sent.fields, sent.argv)]


async def test_an_id_of_any_length_spoils_no_record(make: Make) -> None:
    for kind in ("mq", "rfq", "vsqs"):
        backend = make(kind)
        await backend.publish(QUEUE, [Draft(body=b"x", tries=3, enqueued_at=5.0, original_id="\x7f" * 5000)])
        (lease,) = await backend.lease(QUEUE, 1, 60.0)
        assert (lease.message.tries, (lease.message.original_id or "")[:100]) == (3, "\x7f" * 100)
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, error="\x01" * 5000)]) == []
        (again,) = await stored(backend)
        assert (again.tries, (again.original_id or "")[:100]) == (4, "\x7f" * 100)
