"""The contract suite of commit 31528ec on today's backends: what it promised, they keep, but for `DIFFERENCES`."""

from __future__ import annotations

import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from qworker.errors import QworkerError, UsageError
from qworker.registry import open_backend
from qworker.testing.clock import FakeClock
from qworker.testing.harness import Harness
from qworker.testing.until import wait_until
from tests.servers import PROGRAMS, MovedClock, RedisHarness, RedisServer, free_port
from tests.serving import served
from tests.support.old_face import Draft, Event, OldFace, Settle, Settlement, batches_of
from tests.support.old_face import open_backend as open_old_backend
from tests.support.old_suite import load_old_suite, old_members


class Servers:
    """The servers of this module's tests, each started when the first test needs it."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self._started: dict[str, Any] = {}

    def get(self, name: str, start: Callable[[], Any]) -> Any:
        """What `start` gave."""
        if name not in self._started:
            self._started[name] = start()
        return self._started[name]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    with servers.stack:
        yield servers


def _directory(url: str) -> Callable[[Path, Servers], Harness]:
    return lambda folder, servers: Harness.fake(url.format(folder))


def _redis(program: str) -> Callable[[Path, Servers], Harness]:
    def make(folder: Path, servers: Servers) -> Harness:
        server = servers.get(
            program, lambda: servers.stack.enter_context(RedisServer(moved_clock=True, program=program))
        )
        return RedisHarness(server)

    return make


def _rfq(folder: Path, servers: Servers) -> Harness:
    def start() -> tuple[RedisServer, MovedClock]:
        server = servers.stack.enter_context(RedisServer(port=free_port(), moved_clock=True))
        return server, MovedClock()

    server, clock = servers.get("rfq", start)
    return RedisHarness(server, url=f"rfq://127.0.0.1:{server.port}/0", moved=clock)


def _mq_http(folder: Path, servers: Servers) -> Harness:
    def start() -> tuple[str, FakeClock]:
        clock = FakeClock()
        store = open_backend(f"memory://http-{secrets.token_hex(4)}", clock=clock)
        running = servers.stack.enter_context(served(store, reaps=False, body_limit=4 << 20))
        return f"mq+http://127.0.0.1:{running.port}", clock

    url, clock = servers.get("mq_http", start)
    return Harness(url, clock=clock)


STORES = {
    "memory": lambda folder, servers: Harness.fake(f"memory://old-{secrets.token_hex(4)}"),
    "file": _directory("file://{}/root"),
    "file_unsynced": _directory("file://{}/root?sync=off&keep_done=all"),
    "fsq": _directory("fsq://{}/root"),
    "fsq_host": _directory("fsq://{}/root?host=web1&sync=off&keep_done=none"),
    "mq": _directory("mq://{}/root?history=1"),
    "mq_http": _mq_http,
    "sq": _directory("sq://{}/store"),
    "vsqs": _directory("vsqs://{}/store?history=1"),
    "rfq": _rfq,
    **{program: _redis(program) for program in PROGRAMS},
}


class FaceHarness:
    """A harness of today for the suite of then."""

    def __init__(self, new: Harness) -> None:
        self.new = new
        self.url, self.clock, self.tick, self.advance = new.url, new.clock, new.tick, new.advance

    @property
    def deviations(self) -> Any:
        return self.make().deviations

    def make(self) -> OldFace:
        return OldFace(self.new.make())

    async def open(self) -> OldFace:
        return OldFace(await self.new.open())


class Difference(NamedTuple):
    """What backends do otherwise today, on purpose.

    Attributes:
        reason: why.
        otherwise: proves what they do instead, on a case of the suite.
        where: whether a store has what they do otherwise.
    """

    reason: str
    otherwise: Callable[[Any], Awaitable[None]]
    where: Callable[[Any], bool] = lambda case: True


async def no_leases_are_refused(case: Any) -> None:
    await case.publish(*[b"x"] * 5)
    assert len(await case.lease(2)) == 2
    with pytest.raises(UsageError, match=r"at least 1 \(got 0\)"):
        await case.lease(0)
    assert len(await case.lease(10)) == 3


async def a_text_that_is_not_a_position_is_refused(case: Any) -> None:
    assert await case.backend.read_history("nothing-here", None, 10) == ([], None)
    await case.backend.create(case.queue)
    case.backend.record(
        batches_of([Event(event="leased", at=1.0, queue=case.queue, id="m", task=None, worker="w", tries=0)])
    )
    (log, *_) = await wait_until(case.backend.history_parts)
    with pytest.raises(UsageError, match="is not a position"):
        await case.backend.read_history(log, "yesterday", 10)
    assert await case.backend.message_history(case.queue, "unknown") == []


# By the name of the suite's test that fails for it.
DIFFERENCES = {
    "test_no_more_than_the_limit_is_leased": Difference(
        "`lease` waits for a message, and one that may lease none would not wait: in a loop it would spin",
        no_leases_are_refused,
    ),
    "test_the_history_of_what_is_not_there_is_empty": Difference(
        "the error says in plain words that a text is not a position",
        a_text_that_is_not_a_position_is_refused,
        where=lambda case: case.backend.history.on,
    ),
}


def _with_differences(contract: Any) -> Any:
    tests = {name: _differs(getattr(contract, name), difference) for name, difference in DIFFERENCES.items()}
    return type("OldContract", (contract,), tests)


def _differs(test: Any, difference: Difference) -> Any:
    @functools.wraps(test)
    async def proved(self: Any, case: Any, **arguments: Any) -> None:
        if not difference.where(case):
            await test(self, case, **arguments)
            return
        with pytest.raises((AssertionError, QworkerError)):
            await test(self, case, **arguments)
        afresh = type(case)(case.harness, case.backend)
        await difference.otherwise(afresh)
        await afresh.backend.delete(afresh.queue)

    return proved


def _old_contract() -> Any:
    try:
        return _with_differences(load_old_suite().BackendContract)
    except AssertionError as error:
        # Here it would keep all other tests from being collected.
        why = str(error)

        class NoContract:
            def test_the_suite_is_in_this_copy_of_the_repository(self) -> None:
                pytest.fail(why)

        return NoContract


class TestOldSuite(_old_contract()):
    @pytest_asyncio.fixture(params=STORES)
    async def harness(
        self, request: pytest.FixtureRequest, tmp_path: Path, servers: Servers
    ) -> AsyncIterator[FaceHarness]:
        async with STORES[request.param](tmp_path, servers) as harness:
            yield FaceHarness(harness)


def test_the_face_has_every_member_of_the_old_contract() -> None:
    members = old_members()
    assert len(members) == 34
    assert [name for name in members if not hasattr(OldFace, name)] == []


async def test_a_detached_lease_is_found_by_its_token_in_another_process(tmp_path: Path) -> None:
    first, second = [open_old_backend(f"file://{tmp_path}/root") for _ in range(2)]
    first.detached = second.detached = True
    (message_id,) = await first.publish("q", [Draft(body=b"x")])
    (lease,) = await first.lease("q", 1, 60.0)
    await first.aclose()
    assert await second.resume("q", message_id, lease.token + 1) is None
    found = await second.resume("q", message_id, lease.token)
    assert (found.message.body, found.token) == (b"x", lease.token)
    assert await second.settle([Settlement(lease=found, how=Settle.ACK)]) == []
    assert await second.resume("q", message_id, lease.token) is None
    await second.aclose()
