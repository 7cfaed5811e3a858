from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import InvalidURL, NotSupported, PublishUncertain, QueueFull
from qworker.kit.group_commit import GroupCommit
from qworker.message import Draft, Lease, Query, SettleAction, Settlement, State
from qworker.testing.clock import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.testing.wait_until_blocked import wait_until_blocked
from qworker_vsqs import VsqsBackend
from qworker_vsqs.names import leased_name, parse
from qworker_vsqs.window import IdWindow

Open = Callable[..., VsqsBackend]
START = 1_800_000_000.0


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[VsqsBackend] = []

    def make(query: str = "", clock: FakeClock | None = None) -> VsqsBackend:
        options = {} if clock is None else {"clock": clock}
        backend = open_backend(f"vsqs://{tmp_path}/store{query}", **options)
        assert isinstance(backend, VsqsBackend)
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        await backend.aclose()


async def publish(backend: VsqsBackend, *bodies: bytes) -> list[str]:
    return await backend.publish("q", [Draft(body=body) for body in bodies])


async def take(backend: VsqsBackend, limit: int = 100, visibility: float = 1000.0) -> list[Lease]:
    return await backend.lease("q", limit, visibility)


async def end(
    backend: VsqsBackend, leases: list[Lease], how: SettleAction = SettleAction.ACK, error: str | None = None
) -> None:
    assert await backend.settle([Settlement(lease=lease, action=how, error=error) for lease in leases]) == []


def bodies(leases: list[Lease]) -> list[bytes]:
    return [lease.message.body for lease in leases]


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "store" / "q").iterdir() if path.name != ".qworker")


@given(st.integers(0, 10**20 - 1), st.none() | st.integers(0, 10**20 - 1))
def test_names_are_read_as_they_were_written(number: int, expiry: int | None) -> None:
    assert parse(str(number) if expiry is None else leased_name(number, expiry)) == (number, expiry)


@given(st.text(alphabet=st.sampled_from("0123456789.-+_ new\u0661\u00b2/\n")) | st.text())
def test_what_is_no_name_of_a_message_is_a_stranger(name: str) -> None:
    found = parse(name)
    assert found is None or name == (str(found[0]) if found[1] is None else f"{found[0]}.{found[1]}")


@given(st.lists(st.text() | st.from_regex(r"[0-9]{1,17}(\.[0-9]{1,17})?", fullmatch=True)))
def test_a_window_takes_any_listing_and_gives_its_ready_ids_in_order(listing: list[str]) -> None:
    window = IdWindow()
    window.fill(listing, 0.0)
    for name in listing:
        window.add(name)
    taken = list(iter(window.take, None))
    assert taken == sorted({found[0] for name in listing if (found := parse(name)) is not None and found[1] is None})


async def test_ids_are_microseconds_and_expiries_too(store: Open, tmp_path: Path) -> None:
    clock = FakeClock(START)
    backend = store(clock=clock)
    assert await publish(backend, b"1", b"2") == ["1800000000000000", "1800000000000001"]
    await take(backend, 1)
    ready, leased = sorted(names(tmp_path), key=len)
    assert ready == "1800000000000001"
    number, _, expiry = leased.partition(".")
    assert number == "1800000000000000"
    assert 0 <= int(expiry) - 1_800_001_000_000_000 <= 2000


async def test_unit_ms_writes_thirteen_digits(store: Open, tmp_path: Path) -> None:
    backend = store("?time_unit=ms", clock=FakeClock(START))
    assert await publish(backend, b"1") == ["1800000000000"]
    (lease,) = await take(backend)
    assert lease.message.enqueued_at == START
    (name,) = names(tmp_path)
    assert len(name) == 27
    assert 0 <= int(name.partition(".")[2]) - 1_800_001_000_000 <= 32


async def test_the_order_is_numeric(store: Open, tmp_path: Path) -> None:
    backend = store()
    await backend.create("q")
    for name in ("100", "99", "1000", "9", "007", "1_0", " 5", "5.new", "+7", "8.9.10", "README"):
        (tmp_path / "store" / "q" / name).write_bytes(name.encode())
    assert bodies(await take(backend)) == [b"9", b"99", b"100", b"1000"]


async def test_of_publishers_at_one_instant_each_gets_an_id_of_its_own(store: Open) -> None:
    clock = FakeClock(START)
    backends = [store(clock=clock) for _ in range(4)]
    found = await asyncio.gather(*[publish(backend, b"x", b"y") for backend in backends for _ in range(5)])
    ids = [one for some in found for one in some]
    assert len(set(ids)) == len(ids) == 40
    assert len(await take(backends[0])) == 40


async def test_an_id_that_a_consumer_holds_already_is_not_taken_again(store: Open, tmp_path: Path) -> None:
    backend = store(clock=FakeClock(START))
    await backend.create("q")
    (tmp_path / "store" / "q" / "1800000000000000.1900000000000000").write_bytes(b"held")
    (tmp_path / "store" / "q" / "1800000000000001.new").write_bytes(b"")
    ids = await publish(backend, b"1", b"2")
    assert ids == sorted(ids)
    assert not {"1800000000000000", "1800000000000001"} & set(ids)
    assert bodies(await take(backend)) == [b"1", b"2"]


async def test_a_full_queue_holds_its_publisher_until_there_is_room(store: Open) -> None:
    backend, other = store("?max_messages=2"), store()
    blocked = asyncio.create_task(publish(backend, b"1", b"2", b"3"))
    await wait_until(lambda: _count(other, 2))
    (lease,) = await take(other, 1)
    assert await wait_until_blocked(blocked)
    await end(other, [lease])
    assert len(await asyncio.wait_for(blocked, 30.0)) == 3
    assert bodies(await take(other)) == [b"2", b"3"]


async def _count(backend: VsqsBackend, ready: int) -> bool:
    return "q" in await backend.queues() and (await backend.stats("q")).ready == ready


async def test_a_publisher_waits_for_room_no_longer_than_its_timeout(store: Open, tmp_path: Path) -> None:
    backend = store("?max_messages=1&publish_timeout=0.05")
    await publish(backend, b"1")
    await take(backend)
    with pytest.raises(QueueFull, match="max_messages"):
        await publish(backend, b"2")
    assert len(names(tmp_path)) == 1


async def test_of_a_publish_whose_sync_failed_nothing_is_stored(
    store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = store()
    await backend.create("q")

    async def failing(self: GroupCommit, files: list[int]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(GroupCommit, "data", failing)
        with pytest.raises(PublishUncertain):
            await publish(backend, b"1")
    assert names(tmp_path) == []
    await publish(backend, b"2")
    assert bodies(await take(backend)) == [b"2"]


async def test_an_expired_lease_counts_one_try_whoever_finds_it(store: Open) -> None:
    clock = FakeClock(START)
    backends = [store(clock=clock) for _ in range(3)]
    await publish(backends[0], b"1")
    await take(backends[0], visibility=10.0)
    clock.advance(11.0)
    await asyncio.gather(*[backend.reap("q") for backend in backends])
    (lease,) = await take(backends[1])
    assert lease.message.tries == 1


async def test_a_crash_between_note_and_rename_counts_one_try(store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(START)
    backend = store(clock=clock)
    await publish(backend, b"1")
    leases = await take(backend, visibility=10.0)
    real = os.rename

    def dying(old: str, new: str, **options: int) -> None:
        if old.startswith("18"):
            raise OSError(errno.EIO, "the process dies here")
        real(old, new, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", dying)
        with pytest.raises(Exception, match="dies here"):
            await end(backend, leases, SettleAction.FAIL_TMP, "again")
    clock.advance(11.0)
    (lease,) = await take(store(clock=clock))
    assert lease.message.tries == 1


async def test_what_is_no_regular_file_is_set_aside_unopened(store: Open, tmp_path: Path) -> None:
    backend = store()
    await publish(backend, b"good")
    folder, outside = tmp_path / "store" / "q", tmp_path / "outside"
    outside.write_text("secret")
    (folder / "11").symlink_to(outside)
    (folder / "12").mkdir()
    os.mkfifo(folder / "13")
    (folder / "14").symlink_to("nowhere")
    assert bodies(await take(backend)) == [b"good"]
    failed = await list_messages(backend, "q", Query(State.FAILED))
    assert {one.message.id for one in failed} == {"11", "12", "13", "14"}
    assert all(one.error is not None and "not a regular file" in one.error for one in failed)
    assert b"secret" not in [one.message.body for one in failed]
    assert outside.read_text() == "secret"


async def test_links_and_odd_names_in_the_store_are_no_queues(store: Open, tmp_path: Path) -> None:
    backend = store()
    await backend.create("q")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "store" / "link").symlink_to(outside)
    (tmp_path / "store" / "file").write_text("x")
    (tmp_path / "store" / "a b").mkdir()
    (tmp_path / "store" / ".hidden").mkdir()
    assert await backend.queues() == ["q"]
    assert await backend.lease("link", 1, 10.0) == []
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"tries": "x"}', b"\xff" * 100, b'{"error": "\xff"}'])
async def test_an_unreadable_note_says_nothing_and_breaks_nothing(store: Open, tmp_path: Path, note: bytes) -> None:
    backend = store()
    (message_id,) = await publish(backend, b"1")
    (tmp_path / "store" / "q" / ".qworker" / "notes" / message_id).write_bytes(note)
    (lease,) = await take(backend)
    assert (lease.message.body, lease.message.tries) == (b"1", 0)
    await end(backend, [lease], SettleAction.FAIL_PERM, "no")
    assert [one.error for one in await list_messages(backend, "q", Query(State.FAILED))] == ["no"]


async def test_options_that_are_wrong_are_told_in_one_line(tmp_path: Path) -> None:
    for query in (
        "time_unit=s",
        "max_messages=0",
        "max_messages=x",
        "publish_timeout=-1",
        "publish_timeout=soon",
        "sync=1",
        "x=1",
    ):
        with pytest.raises(InvalidURL):
            open_backend(f"vsqs://{tmp_path}/store?{query}")
    for absent in ({"priority": 1}, {"unique_key": "k"}, {"id": "mine"}):
        with pytest.raises(NotSupported):
            await open_backend(f"vsqs://{tmp_path}/store").publish("q", [Draft(body=b"x", **absent)])  # type: ignore[arg-type]
