"""Filters and groups of failed messages, on every store that keeps failures."""

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from qworker import Draft, Tasks
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import QworkerError, UsageError
from qworker.failures import bulk
from qworker.failures.bulk import (
    browse_matching,
    count_groups,
    list_matching,
    remove_matching,
    requeue_matching,
    until_now,
)
from qworker.failures.groups import GroupCounts, GroupedFailures, group_of, make_group
from qworker.failures.message_filter import MessageFilter
from qworker.jobs.source import JobSource
from qworker.message import Lease, Message, Query, Selection, SettleAction, Settlement, State, StoredMessage
from qworker.testing.clock import FakeClock
from tests.support.servers import RedisServer, free_port

QUEUE = "work"
HOUR = 3600.0
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 7, in resize\n    open(path)\n'
# What has failed: its task and its error.
FAILED = {
    "picture-1": ("resize", TRACEBACK + "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/1.png'"),
    "picture-2": ("resize", TRACEBACK + "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/2.png'"),
    "picture-3": ("resize", "code: timeout\ntimed out after 30 seconds"),
    "letter-1": ("send", "ConnectionError: host 7 refused"),
    "letter-2": ("send", "code: poison\nthe handler's process died: killed by SIGKILL"),
    "letter-3": ("send", "code: cancelled\ncancelled by deploy"),
    "bytes-1": (None, "ConnectionError: host 12 refused"),
}
LETTERS = make_group("send", "ConnectionError: host 99 refused").key
PICTURES = make_group("resize", FAILED["picture-1"][1]).key


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest_asyncio.fixture(params=["memory", "file", "redis", "fsq", "vsqs", "sq", "mq", "rfq"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    """A store with what has failed, by some clocks an hour ago, and one message that is ready."""
    clock = FakeClock(time.time())
    scheme = request.param
    if scheme in {"redis", "rfq"}:
        server: RedisServer = request.getfixturevalue("redis")
        url = f"{scheme}://127.0.0.1:{server.port}/0"
    else:
        url = f"memory://failures-{id(clock)}" if scheme == "memory" else f"{scheme}://{tmp_path}/spool"
        url += "?sync=off" if scheme == "file" else ""
    backend = open_backend(url, clock=clock)
    await backend.create(QUEUE)
    await backend.publish(QUEUE, [Draft(body=body(name, task)) for name, (task, _) in FAILED.items()])
    for lease in await backend.lease(QUEUE, len(FAILED), 30.0):
        await fail(backend, lease, FAILED[name_of(lease.message)][1])
    await backend.publish(QUEUE, [Draft(body=body("ready", "resize"))])
    clock.advance(HOUR)
    _let_the_clock_of_files_tick(tmp_path)
    yield backend
    await backend.delete(QUEUE)
    await backend.aclose()


def _let_the_clock_of_files_tick(directory: Path) -> None:
    """In some stores a message fails when its file is renamed. The next failure is to have a later time."""
    probe = directory / "probe"
    probe.touch()
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        probe.touch()


def body(name: str, task: str | None) -> bytes:
    return name.encode() if task is None else json.dumps({"task": task, "args": [name]}).encode()


def name_of(message: Message) -> str:
    text = message.body or (message.fields or {}).get("body", "").encode()
    return json.loads(text)["args"][0] if text.startswith(b"{") else text.decode()


async def fail(backend: Backend, lease: Lease, error: str) -> None:
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=error)]) == []


async def names(backend: Backend, state: State) -> list[str]:
    return sorted(name_of(stored.message) for stored in await list_messages(backend, QUEUE, Query(state)))


FILTERS: list[tuple[MessageFilter, set[str]]] = [
    (MessageFilter(), {*FAILED}),
    (MessageFilter(tasks=("resize",)), {"picture-1", "picture-2", "picture-3"}),
    (MessageFilter(tasks=("resize", "send"), codes=("error",)), {"picture-1", "picture-2", "letter-1"}),
    (MessageFilter(error="REFUSED"), {"letter-1", "bytes-1"}),
    (MessageFilter(error="refused", tasks=("send",)), {"letter-1"}),
    (MessageFilter(codes=("poison", "timeout")), {"picture-3", "letter-2"}),
    (MessageFilter(groups=(LETTERS,)), {"letter-1"}),
    (MessageFilter(groups=(PICTURES, LETTERS)), {"picture-1", "picture-2", "letter-1"}),
    (MessageFilter(groups=(PICTURES,), tasks=("send",)), set()),
]


async def test_a_filter_finds_what_a_full_scan_finds(store: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small parts and lists, so that their borders count.
    monkeypatch.setattr(bulk, "_PART", 2)
    monkeypatch.setattr(bulk, "_BATCH", 2)
    everything = await list_messages(store, QUEUE, Query(State.FAILED))
    last = max(stored.finished_at or 0.0 for stored in everything)
    times = [(MessageFilter(since=last + 1), set[str]()), (MessageFilter(since=last - 60, until=last), {*FAILED})]
    for matching, expected in [*FILTERS, *times]:
        scanned = [name_of(stored.message) for stored in everything if matching.matches(stored)]
        pages = [page async for page in browse_matching(store, QUEUE, State.FAILED, matching)]
        found = [name_of(stored.message) for page in pages for stored in page]
        assert sorted(found) == sorted(scanned) == sorted(expected), matching
        for query in (Query(State.FAILED), Query(State.FAILED, limit=1), Query(State.FAILED, newest=True)):
            listed = await list_matching(store, QUEUE, query, matching)
            ordered = scanned[::-1] if query.newest else scanned
            assert [name_of(stored.message) for stored in listed] == ordered[: query.limit], (matching, query)
    assert [name async for name in _ready(store, MessageFilter(tasks=("resize",)))] == ["ready"]
    assert [name async for name in _ready(store, MessageFilter(error="refused"))] == []


async def _ready(store: Backend, matching: MessageFilter) -> AsyncIterator[str]:
    async for page in browse_matching(store, QUEUE, State.READY, matching):
        for stored in page:
            yield name_of(stored.message)


async def test_requeue_and_remove_change_what_matches_and_leave_out_poison_and_cancelled_ones(store: Backend) -> None:
    source = JobSource(Tasks("memory://unused"), None)
    every = MessageFilter(tasks=("send",))
    left = {"poison": 1, "cancelled": 1}
    result = await requeue_matching(store, source, QUEUE, every, dry_run=True)
    assert (result.count, dict(result.left_out)) == (1, left)
    assert await names(store, State.FAILED) == sorted(FAILED)
    result = await requeue_matching(store, source, QUEUE, every)
    assert (result.count, dict(result.left_out)) == (1, left)
    assert await names(store, State.READY) == ["letter-1", "ready"]
    assert (await requeue_matching(store, source, QUEUE, MessageFilter(codes=("poison",)))).count == 1
    poison = make_group("send", FAILED["letter-2"][1]).key
    assert await remove_matching(store, QUEUE, MessageFilter(groups=(poison,))) == 0
    assert await remove_matching(store, QUEUE, MessageFilter(tasks=("resize",), codes=("error",))) == 2
    assert await names(store, State.READY) == ["letter-1", "letter-2", "ready"]
    assert await names(store, State.FAILED) == ["bytes-1", "letter-3", "picture-3"]


async def test_an_app_requeues_its_calls_by_what_they_are() -> None:
    tasks = Tasks("memory://failures-of-an-app")

    @tasks.task(queue="mail")
    async def send(name: str) -> None: ...

    @tasks.task(queue="unused")
    async def unused() -> None: ...

    try:
        for name in ("a", "b"):
            await send.enqueue(name)
        store = await tasks.backend()
        for lease, error in zip(await store.lease("mail", 2, 30.0), ("no", "code: poison\nno"), strict=True):
            await fail(store, lease, error)
        with pytest.raises(UsageError, match=r"takes at least one of task=, queue=, "):
            await tasks.requeue()
        with pytest.raises(UsageError, match="since"):
            await tasks.requeue(since="2h")  # type: ignore[arg-type]
        assert (await tasks.requeue(task=send, since=time.time() + 60)).count == 0
        result = await tasks.requeue(task=send, error="NO")
        assert (result.count, result.left_out) == (1, {"poison": 1})
        assert (await tasks.requeue(queue="mail", code="poison")).count == 1
    finally:
        await tasks.aclose()


@pytest.mark.parametrize("act", ["requeue", "remove"])
async def test_only_what_still_matches_at_the_action_is_changed(
    store: Backend, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the action one message runs and fails otherwise, and what is requeued fails again."""
    monkeypatch.setattr(bulk, "_PART", 2)
    monkeypatch.setattr(bulk, "_BATCH", 2)
    change: Callable[[str, Selection], Awaitable[int]] = getattr(store, act)
    requeue = store.requeue
    counts: Counter[str] = Counter()

    async def run_again(name: str, error: str) -> None:
        (stored,) = [m for m in await list_messages(store, QUEUE, Query(State.FAILED)) if name_of(m.message) == name]
        assert await requeue(QUEUE, Selection(ids=[stored.message.id])) == 1
        await fail_ready(name, error)

    async def fail_ready(*wanted: str) -> None:
        *chosen, error = wanted
        for lease in await store.lease(QUEUE, 10, 30.0):
            name = name_of(lease.message)
            if name in chosen:
                await fail(store, lease, error)
            else:
                await store.settle([Settlement(lease=lease, action=SettleAction.RELEASE)])

    async def changing(queue: str, selection: Selection) -> int:
        if not counts:
            await run_again("letter-1", "ValueError: another one")
        before = set(await names(store, State.FAILED))
        count = await change(queue, selection)
        changed = before - set(await names(store, State.FAILED))
        assert len(changed) == count
        counts.update(changed)
        counts["calls"] += 1
        if act == "requeue":
            await fail_ready(*changed, "ConnectionError: it was refused again")
        return count

    monkeypatch.setattr(store, act, changing)
    matching = MessageFilter(error="refused")
    if act == "requeue":
        total = (await requeue_matching(store, JobSource(Tasks("memory://unused"), None), QUEUE, matching)).count
    else:
        total = await remove_matching(store, QUEUE, matching)
    # Letter 1 is skipped if it was looked at before it ran, and else because it failed after the start.
    assert total == 1
    assert counts["bytes-1"] == 1
    assert counts["letter-1"] == 0
    errors = {name_of(m.message): m.error for m in await list_messages(store, QUEUE, Query(State.FAILED))}
    assert errors["letter-1"] == "ValueError: another one"
    assert ("bytes-1" in errors) == (act == "requeue")


async def test_groups_count_the_failures_of_a_queue(store: Backend) -> None:
    groups = await count_groups(store, QUEUE, MessageFilter())
    assert sum(one.count for one in groups) == len(FAILED)
    first = groups[0]
    assert first.group is not None
    assert first.group == make_group("resize", FAILED["picture-2"][1])
    assert (first.group.error_type, first.group.error) == (
        "FileNotFoundError",
        "FileNotFoundError: [Errno #] No such file or directory: '...'",
    )
    (example,) = await store.find(QUEUE, [first.example])
    assert name_of(example.message) in {"picture-1", "picture-2"}
    assert first.count == 2
    assert first.first_at is not None
    assert first.last_at is not None
    assert first.first_at <= first.last_at == example.finished_at
    assert {one.group.code for one in groups if one.group} == {"error", "timeout", "poison", "cancelled"}
    (timeouts,) = await count_groups(store, QUEUE, MessageFilter(codes=("timeout",)))
    assert (timeouts.count, timeouts.first_at) == (1, timeouts.last_at)


async def test_the_end_of_a_filter_is_the_last_failure_or_an_earlier_one_that_was_given(store: Backend) -> None:
    last = max(m.finished_at or 0.0 for m in await list_messages(store, QUEUE, Query(State.FAILED)))
    assert (await until_now(store, QUEUE, MessageFilter())).until == last
    assert (await until_now(store, QUEUE, MessageFilter(until=last + 5))).until == last
    assert (await until_now(store, QUEUE, MessageFilter(until=last - 5))).until == last - 5
    await store.remove(QUEUE, Selection(state=State.FAILED))
    nothing = await until_now(store, QUEUE, MessageFilter())
    assert [page async for page in browse_matching(store, QUEUE, State.FAILED, nothing)] == []


# -- groups ------------------------------------------------------------------------------------------------------------

_VALUES = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda number: f"{number:.3f}"),
    st.uuids().map(str),
    st.integers(0, 2**64).map(lambda number: f"0x{number:012x}"),
    st.binary(min_size=8, max_size=32).map(lambda raw: "0" + raw.hex()),
    st.from_regex(r"[0-9][0-9A-Za-z]{20}", fullmatch=True),
    st.just("20261121071038_123456789_4242_7f3a9b21"),
)
_WORDS = st.lists(st.sampled_from(["host", "can't", "don't", "open", "row", "of", "(errno", "=", "port:"]), max_size=5)


@given(before=_WORDS, after=_WORDS, values=st.lists(_VALUES, min_size=2, max_size=2), quoted=st.booleans())
def test_errors_that_differ_in_values_are_one_group_and_in_words_two(
    before: list[str], after: list[str], values: list[str], quoted: bool
) -> None:
    def error(value: str, *more: str) -> str:
        shown = f"'{value}'" if quoted else value
        return "ValueError: " + " ".join([*before, shown, *after, *more])

    first, second = (make_group("t", error(value)) for value in values)
    if "20261121071038_123456789_4242_7f3a9b21" not in values or quoted or values[0] == values[1]:
        assert first == second
    assert not any(digit.isdecimal() for digit in first.error)
    assert make_group("t", TRACEBACK + error(values[1])).key == second.key
    text = error(values[0])
    others = [("t", error(values[0], "else")), ("u", text), (None, text), ("t", f"code: timeout\n{text}")]
    assert first.key not in {make_group(*other).key for other in others}


@given(st.none() | st.text(), st.none() | st.text())
def test_any_error_has_a_group_without_digits_in_one_short_line(task: str | None, error: str | None) -> None:
    group = make_group(task, error)
    assert group == make_group(task, error)
    assert len(group.error) <= 1000
    assert len(group.error.splitlines()) <= 1
    assert not set(group.error) & set("0123456789")
    assert len(group.key) == 10


def test_a_group_has_the_same_key_in_every_release() -> None:
    """Dashboards keep links to groups, and scripts their keys."""
    assert PICTURES == "3dd323b8b0"
    assert LETTERS == "97ee87619c"


def test_errors_without_a_pattern_are_counted_in_bounded_memory() -> None:
    groups = GroupedFailures(GroupCounts, 2)
    for at, word in enumerate(["a", "b", "b", "c", "d", "a"]):
        message = Message(id=f"m{at}", queue=QUEUE, body=b"x")
        stored = StoredMessage(message=message, state=State.FAILED, finished_at=float(at), error=word)
        groups.add(group_of(stored), stored)
    found = [(one.group and one.group.error, one.count, one.example) for one in groups.largest()]
    assert found == [("a", 2, "m5"), ("b", 2, "m2"), (None, 2, "m4")]


@pytest.mark.parametrize("arguments", [{"codes": ("oops",)}, {"error": ""}])
def test_a_filter_that_can_match_nothing_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        MessageFilter(**arguments)  # type: ignore[arg-type]
    assert isinstance(caught.value, QworkerError)
