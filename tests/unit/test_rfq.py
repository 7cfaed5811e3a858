"""rfq: what strangers may have left in a keyspace, and how maps become messages and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.errors import BackendError, InvalidArguments, InvalidURL, NotSupported
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker_redis.rfq.codec import BODY, BODY_BASE64, decode, encode
from qworker_redis.rfq.ids import derive_id, is_id, new_ids, published_at, to_ticks
from qworker_redis.rfq.keys import parse_topic, rfq_key
from tests.support.servers import RedisServer, free_port

TOPIC = "tiles"
NAMES = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name not in {BODY, BODY_BASE64})


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[Redis]:
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
async def backend(server: RedisServer, client: Redis) -> AsyncIterator[Backend]:
    backend = open_backend(f"rfq://127.0.0.1:{server.port}/0")
    yield backend
    await backend.aclose()


def settlements(leases: list[Lease], how: SettleAction = SettleAction.ACK) -> list[Settlement]:
    return [Settlement(lease=lease, action=how) for lease in leases]


# -- maps and ids ------------------------------------------------------------------------------------------------------


def hgetall(packed: bytes) -> list[bytes]:
    """What Redis answers, from what the publish script is given."""
    parts: list[bytes] = []
    while packed:
        length = int.from_bytes(packed[:4])
        parts.append(packed[4 : 4 + length])
        packed = packed[4 + length :]
    return parts


@given(st.binary(), st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_a_message_comes_back_as_it_was_and_its_map_is_text(body: bytes, fields: dict[str, str]) -> None:
    (fresh,) = new_ids(1, 1_700_000_000.0)
    message_id, special, packed = encode(fresh, Draft(body=body, fields=fields))
    raw = hgetall(packed)
    assert (message_id, special) == (fresh, b"")
    assert raw, "a map is never empty"
    [part.decode() for part in raw]
    message = decode(TOPIC, message_id, [0, b"", raw, b""])
    assert (message.body, message.fields or {}) == (body, fields)


@given(st.lists(st.binary(max_size=20), max_size=6).map(lambda parts: parts[: len(parts) // 2 * 2]), st.booleans())
def test_no_map_breaks_the_reader(raw: list[bytes], coded: bool) -> None:
    if coded:
        raw = [BODY_BASE64.encode(), *(raw or [b""])[:1]]
    with contextlib.suppress(BackendError):
        assert decode(TOPIC, "x", [0, b"", raw, b""]).id == "x"


@given(st.floats(0, 4e9), st.text())
def test_ids_are_uuids_that_tell_their_time(now: float, origin: str) -> None:
    first, second = new_ids(2, now)
    derived = derive_id(origin, to_ticks(now))
    for made in (first, second, derived):
        assert is_id(made)
        assert uuid.UUID(made).version == 1
        assert uuid.UUID(made).variant == uuid.RFC_4122
        assert uuid.UUID(made).node >> 40 & 1, "nobody's network address"
    assert first < second or first[:8] > second[:8]
    assert derived == derive_id(origin, to_ticks(now))
    assert published_at(derived) == pytest.approx(now, abs=1e-5)


@given(st.binary(max_size=60))
def test_no_key_of_a_stranger_is_a_topic_that_cannot_be_named(key: bytes) -> None:
    for part in ("backlog", "nextlog", "meta"):
        for candidate in (key, b"rfq:" + key + b":" + part.encode()):
            topic = parse_topic(candidate, part)
            assert topic is None or rfq_key(topic, part) == candidate


@pytest.mark.parametrize(
    "draft",
    [
        Draft(body=b"", priority=1),
        Draft(body=b"", unique_key="k"),
        Draft(body=b"", id="chosen"),
        Draft(body=b"", id="A" * 32),
        Draft(body=b"", argv=("a",)),
    ],
)
async def test_what_rfq_does_not_support_is_refused_in_one_line(draft: Draft) -> None:
    with pytest.raises(NotSupported, match=r"^rfq: does not support [^\n]+$"):
        await open_backend("rfq://nowhere.invalid/0").publish("q", [draft])


@pytest.mark.parametrize("fields", [{"k": "\ud800"}, {"\ud800": "v"}, {"k": 1}, {BODY: "x"}, {BODY_BASE64: "x"}])
def test_fields_that_are_no_text_or_qworkers_own_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArguments, match=r"^[^\n]+$"):
        encode("0" * 32, Draft(body=b"", fields=fields))


# -- a hostile keyspace ------------------------------------------------------------------------------------------------


async def test_hostile_messages_are_set_aside_and_all_others_flow(backend: Backend, client: Redis) -> None:
    hostile = {
        b"": {"k": "v"},
        b"\xff\xfe": {"k": "v"},
        b"../../etc/passwd": {"k": "v"},
        b"a\nb\x00c": {"k": "v"},
        b"x" * 4000: {"k": "v"},
        b"b" * 32: {b"\xff": b"v"},
        b"c" * 32: {"k": b"\xff\xfe"},
        b"d" * 32: {BODY_BASE64: "not base64!"},
    }
    for name, fields in hostile.items():
        client.hset(b"rfq:tiles:message:" + name, mapping=fields)
    client.set("rfq:tiles:message:" + "e" * 32, "a string")
    client.rpush("rfq:tiles:message:" + "f" * 32, "a", "list")
    client.set("outside", "untouched")
    client.set("rfq:other:message:1", "untouched")
    ids = await backend.publish(TOPIC, [Draft(body=b"%d" % n) for n in range(3)])
    client.lpush("rfq:tiles:backlog", *hostile, "e" * 32, "f" * 32, "0" * 32, b"gone:1", ids[0])
    (more,) = await backend.publish(TOPIC, [Draft(body=b"3")])
    leases: list[Lease] = []
    while (await backend.stats(TOPIC)).ready:
        leases += await backend.lease(TOPIC, 5, 60.0)
    assert {lease.message.id for lease in leases} == {*ids, more}
    assert {lease.message.body for lease in leases} == {b"0", b"1", b"2", b"3"}
    failed = await list_messages(backend, TOPIC, Query(State.FAILED))
    assert len(failed) == len(hostile) + 2
    assert all(row.error for row in failed)
    # An id that stood in the line twice was leased again, with a new token: the last holder has it.
    held = list({lease.message.id: lease for lease in leases}.values())
    assert await backend.settle(settlements(held)) == []
    stats = await backend.stats(TOPIC)
    assert (stats.ready, stats.leased, stats.failed) == (0, 0, len(failed))
    assert (await backend.reap(TOPIC)).returned == 0
    assert await backend.remove(TOPIC, Selection(state=State.FAILED)) == len(failed)
    assert {client.get("outside"), client.get("rfq:other:message:1")} == {b"untouched"}
    assert client.keys("rfq:tiles:message:*") == []


async def test_a_key_of_another_kind_is_told_in_one_line(backend: Backend, client: Redis) -> None:
    client.set("rfq:tiles:backlog", "no list")
    for call in (backend.lease(TOPIC, 1, 60.0), backend.publish(TOPIC, [Draft(body=b"")]), backend.stats(TOPIC)):
        with pytest.raises(BackendError, match=r"^[^\n]*rename this key[^\n]*$"):
            await call
    assert await backend.queues() == []
    client.delete("rfq:tiles:backlog")
    client.lpush("rfq:../x:backlog", "1")
    client.lpush(b"rfq:\xff:backlog", "1")
    assert await backend.queues() == []


async def test_notes_of_messages_that_others_finish_do_not_stay(backend: Backend, client: Redis) -> None:
    await backend.publish(TOPIC, [Draft(body=b"x", tries=2, enqueued_at=5.0, original_id="old-id")])
    (lease,) = await backend.lease(TOPIC, 1, 60.0)
    assert (lease.message.tries, lease.message.enqueued_at, lease.message.original_id) == (2, 5.0, "old-id")
    assert client.hgetall("rfq:tiles:qworker:origins") == {lease.message.id.encode(): b"old-id"}
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, error="no")]) == []
    # As a foreign consumer consumes and commits.
    name = client.rpoplpush("rfq:tiles:backlog", "rfq:tiles:nextlog")
    client.lrem("rfq:tiles:nextlog", 1, name)
    client.delete(b"rfq:tiles:message:" + name)
    await backend.reap(TOPIC)
    left = {key for key in client.keys("*") if b":mark:" not in key}
    assert left == {b"rfq:tiles:qworker:meta"}


async def test_a_copy_that_an_interrupted_harvest_left_goes_with_the_commit(backend: Backend, client: Redis) -> None:
    """The printed form of harvest copies an id to the backlog before it takes it out of the nextlog."""
    await backend.publish(TOPIC, [Draft(body=b"x")])
    (lease,) = await backend.lease(TOPIC, 1, 60.0)
    client.lpush("rfq:tiles:backlog", lease.message.id)
    assert await backend.settle(settlements([lease])) == []
    assert await backend.lease(TOPIC, 1, 60.0) == []
    assert client.llen("rfq:tiles:backlog") == client.llen("rfq:tiles:nextlog") == 0


async def test_a_message_that_was_purged_by_another_is_lost_to_its_holder(backend: Backend, client: Redis) -> None:
    ids = await backend.publish(TOPIC, [Draft(body=b"x") for _ in range(3)])
    first, second, third = await backend.lease(TOPIC, 3, 60.0)
    client.delete("rfq:tiles:nextlog", *[f"rfq:tiles:message:{message_id}" for message_id in ids])
    assert await asyncio.to_thread(backend.extend, [first], 60.0) == [first]
    assert await backend.settle([Settlement(lease=second, action=SettleAction.FAIL_PERM, error="no")]) == []
    assert (await backend.reap(TOPIC)).returned == 0
    assert await backend.settle(settlements([third])) != []
    assert (await backend.stats(TOPIC)).failed == 0


# -- commands and URLs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", ["", "{", "[]", "{}", '"x"', '{"k": {}}', '{"k": null}', '{"k": true}', "[" * 5000])
def test_a_message_that_is_no_flat_map_is_refused_in_one_line(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rfq", "publish", "-t", TOPIC, "-m", message]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_commands_refuse_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFQ_REDIS_PORT", "1")
    assert main(["rfq", "info"]) == 3
    monkeypatch.setenv("RFQ_REDIS_PORT", "no port")
    assert main(["rfq", "info"]) == 2
    assert main(["rfq", "info", "--url", "file:///tmp"]) == 2
    assert all(line.startswith("qworker: ") for line in capsys.readouterr().err.splitlines())


def test_the_commands_print_json_when_asked(server: RedisServer, client: Redis) -> None:
    variables = {"RFQ_REDIS_HOST": "127.0.0.1", "RFQ_REDIS_PORT": str(server.port)}

    def told(*arguments: str) -> Any:
        from qworker.cli.main import cli

        found = CliRunner().invoke(cli, ["rfq", *arguments, "--json"], env=variables, standalone_mode=False)
        assert found.exception is None
        return json.loads(found.stdout)

    (message_id,) = told("publish", "-t", TOPIC, "-m", '{"k": "v"}')
    assert told("list-topics") == [TOPIC]
    assert told("info") == {TOPIC: {"backlog": 1, "nextlog": 0}}
    assert told("list-queue", "-t", TOPIC) == [message_id]
    assert told("peek", "-t", TOPIC, "-m", message_id) == {"k": "v"}
    assert told("consume", "-t", TOPIC) == {"k": "v"}
    assert told("purge-queue", "-t", TOPIC) == told("harvest", "-t", TOPIC) == []
    assert set(told("version")) == {"qworker", "redis"}


def test_a_url_without_a_host_leads_where_rfqs_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from qworker.url import BackendURL
    from qworker_redis.options import Options, TcpAddress

    monkeypatch.setenv("RFQ_REDIS_HOST", "queues.example")
    monkeypatch.setenv("RFQ_REDIS_PORT", "7000")
    assert Options.parse(BackendURL.parse("rfq:")).addresses == (TcpAddress("queues.example", 7000),)
    assert Options.parse(BackendURL.parse("rfq:///3")).db == 3
    assert Options.parse(BackendURL.parse("rfq://other/1")).addresses == (TcpAddress("other", 6379),)
    with pytest.raises(InvalidURL, match="keep_done"):
        Options.parse(BackendURL.parse("rfq://host/0?keep_done=all"))
