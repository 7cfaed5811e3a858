"""Priorities: names of `file:` that sort by priority, and the order of the messages, also when workers are killed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker import bulk
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.errors import UsageError
from qworker.kit.directory.window import Window
from qworker.message import Draft, Lease, SettleAction, Settlement
from qworker.names import new_id, new_ids
from qworker.testing import FakeClock
from qworker.tools.explain import explain
from qworker_file.names import DELIMITERS, given_id, hold_end_ms, item_name, parse_id, parse_item, stem_for, with_tries
from tests.support.waiting import give_turns

# The full sizes are 10,000 and 100,000.
MIXED = int(os.environ.get("QWORKER_TEST_MIXED", "1000"))
WAITING = int(os.environ.get("QWORKER_TEST_WAITING", "2000"))

PRIORITIES = st.integers(0, 9)
TEXTS = st.text(st.one_of(st.sampled_from(DELIMITERS + "%/.~-\0é"), st.characters(exclude_categories=["Cs"])))

# Leases in batches of 50 and settles them, until it is empty. It prints each lease, and is killed with leases in hand.
WORKER = """
import asyncio, os, signal, sys
from qworker.backend.registry import open_backend
from qworker.message import SettleAction, Settlement

async def main(url, lives):
    backend = open_backend(url)
    await backend.reap("q")
    while leases := await backend.lease("q", 50, 60.0):
        for lease in leases:
            os.write(1, f"{lease.message.priority} {lease.message.body.decode()}\\n".encode())
        lives -= 1
        if not lives:
            os.kill(os.getpid(), signal.SIGKILL)
        assert not await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    await backend.aclose()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def bodies(leases: list[Lease]) -> list[bytes]:
    return [lease.message.body for lease in leases]


# -- names -------------------------------------------------------------------------------------------------------------


@given(PRIORITIES, st.lists(TEXTS), st.integers(0, 99))
def test_an_item_with_a_priority_is_read_as_it_was_named(priority: int, arguments: list[str], tries: int) -> None:
    message_id = new_id()
    name = item_name(message_id, tries, arguments, priority)
    assert not {"/", "\0"} & set(name)
    for changed, expected in ((name, tries), (with_tries(name, 7), 7)):
        item = parse_item(changed)
        assert item is not None
        assert (item.id, item.priority, item.tries, list(item.arguments)) == (message_id, priority, expected, arguments)
        assert parse_id(changed) == message_id


@given(PRIORITIES, st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", fullmatch=True))
def test_an_item_with_a_priority_keeps_a_given_id_and_its_hold(priority: int, message_id: str) -> None:
    name = item_name(stem_for(message_id, new_id(), 1_764_190_000_000), 2, ("a~b",), priority)
    item = parse_item(name)
    assert item is not None
    assert (item.id, item.is_own, item.priority) == (message_id, True, priority)
    assert (given_id(name), parse_id(name), hold_end_ms(name)) == (message_id, message_id, 1_764_190_000_000)


def test_names_sort_by_priority_and_then_by_age() -> None:
    names = [item_name(new_id(), 0, priority=priority) for _ in range(3) for priority in range(10)]
    items = [item for name in sorted(names) if (item := parse_item(name)) is not None]
    assert [item.priority for item in items] == [priority for priority in range(9, -1, -1) for _ in range(3)]
    for one, other in pairwise(items):
        assert one.priority > other.priority or one.id < other.id


# -- the order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["memory", "file"])
async def test_a_priority_that_does_not_exist_is_refused(scheme: str, tmp_path: Path) -> None:
    backend = open_backend({"memory": "memory:none", "file": f"file://{tmp_path}/spool"}[scheme])
    for priority in (10, -1, 1.5):
        with pytest.raises(UsageError, match="priority must be "):
            await backend.publish("q", [Draft(body=b"good"), Draft(body=b"x", priority=priority)])  # type: ignore[arg-type]
    await backend.publish("q", [Draft(body=b"only")])
    assert bodies(await backend.lease("q", 9, 60.0)) == [b"only"]
    await backend.aclose()


def test_messages_run_in_the_order_of_their_priorities_whatever_is_killed(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool?sync=off"
    drafts = [Draft(body=b"%d" % number, priority=random.randrange(10)) for number in range(MIXED)]

    async def publish() -> None:
        backend = open_backend(url)
        await backend.publish("q", drafts)
        await backend.aclose()

    asyncio.run(publish())
    seen: list[str] = []
    for lives in (1, 9, 0):
        worker = subprocess.run([sys.executable, "-c", WORKER, url, str(lives)], capture_output=True, check=not lives)
        leased = worker.stdout.decode().splitlines()
        priorities = [int(line[0]) for line in leased]
        # What the last worker held returns with its priority.
        assert priorities == sorted(priorities, reverse=True)
        seen += leased
    assert set(seen) == {f"{draft.priority} {draft.body.decode()}" for draft in drafts}
    assert len(seen) == MIXED + 2 * 50, "only what a killed worker held runs again"


async def test_a_message_with_a_priority_starts_next_whatever_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a worker that has its own run of names, and in one that has listed the queue before."""
    # A busy worker looks for new names after this time, until it has seen a priority.
    monkeypatch.setattr("qworker_file.open_queue._LOOK", 0.0)
    url = f"file://{tmp_path}/spool?sync=off"
    publisher, one, other = (open_backend(url) for _ in range(3))
    for _ in range(4):
        await publisher.publish("q", [Draft(body=b"low") for _ in range(WAITING // 4)])
    assert bodies(await one.lease("q", 20, 60.0)) == [b"low"] * 20
    # The second worker collides with the first one, and takes a run of names at a distance.
    assert bodies(await other.lease("q", 20, 60.0)) == [b"low"] * 20
    for backend in (one, other):
        await publisher.publish("q", [Draft(body=b"high", priority=9), Draft(body=b"mid", priority=5)])
        await give_turns()
        assert bodies(await backend.lease("q", 3, 60.0)) == [b"high", b"mid", b"low"]
    for backend in (publisher, one, other):
        await backend.aclose()


def test_a_run_of_names_ends_with_its_priority_and_lets_higher_ones_pass(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    window = Window(fd, local=True)
    window.stale = False
    stems = new_ids(900)
    names = [item_name(stem, 0, priority=5 if number < 300 else 0) for number, stem in enumerate(stems)]
    gone = set(names[:6])
    for name in names:
        window.add(name)
    window.skip_taken(window.take(), lambda name: name not in gone)
    run = [window.take() for _ in range(10)]
    assert {name[0] for name in run} == {DELIMITERS[5]}
    urgent = [item_name(new_id(), 0, priority=priority) for priority in (7, 9, 7)]
    for name in [*urgent, urgent[0]]:
        window.add(name)
    assert [window.take() for _ in range(3)] == sorted(urgent)
    # Another worker has taken the last one: this one keeps its run.
    window.skip_taken(sorted(urgent)[-1], lambda _name: False)
    assert window.first() is not None
    assert window.take() > run[-1]
    os.close(fd)


def test_more_names_ahead_of_a_run_than_a_window_holds_are_left_to_the_next_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qworker.kit.directory.window.SIZE", 20)
    monkeypatch.setattr("random.randrange", lambda _most: 0)
    fd = os.open(tmp_path, os.O_RDONLY)
    window = Window(fd, local=True)
    window.stale = False
    low = [item_name(stem, 0) for stem in new_ids(10)]
    for name in low:
        window.add(name)
    # The others are all in the run of this worker.
    window.skip_taken(window.take(), lambda name: name not in low[:2])
    urgent = [item_name(stem, 0, priority=9) for stem in new_ids(60)]
    for name in urgent:
        window.add(name)
    assert [window.take() for _ in range(len(window))] == urgent[:20]
    assert window.is_exhausted
    os.close(fd)


async def test_a_bulk_write_is_taken_in_the_order_of_priorities(tmp_path: Path) -> None:
    backend = open_backend(f"file://{tmp_path}/spool?sync=off")
    await backend.publish("q", [Draft(body=b"before"), Draft(body=b"before 5", priority=5)])
    writer = bulk.open(backend, "q", "a_load")
    drafts = [Draft(body=b"%d" % row, priority=row % 3 * 4, task="a_task") for row in range(6)]
    await writer.commit(0, [await writer.stage("r1", 0, "a", [drafts])])
    leases = await backend.lease("q", 99, 60.0)
    assert bodies(leases) == [b"2", b"5", b"before 5", b"1", b"4", b"before", b"0", b"3"]
    assert leases[0].message.id == bulk.message_id("a_load", 0, 0, 2)
    await backend.aclose()


# -- explain -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[FakeClock], Backend]:
    url = {"memory": f"memory:{tmp_path.name}", "file": f"file://{tmp_path}/spool"}[request.param]
    return lambda clock: open_backend(url, clock=clock)


async def test_explain_counts_the_messages_with_a_higher_priority(store: Callable[[FakeClock], Backend]) -> None:
    clock = FakeClock()
    backend = store(clock)
    await backend.publish("q", [Draft(body=b"") for _ in range(29)])
    await backend.publish("q", [Draft(body=b"", id="it")])
    await backend.publish("q", [Draft(body=b"", priority=3) for _ in range(12)])
    found = await explain(backend, "q", "it", clock=clock)
    assert found.reasons[0].text == "it is ready. There are 41 messages ahead of it: 12 with a higher priority."
    leases = await backend.lease("q", 12, 60.0)
    await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    found = await explain(backend, "q", "it", clock=clock)
    assert found.reasons[0].text == "it is ready. There are 29 messages ahead of it."
    await backend.aclose()
