"""The parts of the Redis backend by themselves: values, scripts, replies, slots, lanes and connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import DefaultParser
from redis.crc import key_slot

from qworker.errors import (
    BackendError,
    BackendUnavailable,
    FormatTooNew,
    InvalidName,
    PermissionDenied,
    StorageFull,
    UsageError,
)
from qworker.message import Draft
from qworker.testing.wait_until import wait_until
from qworker.url import BackendURL
from qworker_redis.batch_sender import BatchSender
from qworker_redis.codec import decode, encode
from qworker_redis.connection import Connection, connect, pack
from qworker_redis.error_replies import ConnectionLost, Redirected, to_error
from qworker_redis.keys import NATIVE
from qworker_redis.lender import Lender
from qworker_redis.options import Options, TcpAddress
from qworker_redis.rfq.keys import RFQ
from qworker_redis.scripts import ScriptSet
from qworker_redis.topology import queue_slot
from tests.support.waiting import PATIENCE

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
    with pytest.raises(UsageError, match=r"priority must be from 0 to 9 \(got 10\)"):
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
    # As redis-py reads it.
    reply = DefaultParser.parse_error(text)
    error = to_error(reply)
    assert type(error) is kind
    assert error.__cause__ is reply


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
    """A server's end that answers what comes with prepared bytes, in the pieces between `|`; None: it hangs up."""

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
                for number, piece in enumerate(answer.split(b"|")):
                    asyncio.get_running_loop().call_later(number * 0.01, self.transport.write, piece)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()


@asynccontextmanager
async def said(*answers: bytes | None) -> AsyncIterator[Connection]:
    """A connection to such a server."""
    scripted = Scripted(answers)
    server = await asyncio.get_running_loop().create_server(lambda: scripted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options = Options.parse(BackendURL.parse(f"redis://127.0.0.1:{port}?timeout={PATIENCE}"))
    connection = await connect(options, TcpAddress("127.0.0.1", port))
    try:
        yield connection
    finally:
        await connection.close()
        await scripted.gone.wait()
        server.close()
        await server.wait_closed()


ONE, TWO = pack(("ONE",)), pack(("TWO",))


async def test_answers_come_in_order_and_in_pieces() -> None:
    async with said(b":1\r\n$3\r\na|bc\r\n:3\r\n") as connection:
        assert connection.version == (7, 0)
        assert await connection.send_all([ONE, TWO, ONE]) == [1, b"abc", 3]


async def test_an_error_among_answers_is_one_of_them() -> None:
    async with said(b":1\r\n-NOPERM no\r\n:3\r\n") as connection:
        first, second, third = await connection.send_all([ONE, TWO, ONE])
        assert (first, third) == (1, 3)
        assert isinstance(second, PermissionDenied)
        assert await connection.is_usable()


async def test_a_cancelled_command_ends_its_connection_so_that_nobody_gets_its_answer() -> None:
    async with said(b"") as connection:
        call = asyncio.create_task(connection.send("ONE"))
        await wait_until(lambda: connection.deadline < float("inf"))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not connection.alive


async def test_a_lost_connection_fails_its_call_and_is_not_lent_again() -> None:
    async with said(None) as connection:
        with pytest.raises(ConnectionLost, match="closed by the server") as caught:
            await connection.send("ONE")
        assert caught.value.sent
        assert not connection.alive
        assert not await connection.is_usable()


async def test_silence_ends_a_connection() -> None:
    async with said(b"") as connection:

        async def opened() -> Connection:
            return connection

        lender = Lender(connection.address, 0.5, opened)
        assert await lender.take() is connection
        with pytest.raises(ConnectionLost, match="no answer within"):
            await connection.send("ONE")
        lender.give(connection)
        assert not connection.alive
        assert await lender.take_idle() is None
        await lender.aclose()


async def test_a_server_that_talks_nonsense_is_left() -> None:
    async with said(b"HTTP/1.1 400 Bad Request\r\n\r\n") as connection:
        with pytest.raises(ConnectionLost, match="does not speak the Redis protocol"):
            await connection.send("ONE")
        assert not connection.alive


async def test_a_connection_with_an_answer_that_nobody_asked_for_is_not_lent() -> None:
    async with said(b":1\r\n:2\r\n") as connection:
        assert await connection.send("ONE") == 1
        assert not await connection.is_usable()
