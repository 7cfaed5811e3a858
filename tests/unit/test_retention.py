"""`keep_done` and `keep_failed` mean the same on every store that has them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
import structlog.testing
from hypothesis import given
from hypothesis import strategies as st

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import InvalidURL
from qworker.kit.retention import RetentionPolicy, keep_done
from qworker.message import Draft, Query, SettleAction, Settlement, State
from qworker.testing.harness import Harness
from qworker.url import BackendURL
from tests.support.immutable import make_immutable
from tests.support.servers import RedisHarness, RedisServer, free_port

QUEUE = "jobs"
DAY = 86_400.0
FORMS = "use none, all, an age such as 7d, or a number of messages such as 1000-messages"
# Each state, and how a message gets there.
ENDS = {State.DONE: SettleAction.ACK, State.FAILED: SettleAction.FAIL_PERM}
STORES = ["memory", "file", "fsq", "redis"]
# rfq: has no place for acked messages.
KEPT = [*((store, state) for store in STORES for state in ENDS), ("rfq", State.FAILED)]
finished = pytest.mark.parametrize(("store", "state"), KEPT, indirect=["store"])


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port(), moved_clock=True) as server:
        yield server


@pytest_asyncio.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """A store that is opened again and again, each time with other options."""
    async with AsyncExitStack() as stack:
        harness: Harness
        if request.param in {"redis", "rfq"}:
            redis: RedisServer = request.getfixturevalue("server")
            url = f"rfq://127.0.0.1:{redis.port}/0" if request.param == "rfq" else None
            harness = RedisHarness(redis, url=url)
        elif request.param == "memory":
            harness = Harness.fake(f"memory://retention-{secrets.token_hex(4)}")
        else:
            harness = Harness.fake(f"{request.param}://{tmp_path}/root")
        await stack.enter_async_context(harness)
        yield harness
        await (await harness.open()).delete(QUEUE)


async def end(backend: Backend, state: State, *bodies: bytes) -> None:
    """Publish messages and end each in a state, one after another."""
    for body in bodies:
        await backend.publish(QUEUE, [Draft(body=body)])
        (lease,) = await backend.lease(QUEUE, 1, 60.0)
        assert await backend.settle([Settlement(lease=lease, action=ENDS[state], error="no")]) == []


async def opened(store: Harness, state: State, keep: str) -> Backend:
    """A backend that keeps so many messages of a state."""
    return await (store.open(keep_done=keep) if state is State.DONE else store.open(keep_failed=keep))


async def kept(backend: Backend, state: State) -> list[bytes]:
    """The bodies of the messages of a state, after a reap."""
    await backend.reap(QUEUE)
    bodies = [stored.message.body for stored in await list_messages(backend, QUEUE, Query(state))]
    stats = await backend.stats(QUEUE)
    assert {State.DONE: stats.done, State.FAILED: stats.failed}[state] == len(bodies)
    return bodies


@finished
async def test_all_keeps_every_message(store: Harness, state: State) -> None:
    backend = await opened(store, state, "all")
    await end(backend, state, b"1", b"2")
    await store.advance(3000 * DAY)
    assert await kept(backend, state) == [b"1", b"2"]


@finished
async def test_none_keeps_no_message(store: Harness, state: State) -> None:
    backend = await opened(store, state, "none")
    await end(backend, state, b"1", b"2")
    await store.advance(100.0)
    assert await kept(backend, state) == []


@finished
async def test_an_age_removes_what_is_older(store: Harness, state: State) -> None:
    backend = await opened(store, state, "2d")
    await end(backend, state, b"old")
    await store.advance(1.5 * DAY)
    assert await kept(backend, state) == [b"old"]
    await store.advance(DAY)
    assert await kept(backend, state) == []


@finished
async def test_a_number_keeps_the_newest(store: Harness, state: State) -> None:
    backend = await opened(store, state, "2-messages")
    for number in range(5):
        await end(backend, state, b"%d" % number)
        await store.advance(0.01)
    await store.advance(100.0)
    assert await kept(backend, state) == [b"3", b"4"]
    await store.advance(3000 * DAY)
    assert await kept(backend, state) == [b"3", b"4"]


async def test_done_and_failed_messages_are_kept_apart(store: Harness) -> None:
    backend = await store.open(keep_done="1-messages", keep_failed="3d")
    await end(backend, State.DONE, b"done")
    await end(backend, State.FAILED, b"failed", b"failed too")
    await backend.publish(QUEUE, [Draft(body=b"ready")])
    await store.advance(2 * DAY)
    assert (await kept(backend, State.DONE), len(await kept(backend, State.FAILED))) == ([b"done"], 2)
    await store.advance(2 * DAY)
    assert (await kept(backend, State.DONE), await kept(backend, State.FAILED)) == ([b"done"], [])
    assert [stored.message.body for stored in await list_messages(backend, QUEUE, Query(State.READY))] == [b"ready"]


@pytest.mark.parametrize("store", ["file", "fsq"], indirect=True)
async def test_the_reason_of_a_failure_goes_with_it(store: Harness) -> None:
    backend = await store.open(keep_failed="1-messages")
    await end(backend, State.FAILED, b"1", b"2", b"3")
    await store.advance(100.0)
    assert await kept(backend, State.FAILED) == [b"3"]
    assert backend.directory is not None
    # The message and its reason.
    assert len(list((backend.directory / QUEUE / "fail").iterdir())) == 2


async def test_a_worker_that_keeps_nothing_leaves_what_another_one_keeps(store: Harness) -> None:
    keeping, other = await store.open(keep_done="all"), await store.open(keep_done="none")
    await end(keeping, State.DONE, b"kept")
    await store.advance(100.0)
    assert await kept(other, State.DONE) == [b"kept"]


async def test_failed_messages_are_kept_unless_the_url_says_otherwise(store: Harness) -> None:
    backend = await store.open()
    await end(backend, State.FAILED, b"failed")
    await store.advance(3000 * DAY)
    assert await kept(backend, State.FAILED) == [b"failed"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("none", "not kept"),
        ("all", "kept"),
        ("7d", "kept for 7d"),
        ("90m", "kept for 90m"),
        ("1000-messages", "the newest 1000 are kept"),
    ],
)
async def test_stats_say_what_is_kept(store: Harness, text: str, words: str) -> None:
    backend = await store.open(keep_done=text, keep_failed=text)
    await backend.create(QUEUE)
    retention = (await backend.stats(QUEUE)).retention
    assert (retention["done"], retention["failed"]) == (words, words)


async def test_acked_messages_are_gone_by_default_except_where_the_standard_keeps_them(store: Harness) -> None:
    backend = await store.open()
    await end(backend, State.DONE, b"done")
    is_fsq = backend.describe().startswith("fsq:")
    assert await kept(backend, State.DONE) == ([b"done"] if is_fsq else [])
    assert (await backend.stats(QUEUE)).retention["done"] == ("kept" if is_fsq else "not kept")


@pytest.mark.parametrize("name", ["keep_done", "keep_failed"])
@pytest.mark.parametrize("url", ["memory:", "file:///x", "fsq:///x", "redis://x", "unix:///x"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "1",
        "7",
        "1000",
        "soon",
        "0d",
        "-1d",
        "7w",
        "0-messages",
        "-3-messages",
        "1.5-messages",
        "7-days",
        "ALL",
    ],
)
def test_anything_else_is_refused_with_the_four_forms(url: str, name: str, text: str) -> None:
    with pytest.raises(InvalidURL) as caught:
        open_backend(f"{url}?{name}={text}")
    assert str(caught.value).endswith(f": {name}={text} is not valid: {FORMS}")
    assert "\n" not in str(caught.value)


@given(
    st.sampled_from([RetentionPolicy(), RetentionPolicy(keep=False)])
    | st.integers(1, 10**11).map(lambda count: RetentionPolicy(count=count))
    | st.integers(1, 10**9).map(lambda seconds: RetentionPolicy(age=float(seconds)))
)
def test_what_is_written_reads_as_the_same_retention(keep: RetentionPolicy) -> None:
    assert keep_done(BackendURL.parse(f"file:///x?keep_done={keep}")) == keep


@pytest.mark.parametrize("state", ENDS)
@pytest.mark.parametrize("scheme", ["file", "fsq"])
async def test_a_message_that_cannot_be_removed_keeps_no_other_and_is_reported_once(
    scheme: str, state: State, tmp_path: Path
) -> None:
    async with Harness.fake(f"{scheme}://{tmp_path}/root") as store:
        backend = await opened(store, state, "1-messages")
        await end(backend, state, b"stuck")
        (stuck,) = [
            path for path in (tmp_path / "root" / QUEUE / state.value).iterdir() if not path.name.startswith(".")
        ]
        make_immutable(stuck, True)
        try:
            await end(backend, state, b"old", b"new")
            with structlog.testing.capture_logs() as lines:
                for _ in range(2):
                    await store.advance(100.0)
                    assert sorted(await kept(backend, state)) == [b"new", b"stuck"]
        finally:
            make_immutable(stuck, False)
        assert [(line["event"], line["file"]) for line in lines] == [("removal_failed", f"{state.value}/{stuck.name}")]
        await store.advance(100.0)
        # On `fsq:` the change of the flag counts as its end.
        assert await kept(backend, state) == ([b"new"] if scheme == "file" else [b"stuck"])
