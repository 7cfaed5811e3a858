"""The parts of the Redis backend by themselves: values, scripts, replies, slots, lanes and connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from hiredis import ReplyError
from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import (
    BackendError,
    BackendUnavailable,
    FormatTooNew,
    InvalidName,
    NotSupported,
    PermissionDenied,
    StorageFull,
)
from qworker.message import Draft
from qworker.testing.wait_until import wait_until
from qworker.url import BackendURL
from qworker_redis.batch_sender import BatchSender
from qworker_redis.codec import decode, encode
from qworker_redis.connection import Connection, connect
from qworker_redis.error_replies import ConnectionLost, Redirected, to_error
from qworker_redis.keys import NATIVE
from qworker_redis.options import Options, TcpAddress
from qworker_redis.rfq.keys import RFQ
from qworker_redis.scripts import ScriptSet
from qworker_redis.topology import key_slot, queue_slot

# -- values ------------------------------------------------------------------------------------------------------------

_texts = st.text(max_size=20)
# What a file name may hold that is not UTF-8.
_odd_texts = st.binary(max_size=20).map(lambda raw: raw.decode(errors="surrogateescape"))


@given(
    body=st.binary(max_size=300),
    priority=st.integers(0, 9),
    unique_key=st.none() | _odd_texts.filter(bool),
    enqueued_at=st.none() | st.floats(0, 1e11),
    argv=st.lists(_odd_texts, max_size=3).map(tuple),
    fields=st.none() | st.dictionaries(_texts, _texts, max_size=3),
)
def test_a_value_gives_back_what_was_put_in(
    body: bytes,
    priority: int,
    unique_key: str | None,
    enqueued_at: float | None,
    argv: tuple[str, ...],
    fields: dict[str, str] | None,
) -> None:
    draft = Draft(
        body=body, priority=priority, unique_key=unique_key, enqueued_at=enqueued_at, argv=argv, fields=fields
    )
    _, _, rest = encode("id", draft)
    message = decode("q", "id", b"\x00\x07" + (1_700_000_000_000_001).to_bytes(8) + rest)
    assert (message.body, message.priority, message.unique_key, message.tries) == (body, priority, unique_key, 7)
    assert (message.argv, message.fields) == (argv, fields)
    assert message.enqueued_at == (1_700_000_000.000001 if enqueued_at is None else enqueued_at)


def test_a_plain_message_needs_nothing_special() -> None:
    assert encode("id", Draft(body=b"x")) == ("id", b"", b"\0\0x")


@given(st.binary(max_size=40))
def test_a_damaged_value_is_told_in_one_line(value: bytes) -> None:
    told = ""
    try:
        decode("q", "id", value)
    except BackendError as error:
        told = str(error)
    else:
        assert len(value) >= 12
    assert told in {"", "the message id of q is damaged: remove it by its id"}


def test_a_value_whose_text_is_none_is_damaged() -> None:
    (_, _, value) = encode("id", Draft(body=b"x", argv=("argument",), fields={"name": "value"}))
    ruined = bytes(10) + value
    with pytest.raises(BackendError, match="the message id of q is damaged"):
        decode("q", "id", ruined.replace(b"name", b"\xff\xff\xff\xff"))


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(NotSupported, match="0 to 9"):
        encode("id", Draft(body=b"", priority=10))
    with pytest.raises(InvalidName, match="key"):
        encode("id", Draft(body=b"", unique_key="k" * 256))


# -- scripts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scripts", "name"), [(scripts, name) for scripts in (NATIVE, RFQ) for name in scripts.names()]
)
def test_every_script_names_its_keys_and_what_it_takes_and_gives(scripts: ScriptSet, name: str) -> None:
    source = scripts.get(name, flags=True).source.decode()
    own = source.split("\n-- KEYS: ")[1]
    assert "-- ARGV: " in own
    assert "-- RETURNS: " in own
    assert ("allow-oom" in source.splitlines()[0]) == (
        name not in {"publish", "publish_one", "publish_staged", "stage"}
    )
    # Redis before 7 takes the first line for a syntax error.
    assert scripts.get(name, flags=False).source.decode() == source.partition("\n")[2]


# -- replies -----------------------------------------------------------------------------------------------------------

# How Redis 6.2 begins to tell of what a script's command was answered.
IN_SCRIPT = "ERR Error running script (call to f_f8d90fe0): @user_script:66: @user_script: 66: "


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", StorageFull),
        ("MISCONF Errors writing to the AOF file: No space left on device", StorageFull),
        ("WRONGPASS invalid username-password pair or user is disabled.", PermissionDenied),
        ("NOAUTH Authentication required.", PermissionDenied),
        ("NOPERM this user has no permissions", PermissionDenied),
        ("ERR AUTH <password> called without any password configured", PermissionDenied),
        ("LOADING Redis is loading the dataset in memory", BackendUnavailable),
        ("TRYAGAIN Multiple keys request during rehashing of slot", BackendUnavailable),
        ("MOVED 1 127.0.0.1:7000", Redirected),
        ("READONLY You can't write against a read only replica.", Redirected),
        (
            f"{IN_SCRIPT}-OOM command not allowed when used memory > 'maxmemory'.",
            StorageFull,
        ),
        (
            f"{IN_SCRIPT}-READONLY You can't write against a read only replica.",
            Redirected,
        ),
        (f"{IN_SCRIPT}attempt to index a nil value", BackendError),
        ("QWTOONEW the queue has format 2", FormatTooNew),
        ("ERR unknown command", BackendError),
    ],
)
def test_error_replies_become_errors_of_the_one_tree(text: str, kind: type[BackendError]) -> None:
    error = to_error(ReplyError(text))
    assert type(error) is kind
    assert isinstance(error.__cause__, ReplyError)


def test_slots_are_those_of_a_cluster() -> None:
    # As `CLUSTER KEYSLOT` says.
    assert key_slot(b"foo") == 12182
    assert key_slot(b"somekey") == 11058
    assert queue_slot("q") == key_slot(b"qworker:q")


# -- batch senders -----------------------------------------------------------------------------------------------------


def gated() -> tuple[list[list[int]], asyncio.Event, Callable[[Sequence[int]], Awaitable[list[int]]]]:
    batches: list[list[int]] = []
    gate = asyncio.Event()

    async def send(batch: Sequence[int]) -> list[int]:
        batches.append(list(batch))
        await gate.wait()
        if 13 in batch:
            raise BackendUnavailable("thirteen")
        return [-item for item in batch]

    return batches, gate, send


async def test_what_comes_while_a_batch_is_sent_is_the_next_batch() -> None:
    batches, gate, send = gated()
    sender = BatchSender(send, lambda _: 1, 100)
    calls = [asyncio.create_task(sender.submit([n, n + 100])) for n in range(5)]
    await wait_until(lambda: batches)
    gate.set()
    assert await asyncio.gather(*calls) == [[-n, -n - 100] for n in range(5)]
    assert batches == [[0, 100], [1, 101, 2, 102, 3, 103, 4, 104]]


async def test_a_batch_has_a_limit_and_its_order() -> None:
    batches, gate, send = gated()
    gate.set()
    assert await BatchSender(send, lambda _: 1, 4).submit(range(10)) == [-n for n in range(10)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


async def test_a_cancelled_call_takes_nobody_along_and_a_failure_reaches_all_of_its_batch() -> None:
    batches, gate, send = gated()
    sender = BatchSender(send, lambda _: 1, 100)
    first, second, third, fourth = (asyncio.create_task(sender.submit([n])) for n in (1, 2, 13, 4))
    await wait_until(lambda: batches)
    first.cancel()
    second.cancel()
    gate.set()
    results = await asyncio.gather(first, second, third, fourth, return_exceptions=True)
    assert [type(result) for result in results] == [
        asyncio.CancelledError,
        asyncio.CancelledError,
        BackendUnavailable,
        BackendUnavailable,
    ]
    assert batches == [[1], [13, 4]]
    assert await sender.submit([5]) == [-5]


# -- connections -------------------------------------------------------------------------------------------------------


class Scripted(asyncio.Protocol):
    """A server's end that answers what comes with prepared bytes; None: with the end of the connection."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self.left = [b"*2\r\n$7\r\nversion\r\n$5\r\n7.0.1\r\n", *answers]
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.left:
            answer = self.left.pop(0)
            if answer is None:
                self.transport.close()
            else:
                self.transport.write(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()


@asynccontextmanager
async def said(*answers: bytes | None) -> AsyncIterator[Connection]:
    """A connection to such a server."""
    scripted = Scripted(answers)
    server = await asyncio.get_running_loop().create_server(lambda: scripted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options = Options.parse(BackendURL.parse(f"redis://127.0.0.1:{port}?timeout=0.5"))
    connection = await connect(options, TcpAddress("127.0.0.1", port))
    try:
        yield connection
    finally:
        connection.close()
        await scripted.gone.wait()
        server.close()
        await server.wait_closed()


async def test_answers_come_in_order_and_in_pieces() -> None:
    async with said(b":1\r\n$3\r\na", b"bc\r\n") as connection:
        assert connection.version == (7, 0)
        first, second = connection.send("ONE"), connection.send("TWO")
        assert await first == 1
        # Commands that went out as one are one to this server.
        third = connection.send("THREE")
        assert await second == b"abc"
        third.cancel()


async def test_the_answer_to_a_cancelled_command_goes_to_nobody() -> None:
    async with said(b":1\r\n:2\r\n") as connection:
        first, second = connection.send("ONE"), connection.send("TWO")
        first.cancel()
        assert await second == 2


async def test_a_lost_connection_fails_all_that_wait_and_all_that_comes() -> None:
    async with said(None) as connection:
        calls = [connection.send("ONE"), connection.send("TWO")]
        for call in calls:
            with pytest.raises(ConnectionLost) as caught:
                await call
            assert caught.value.sent
        assert not connection.alive
        with pytest.raises(ConnectionLost) as caught:
            connection.send("THREE")
        assert not caught.value.sent


async def test_silence_ends_a_connection() -> None:
    async with said(b"") as connection:
        with pytest.raises(ConnectionLost, match="no answer within"):
            await connection.send("ONE")
        assert not connection.alive


@pytest.mark.parametrize("nonsense", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n:2\r\n"])
async def test_a_server_that_talks_nonsense_is_left(nonsense: bytes) -> None:
    async with said(nonsense) as connection:
        call = connection.send("ONE")
        await wait_until(lambda: not connection.alive)
        await asyncio.wait([call])
        assert call.exception() is not None or call.result() == 1
