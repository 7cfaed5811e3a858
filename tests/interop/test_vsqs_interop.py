"""A queue shared live with the vsqs 0.3 package, and one that it wrote."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Query, Selection, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from tests.support.archives import unpack
from tests.support.installed import environment

FIXTURE = Path(__file__).parents[1] / "fixtures" / "vsqs.tar.gz"
PEER = Path(__file__).with_name("vsqs_peer.py")
REQUIREMENTS = ("vsqs==0.3", "watchdog>=4,<7", "setuptools<81")


@pytest.fixture(scope="session")
def peer_python() -> Path:
    """A Python with vsqs 0.3, made once per machine and shared by parallel test processes."""

    def fill(python: Path) -> None:
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, "setuptools<81", "wheel"], check=True, timeout=240)
        subprocess.run([*install, "--no-build-isolation", *REQUIREMENTS], check=True, timeout=240)

    return environment("vsqs", "\n".join((*REQUIREMENTS, sys.version)), fill)


class Peer:
    def __init__(self, python: Path, root: Path) -> None:
        self._python, self._root = python, root

    async def run(self, *arguments: object) -> list[str]:
        """Run the package to its end; the lines that it printed."""
        process = await asyncio.create_subprocess_exec(
            self._python, PEER, self._root, "work", *map(str, arguments), stdout=asyncio.subprocess.PIPE
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), 50.0)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        assert process.returncode == 0
        return output.decode().splitlines()


@pytest.fixture
def peer(peer_python: Path, tmp_path: Path) -> Peer:
    (tmp_path / "root").mkdir()
    return Peer(peer_python, tmp_path / "root")


async def consume(backend: Backend, stop: asyncio.Event) -> list[str]:
    """Lease and ack, as a worker does, until told to stop and nothing is left."""
    bodies: list[str] = []
    while True:
        leases = await backend.lease("work", 4, 60.0, 0.1)
        if not leases and stop.is_set():
            return bodies
        refused = await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
        assert refused == []
        bodies += [lease.message.body.decode() for lease in leases]


@pytest.mark.timeout(300)
async def test_both_publish_and_consume_one_queue_and_nothing_is_lost_or_doubled(peer: Peer, tmp_path: Path) -> None:
    backend = open_backend(f"vsqs://{tmp_path}/root")
    try:
        await backend.create("work")
        stop = asyncio.Event()
        ours = asyncio.create_task(consume(backend, stop))
        theirs = [asyncio.create_task(peer.run("consume", 20, 60)) for _ in range(2)]
        publishers = [asyncio.create_task(peer.run("publish", f"their{n}-", 40)) for n in range(2)]
        for number in range(80):
            await backend.publish("work", [Draft(body=b"own-%d" % number)])
        await asyncio.gather(*publishers)
        found = [line for lines in await asyncio.gather(*theirs) for line in lines]
        await wait_until(lambda: _empty(backend), timeout=40)
        stop.set()
        found += await ours
        expected = [f"own-{n}" for n in range(80)] + [f"their{p}-{n}" for p in range(2) for n in range(40)]
        assert sorted(found) == sorted(expected)
        assert await peer.run("size") == ["0"]
    finally:
        await backend.aclose()


async def _empty(backend: Backend) -> bool:
    stats = await backend.stats("work")
    return stats.ready == stats.leased == 0


@pytest.mark.timeout(300)
async def test_each_respects_the_leases_of_the_other(peer: Peer, tmp_path: Path) -> None:
    backend = open_backend(f"vsqs://{tmp_path}/root")
    try:
        first, second = await backend.publish("work", [Draft(body=b"1"), Draft(body=b"2")])
        assert await peer.run("hold", 3000) == [f"{first} 1"]
        (lease,) = await backend.lease("work", 10, 3000.0)
        assert lease.message.id == second
        assert (await backend.stats("work")).leased == 2
        assert await peer.run("size") == ["2"]
        (third,) = await peer.run("publish", "", 1)
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE)]) == []
        assert await peer.run("hold", 3000) == [f"{second} 2"]
        (lease,) = await backend.lease("work", 10, 3000.0)
        assert (lease.message.id, lease.message.body) == (third, b"0")
        assert await backend.remove("work", Selection(ids=[first, second])) == 2
        assert await peer.run("size") == ["1"]
    finally:
        await backend.aclose()


@pytest.mark.timeout(300)
async def test_an_expired_lease_of_the_package_counts_as_a_try_here(peer: Peer, tmp_path: Path) -> None:
    backend = open_backend(f"vsqs://{tmp_path}/root")
    try:
        await backend.publish("work", [Draft(body=b"1")])
        await peer.run("hold", 1)
        leases = await wait_until(lambda: backend.lease("work", 1, 60.0), timeout=30)
        assert leases[0].message.tries == 1
    finally:
        await backend.aclose()


async def test_a_queue_that_the_package_wrote_is_read_in_its_order(tmp_path: Path) -> None:
    unpack(FIXTURE, tmp_path)
    backend = open_backend(f"vsqs://{tmp_path}/vsqs")
    try:
        assert await backend.queues() == ["work"]
        stats = await backend.stats("work")
        assert (stats.ready, stats.leased) == (6, 1)
        assert [one.message.body for one in await list_messages(backend, "work", Query(State.LEASED))] == [b"body 0"]
        leases = await backend.lease("work", 100, 60.0)
        assert [lease.message.body for lease in leases] == [b"body 1", *(b"body %d" % n for n in range(3, 8))]
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
        left = sorted(path.name for path in (tmp_path / "vsqs" / "work").iterdir())
        assert left == [".qworker", "1415776871123.new", "1795249212180772.3372049212188562", "README"]
    finally:
        await backend.aclose()
