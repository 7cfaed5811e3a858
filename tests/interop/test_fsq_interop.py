"""A `file:` queue shared live with fsq 0.2.5, the released program."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Query, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from qworker_file.names import parse_delay
from tests.interop.fsq_peer import PATIENCE, Fsq

QUEUE = "work"


@pytest.fixture
async def backend(tmp_path: Path):
    backend = open_backend(f"file://{tmp_path}/spool")
    await backend.create(QUEUE)
    yield backend
    await backend.aclose()


@pytest.fixture
def peer(fsq: tuple[str, Path], tmp_path: Path) -> Fsq:
    return Fsq(fsq, tmp_path / "spool")


async def _take(
    backend: Backend, count: int, how: SettleAction = SettleAction.ACK
) -> list[tuple[bytes, tuple[str, ...], int]]:
    taken: list[tuple[bytes, tuple[str, ...], int]] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < count:
            leases = await backend.lease(QUEUE, count, 30.0, 0.5)
            taken += [(lease.message.body, lease.message.argv, lease.message.tries) for lease in leases]
            assert await backend.settle([Settlement(lease=lease, action=how, error="no") for lease in leases]) == []
    return taken


async def test_what_fsq_enqueues_is_taken_with_its_arguments(backend: Backend, peer: Fsq) -> None:
    for number in range(3):
        status, output = await peer.run("enqueue", QUEUE, "a_b", str(number), "c/d", body=b"from fsq")
        assert status == 0, output
    taken = await _take(backend, 3)
    assert sorted(taken) == [(b"from fsq", ("a_b", str(number), "c/d"), 0) for number in range(3)]


async def test_what_qworker_publishes_is_scanned_by_fsq(backend: Backend, peer: Fsq, tmp_path: Path) -> None:
    drafts = [Draft(body=f"body {n}\n".encode(), argv=("arg", str(n))) for n in range(5)]
    await backend.publish(QUEUE, drafts)
    out = tmp_path / "out"
    script = f'{{ cat; printf "%s|%s|%s\\n" "$1" "$2" "$FSQ_ITEM_TRIES"; }} >> {out}'
    status, output = await peer.run("scan", QUEUE, "/bin/sh", "-c", script, "sh")
    assert status == 0, output
    assert out.read_text() == "".join(f"body {n}\narg|{n}|0\n" for n in range(5))
    assert await list_messages(backend, QUEUE, Query(State.READY)) == []
    assert len(await list_messages(backend, QUEUE, Query(State.DONE))) == 5


async def test_fsq_takes_items_with_priorities_in_their_order(backend: Backend, peer: Fsq, tmp_path: Path) -> None:
    drafts = [Draft(body=b"%d" % priority, priority=priority, argv=("a_b", "c!@;", "")) for priority in range(10)]
    await backend.publish(QUEUE, drafts)
    out = tmp_path / "out"
    # The first attempt of one fails for good, and that of another for a time.
    script = (
        f'body=$(cat); printf "%s|%s|%s|%s\\n" "$body" "$1" "$2" "$FSQ_ITEM_TRIES" >> {out};'
        'test "$body" != 7 || exit 100; test "$body" != 5 || exit 111'
    )
    await peer.run("scan", "-m", "9", QUEUE, "/bin/sh", "-c", script, "sh")
    assert out.read_text() == "".join(f"{priority}|a_b|c!@;|0\n" for priority in range(9, -1, -1))
    (failed,) = await list_messages(backend, QUEUE, Query(State.FAILED))
    (retried,) = await list_messages(backend, QUEUE, Query(State.READY))
    assert [(one.message.priority, one.message.argv) for one in (failed, retried)] == [
        (7, ("a_b", "c!@;", "")),
        # fsq writes its own delimiter into the name of an item that it retries.
        (0, ("a_b", "c!@;", "")),
    ]
    assert len(await list_messages(backend, QUEUE, Query(State.DONE))) == 8


async def test_fsq_runs_retries_and_finishes_suspects(backend: Backend, peer: Fsq, tmp_path: Path) -> None:
    """A suspect has a zero in front of its tries for each death."""
    await backend.publish(QUEUE, [Draft(body=b"finished"), Draft(body=b"retried", id="order-17")])
    for _ in range(3):
        await backend.reap(QUEUE)
        leases = await backend.lease(QUEUE, 2, 30.0)
        died = [Settlement(lease=lease, action=SettleAction.FAIL_TMP, died=True) for lease in leases]
        assert len(died) == 2
        assert await backend.settle(died) == []
    await backend.reap(QUEUE)
    # fsq runs what is in queue/. A message with tries that is released is in delay/, and due: an operator moves it.
    leases = await backend.lease(QUEUE, 2, 30.0)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in leases]) == []
    assert [lease.message.deaths for lease in leases] == [3, 3]
    directory = tmp_path / "spool" / QUEUE
    released = list((directory / "delay").glob("*_0003*"))
    assert len(released) == 2
    for file in released:
        parsed = parse_delay(file.name)
        assert parsed is not None
        file.rename(directory / "queue" / parsed[1])
    out = tmp_path / "out"
    fail = 'test "$FSQ_ITEM_TRIES" -gt 3 || grep -q finished body || exit 111'
    script = f'cd {tmp_path}; cat > body; echo "$(cat body) $((10#$FSQ_ITEM_TRIES))" >> {out}; {fail}'
    _, output = await peer.run("scan", "-m", "9", QUEUE, "/bin/bash", "-c", script)
    assert out.exists(), output
    assert out.read_text().split("\n")[:-1] in (["finished 3", "retried 3"], ["retried 3", "finished 3"]), output
    (waiting,) = await backend.find(QUEUE, ["order-17"])
    assert (waiting.message.tries, waiting.message.deaths) == (4, 0)
    await peer.run("scan", "-m", "9", QUEUE, "/bin/bash", "-c", script)
    assert out.read_text().split("\n")[2:-1] == ["retried 4"]
    assert len(await list_messages(backend, QUEUE, Query(State.DONE))) == 2


async def test_fsq_and_qworker_work_on_one_queue_and_each_item_runs_once(
    backend: Backend, peer: Fsq, tmp_path: Path
) -> None:
    bodies = [f"m{n}".encode() for n in range(200)]
    await backend.publish(QUEUE, [Draft(body=body) for body in bodies])
    out = tmp_path / "out"
    script = f"{{ cat; echo; }} >> {out}"
    scanning = asyncio.ensure_future(peer.run("scan", QUEUE, "/bin/sh", "-c", script, "sh"))
    ours: list[bytes] = []

    async def take_some() -> bool:
        leases = await backend.lease(QUEUE, 3, 30.0, 0.05)
        ours.extend(lease.message.body for lease in leases)
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
        return scanning.done()

    await wait_until(take_some, PATIENCE)
    status, output = await scanning
    assert status == 0, output
    theirs = out.read_bytes().split() if out.exists() else []
    rest = [body for body, _, _ in await _take(backend, len(bodies) - len(ours) - len(theirs))]
    assert sorted([*ours, *theirs, *rest]) == sorted(bodies)
    assert ours
    assert theirs


async def test_fsq_leaves_alone_what_qworker_has_leased(backend: Backend, peer: Fsq, tmp_path: Path) -> None:
    await backend.publish(QUEUE, [Draft(body=b"leased"), Draft(body=b"ready")])
    (lease,) = await backend.lease(QUEUE, 1, 30.0)
    out = tmp_path / "out"
    assert (await peer.run("scan", QUEUE, "/bin/sh", "-c", f"cat >> {out}", "sh"))[0] == 0
    assert out.read_bytes() == b"ready"
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []


async def test_a_queue_that_is_down_is_down_for_both(backend: Backend, peer: Fsq, tmp_path: Path) -> None:
    await backend.publish(QUEUE, [Draft(body=b"x")])
    await backend.pause(QUEUE)
    await peer.run("scan", QUEUE, "/bin/sh", "-c", f"touch {tmp_path}/ran")
    assert not (tmp_path / "ran").exists()
    assert (await peer.run("up", QUEUE))[0] == 0
    assert len(await backend.lease(QUEUE, 1, 30.0)) == 1
    assert (await peer.run("down", QUEUE))[0] == 0
    await backend.publish(QUEUE, [Draft(body=b"y")])
    assert await backend.lease(QUEUE, 1, 30.0) == []
