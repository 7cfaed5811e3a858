from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import structlog.testing

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import FormatTooNew, QueueNotFound
from qworker.kit.linux import boot_id
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker.testing.clock import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.testing.wait_until_blocked import wait_until_blocked
from qworker_mq.ids import new_uuids, parse_ticks
from qworker_mq.store import Store
from tests.support.immutable import make_immutable

LONG = 1000.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def backend(root: Path, clock: FakeClock) -> AsyncIterator[Backend]:
    opened = open_backend(f"mq://{root}?sync=off", clock=clock)
    await opened.open()
    yield opened
    await opened.aclose()


async def returned(backend: Backend) -> int:
    return (await backend.reap("q")).returned


async def one(backend: Backend, visibility: float = LONG) -> Lease:
    leases = await backend.lease("q", 1, visibility)
    assert len(leases) == 1
    return leases[0]


async def settled(backend: Backend, lease: Lease, how: SettleAction = SettleAction.ACK) -> bool:
    return not await backend.settle([Settlement(lease=lease, action=how)])


def move_back(root: Path, message_id: str) -> None:
    """What a foreign mover does."""
    (root / "delay" / f"q:{message_id}").rename(root / "queues" / "q" / message_id)


def test_ids_are_uuids_of_version_1_that_rise() -> None:
    ids = new_uuids(1000)
    assert all(uuid.UUID(i).version == 1 and uuid.UUID(i).variant == uuid.RFC_4122 for i in ids)
    assert [parse_ticks(i) for i in ids] == sorted(uuid.UUID(i).time for i in ids)
    assert len(set(ids)) == 1000


async def test_each_state_is_where_mq_looks_for_it(backend: Backend, root: Path) -> None:
    (message_id,) = await backend.publish("q", [Draft(body=b"\x00content")])
    assert (root / "queues" / "q" / message_id).read_bytes() == b"\x00content"
    lease = await one(backend)
    assert (root / "delay" / f"q:{message_id}").read_bytes() == b"\x00content"
    assert not (root / "queues" / "q" / message_id).exists()
    assert await settled(backend, lease)
    assert list((root / "delay").iterdir()) == []


async def test_without_daemons_a_message_waits_in_new_for_the_mover(root: Path) -> None:
    backend = open_backend(f"mq://{root}?sync=off&daemons=0")
    try:
        (message_id,) = await backend.publish("q", [Draft(body=b"x")])
        assert [path.name for path in (root / "new").iterdir()] == [f"q:{message_id}"]
        assert await backend.lease("q", 1, LONG) == []
        lease_id = (root / "new" / f"q:{message_id}").rename(root / "queues" / "q" / message_id).name
        lease = await wait_until(lambda: backend.lease("q", 1, LONG))
        assert lease[0].message.id == lease_id
        assert await settled(backend, lease[0])
        # Nor does anybody unlink.
        assert [path.name for path in (root / "remove").iterdir()] == [f"q:{message_id}"]
    finally:
        await backend.aclose()


async def test_a_foreign_mover_ends_a_lease(backend: Backend, root: Path) -> None:
    (message_id,) = await backend.publish("q", [Draft(body=b"x")])
    lease = await one(backend)
    move_back(root, message_id)
    assert backend.extend([lease], LONG) == [lease]
    assert not await settled(backend, lease)
    again = (await wait_until(lambda: backend.lease("q", 1, LONG)))[0]
    assert (again.message.tries, again.token > lease.token) == (1, True)
    assert not await settled(backend, lease)
    assert await settled(backend, again)


async def test_a_message_that_a_foreign_consumer_fetched_meanwhile_cannot_be_settled(
    backend: Backend, root: Path
) -> None:
    (message_id,) = await backend.publish("q", [Draft(body=b"x")])
    lease = await one(backend)
    path = root / "delay" / f"q:{message_id}"
    before = path.stat().st_ctime_ns

    def round_trip() -> bool:
        # The clock of change times ticks every few milliseconds.
        move_back(root, message_id)
        (root / "queues" / "q" / message_id).rename(path)
        return path.stat().st_ctime_ns != before

    await wait_until(round_trip)
    assert not await settled(backend, lease)
    assert path.exists()


async def test_what_a_foreign_consumer_fetched_returns_after_the_delay(
    backend: Backend, root: Path, clock: FakeClock
) -> None:
    (message_id,) = await backend.publish("q", [Draft(body=b"x")])
    (root / "queues" / "q" / message_id).rename(root / "delay" / f"q:{message_id}")
    assert (await backend.reap("q")).returned == 0
    clock.advance(29.0)
    assert (await backend.reap("q")).returned == 0
    clock.advance(2.0)
    assert (await backend.reap("q")).returned == 1
    assert (await one(backend)).message.tries == 1


async def test_a_file_that_is_still_written_is_not_taken(backend: Backend, root: Path) -> None:
    message_id = new_uuids(1)[0]
    with open(root / "new" / f"q:{message_id}", "wb") as file:
        file.write(b"half")
        file.flush()
        await backend.reap("q")
        assert await backend.lease("q", 1, LONG) == []
        file.write(b" and half")
    lease = (await wait_until(lambda: backend.lease("q", 1, LONG)))[0]
    assert lease.message.body == b"half and half"


async def test_a_foreign_post_wakes_a_wait(backend: Backend, root: Path) -> None:
    await backend.create("q")

    async def wait_for_work() -> list[Lease]:
        while not (leases := await backend.lease("q", 1, LONG, 600.0)):
            await asyncio.sleep(0)
        return leases

    waiting = asyncio.create_task(wait_for_work())
    assert await wait_until_blocked(waiting)
    (root / "new" / f"q:{new_uuids(1)[0]}").write_bytes(b"from outside")
    async with asyncio.timeout(40):
        assert (await waiting)[0].message.body == b"from outside"


async def test_links_pipes_and_directories_are_no_messages(backend: Backend, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"not for the queue")
    await backend.create("q")
    queue = root / "queues" / "q"
    link, pipe, folder = new_uuids(3)
    (queue / link).symlink_to(secret)
    os.mkfifo(queue / pipe)
    (queue / folder).mkdir()
    (root / "new" / f"q:{link}").symlink_to(secret)
    (root / "delay" / "q:..").mkdir()
    await backend.publish("q", [Draft(body=b"good")])
    leases = await backend.lease("q", 10, LONG)
    assert [lease.message.body for lease in leases] == [b"good"]
    failed = await list_messages(backend, "q", Query(State.FAILED))
    assert {stored.message.id for stored in failed} == {link, pipe, folder}
    assert all(stored.error and stored.message.body == b"" for stored in failed)
    assert secret.read_bytes() == b"not for the queue"


async def test_a_queue_that_is_a_link_is_not_followed(backend: Backend, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    (root / "queues" / "evil").symlink_to(outside)
    assert "evil" not in await backend.queues()
    with pytest.raises(Exception, match="cannot"):
        await backend.lease("evil", 1, LONG)
    assert [path.name for path in outside.iterdir()] == ["precious"]


async def test_peers_take_every_message_once(root: Path) -> None:
    backends = [open_backend(f"mq://{root}?sync=off&peers=2") for _ in range(3)]
    try:
        ids = await backends[0].publish("q", [Draft(body=b"x") for _ in range(60)])
        taken: list[str] = []

        async def drain(backend: Backend) -> None:
            while leases := await backend.lease("q", 3, LONG):
                taken.extend(lease.message.id for lease in leases)
                assert (
                    await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
                )

        await asyncio.gather(*map(drain, backends))
        assert sorted(taken) == sorted(ids)
    finally:
        for backend in backends:
            await backend.aclose()


async def test_a_remote_lease_of_any_length_outlives_its_process(root: Path, clock: FakeClock) -> None:
    async def opened() -> Backend:
        backend = open_backend(f"mq://{root}?sync=off", clock=clock, remote_leases=True)
        await backend.open()
        return backend

    for visibility in (30.0, 77.0):
        first = await opened()
        await first.publish("q", [Draft(body=b"x")])
        lease = await one(first, visibility)
        await first.aclose()
        second = await opened()
        assert second.remote_leases is not None
        assert (await second.reap("q")).returned == 0
        assert await second.remote_leases.find("q", lease.message.id, lease.token + 1) is None
        found = await second.remote_leases.find("q", lease.message.id, lease.token)
        assert found is not None
        assert second.extend([found], 100.0) == []
        clock.advance(90.0)
        assert (await second.reap("q")).returned == 0
        assert await settled(second, found)
        assert await second.remote_leases.find("q", lease.message.id, lease.token) is None
        await second.aclose()


HOLDER = """
import asyncio, sys
from qworker.backend.registry import open_backend
async def main():
    backend = open_backend(sys.argv[1])
    leases = await backend.lease("q", 1, 10_000.0)
    print(leases[0].message.id, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_the_lease_of_a_killed_process_is_returned_at_once(backend: Backend, root: Path) -> None:
    (message_id,) = await backend.publish("q", [Draft(body=b"x")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, f"mq://{root}", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(50):
            assert (await process.stdout.readline()).decode().strip() == message_id
        assert (await backend.reap("q")).returned == 0
        process.send_signal(signal.SIGKILL)
        await process.wait()
        # The clock stands still: it is not the expiry that returns it.
        assert await wait_until(lambda: returned(backend)) == 1
        assert (await one(backend)).message.tries == 1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_what_strangers_and_the_dead_left_behind_is_cleared(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await backend.publish("q", [Draft(body=b"x") for _ in range(3)])
    leases = await backend.lease("q", 3, LONG)
    assert await settled(backend, leases[1], SettleAction.FAIL_TMP)
    # A foreign server deletes a leased message, and a foreign reaper unlinks it.
    (root / "delay" / f"q:{ids[0]}").unlink()
    (root / "remove" / f"q:{new_uuids(1)[0]}").write_bytes(b"removed by a foreign server")
    (root / ".qworker" / "tmp" / "unfinished").write_bytes(b"half")
    (root / ".qworker" / "workers" / "1-dead").write_bytes(boot_id().encode())
    monkeypatch.setattr("qworker_mq.daemons._STRAY", -60.0)
    monkeypatch.setattr("qworker_mq.daemons._ORPHAN", -60.0)
    await backend.reap("q")
    assert {path.name for path in (root / ".qworker" / "lease").iterdir()} == {f"q:{i}" for i in ids[1:]}
    assert list((root / "remove").iterdir()) == list((root / ".qworker" / "tmp").iterdir()) == []
    assert len(list((root / ".qworker" / "workers").iterdir())) == 1
    assert await settled(backend, leases[2])


async def test_a_newer_format_is_refused_in_one_line(root: Path) -> None:
    (root / ".qworker").mkdir(parents=True)
    (root / ".qworker" / "format").write_text("2\n")
    backend = open_backend(f"mq://{root}")
    with pytest.raises(FormatTooNew, match="upgrade qworker"):
        await backend.open()
    await backend.aclose()


@pytest.mark.parametrize("record", [b"", b"{", b'{"error": "\xff"}', b'{"tries": "x"}'])
async def test_a_damaged_record_of_a_message_says_nothing_and_breaks_nothing(
    backend: Backend, root: Path, record: bytes
) -> None:
    (message_id,) = await backend.publish("q", [Draft(body=b"x")])
    (root / ".qworker" / "lease" / f"q:{message_id}").write_bytes(record)
    assert (await one(backend)).message.tries == 0


async def test_a_message_that_is_stored_meanwhile_leaves_no_file_behind(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (message_id,) = new_uuids(1)
    # Another process stores it between the two checks.
    answers = iter([False, True])
    monkeypatch.setattr(Store, "is_stored", lambda *_: next(answers))
    assert await backend.publish("q", [Draft(body=b"x", id=message_id)]) == [message_id]
    assert list((root / ".qworker" / "tmp").iterdir()) == []


async def test_a_removed_message_that_cannot_be_unlinked_keeps_no_other_and_is_reported_once(
    backend: Backend, root: Path
) -> None:
    names = [f"q:{message_id}" for message_id in new_uuids(3)]
    for name in names:
        (root / "remove" / name).write_bytes(b"x")
    stuck = root / "remove" / os.listdir(root / "remove")[0]
    make_immutable(stuck, True)
    try:
        with structlog.testing.capture_logs() as lines:
            await backend.reap("q")
        assert [path.name for path in (root / "remove").iterdir()] == [stuck.name]
        assert [(line["event"], line["file"]) for line in lines] == [("removal_failed", stuck.name)]
    finally:
        make_immutable(stuck, False)


async def test_a_due_time_with_leading_zeros_is_a_due_time(backend: Backend, root: Path, clock: FakeClock) -> None:
    now, later = new_uuids(2)
    await backend.create("q")
    due = root / ".qworker" / "due" / "q"
    (due / f"000{int((clock.time() - 1) * 1000)}.{now}").write_bytes(b"now")
    (due / f"0{int((clock.time() + 60) * 1000)}.{later}").write_bytes(b"later")
    assert (await one(backend)).message.body == b"now"
    assert (await backend.stats("q")).delayed == 1
    (delayed,) = await backend.find("q", [later])
    assert (delayed.state, delayed.message.body) == (State.DELAYED, b"later")
    clock.advance(61.0)
    assert (await one(backend)).message.body == b"later"
    assert os.listdir(due) == []


async def test_the_files_of_workers_from_before_a_reboot_are_removed(backend: Backend, root: Path) -> None:
    old = root / ".qworker" / "workers" / "1-0123456789ab"
    old.write_text("00000000-0000-0000-0000-000000000000")
    await backend.reap("q")
    assert not old.exists()


@pytest.mark.parametrize("daemons", [0, 1])
@pytest.mark.parametrize("place", ["new", "queues", "delay"])
@pytest.mark.parametrize("created", [False, True])
async def test_a_message_can_be_removed_wherever_it_is_even_if_its_queue_does_not_exist(
    root: Path, daemons: int, place: str, created: bool
) -> None:
    backend = open_backend(f"mq://{root}?sync=off&daemons={daemons}")
    try:
        await backend.open()
        message_id, other = new_uuids(2)
        name = f"q/{message_id}" if place == "queues" else f"q:{message_id}"
        if created or place == "queues":
            await backend.create("q")
        (root / place / name).write_bytes(b"x")
        (root / "delay" / f"qq:{message_id}").write_bytes(b"of another queue")
        assert await backend.remove("q", Selection(ids=[other, message_id])) == 1
        assert not (root / place / name).exists()
        assert (root / "delay" / f"qq:{message_id}").exists()
        if created or place == "queues":
            assert await backend.remove("q", Selection(ids=[message_id])) == 0
        else:
            with pytest.raises(QueueNotFound):
                await backend.remove("q", Selection(ids=[message_id]))
            # Nor was the queue created.
            assert not (root / "queues" / "q").exists()
    finally:
        await backend.aclose()


async def test_what_another_server_left_in_new_of_a_queue_that_does_not_exist_is_purged(root: Path) -> None:
    backend = open_backend(f"mq://{root}?sync=off&daemons=0")
    try:
        await backend.open()
        for message_id in new_uuids(3):
            (root / "new" / f"q:{message_id}").write_bytes(b"x")
        assert await backend.remove("q", Selection(state=State.READY)) == 3
        assert list((root / "new").iterdir()) == []
    finally:
        await backend.aclose()


@pytest.mark.parametrize("options", ["daemons=0", "peers=1", ""])
async def test_tries_rise_when_a_mover_returns_a_message_that_a_client_of_a_server_fetched(
    root: Path, options: str
) -> None:
    # The lease of a client has the length of the mover's delay, and belongs to no process.
    backend = open_backend(f"mq://{root}?sync=off&delay=30&{options}", remote_leases=True)
    try:
        await backend.open()
        await backend.create("q")
        (message_id,) = new_uuids(1)
        (root / "queues" / "q" / message_id).write_bytes(b"x")
        for tries in range(3):
            (lease,) = await wait_until(lambda: backend.lease("q", 1, 30.0))
            assert lease.message.tries == tries
            move_back(root, message_id)
        (lease,) = await wait_until(lambda: backend.lease("q", 1, 30.0))
        assert not await backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE)])
        # A release counts no try.
        (lease,) = await wait_until(lambda: backend.lease("q", 1, 30.0))
        assert lease.message.tries == 3
    finally:
        await backend.aclose()


async def test_two_servers_with_peers_count_the_tries_of_one_another(root: Path) -> None:
    servers = [open_backend(f"mq://{root}?sync=off&delay=30&peers=1", remote_leases=True) for _ in range(2)]
    try:
        for backend in servers:
            await backend.open()
        (message_id,) = await servers[0].publish("q", [Draft(body=b"x")])
        for tries, backend in enumerate(servers * 2):
            (lease,) = await wait_until(partial(backend.lease, "q", 1, 30.0))
            assert lease.message.tries == tries
            move_back(root, message_id)
    finally:
        for backend in servers:
            await backend.aclose()
