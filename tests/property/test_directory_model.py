"""The directory protocol: every state of a small model, and the real backend's steps against the model's."""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

import pytest

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.message import Draft, Lease, Selection, SettleAction, Settlement, State
from qworker.testing.clock import FakeClock
from qworker_file.lease import FileLease
from tests.property.directory_model import Broken, Name, Rules, World, explore, start, steps

pytestmark = pytest.mark.timeout(180)

ALL = Rules(tries=1)
SMALL = ALL._replace(failing=False)
PAIR = SMALL._replace(consumers=(0, 1), fsq=False)


def test_two_processes_and_an_fsq_share_a_message_in_every_order() -> None:
    assert explore(start(ALL), ALL) > 10_000


def test_a_message_survives_the_death_of_a_worker_at_each_step() -> None:
    rules = SMALL._replace(consumers=(0, 1))
    assert explore(start(rules, crashes=1), rules) > 10_000


def test_a_message_survives_a_lost_reply_at_each_step() -> None:
    rules = SMALL._replace(consumers=(0, 1))
    assert explore(start(rules, faults=1), rules) > 10_000


def test_a_message_survives_a_death_and_a_lost_reply_at_each_step() -> None:
    assert explore(start(PAIR, faults=1, crashes=1), PAIR) > 10_000


def test_two_messages_in_the_hands_of_the_same_workers() -> None:
    rules = PAIR._replace(expiries=1, releasing=False)
    assert explore(start(rules, 2, crashes=1, published=True), rules) > 10_000


def test_messages_of_a_load_are_leased_from_where_they_were_staged_beside_a_mover_and_an_fsq() -> None:
    rules = SMALL._replace(load=True, consumers=(0, 1))
    assert explore(start(rules, faults=1), rules) > 10_000


def test_a_load_survives_a_death_and_a_lost_reply_at_each_step() -> None:
    rules = PAIR._replace(load=True)
    assert explore(start(rules, faults=1, crashes=1), rules) > 10_000


def test_two_messages_of_a_load_become_ready_together() -> None:
    rules = PAIR._replace(load=True, expiries=1, releasing=False)
    assert explore(start(rules, 2), rules) > 1_000


def test_a_mover_that_moves_more_than_staged_files_gives_a_message_two_holders() -> None:
    rules = SMALL._replace(load=True, consumers=(0, 1), move_only_staged=False)
    with pytest.raises(Broken, match="two holders"):
        explore(start(rules), rules)


CANCELLING = PAIR._replace(cancelling=True, failing=True, expiries=1)


def test_a_message_is_either_settled_or_cancelled_in_every_order() -> None:
    assert explore(start(CANCELLING, published=True), CANCELLING) > 1_000


def test_a_cancel_next_to_a_death_and_a_lost_reply_at_each_step() -> None:
    assert explore(start(CANCELLING, faults=1, crashes=1, published=True), CANCELLING) > 10_000


def test_a_cancel_next_to_an_fsq() -> None:
    rules = CANCELLING._replace(fsq=True)
    assert explore(start(rules, published=True), rules) > 1_000


@pytest.mark.parametrize("broken", [("mark_the_cancelled", "compare_the_token"), ("compare_the_token",)])
def test_without_the_mark_and_the_token_a_cancelled_message_would_be_settled_as_well(broken: tuple[str, ...]) -> None:
    """A holder that ends its lease at the same moment would find its own target, and report success."""
    rules = CANCELLING._replace(expiries=2)._replace(**dict.fromkeys(broken, False))
    with pytest.raises(Broken, match="settled as well"):
        explore(start(rules, published=True), rules)


@pytest.mark.parametrize(
    ("rule", "counterexample"),
    [
        ("rising_expiries", "two holders"),
        ("keep_the_flock", "two holders"),
        ("reap_the_name_that_was_seen", "two holders"),
        ("look_after_an_error", "reported that has not happened"),
        # The documented residue: an fsq that stalls between open and flock for longer than a whole lease.
        ("brisk_fsq", "two holders"),
    ],
)
def test_the_search_finds_what_each_rule_prevents(rule: str, counterexample: str) -> None:
    rules = ALL._replace(**{rule: False})
    with pytest.raises(Broken, match=counterexample):
        explore(start(rules, faults=1), rules)


# -- the real backend against the model ------------------------------------------------------------------------------

CALLS = [
    "publish",
    *(
        f"{call} {worker}"
        for worker in (0, 1)
        for call in ("lease", "extend", "ack", "fail", "release", "retry", "die")
    ),
    "cancel",
    "requeue",
    "reap",
    "expire",
]
LABELS = {"extend": "extends", "ack": "acks", "fail": "fails", "release": "releases", "retry": "retries"}
# Ends that raise tries have no bound of their own here: `possible` has it.
REAL = Rules(consumers=(0, 1), expiries=100, tries=100, fsq=False, cancelling=True)
MOST_TRIES = 1
VISIBILITY = 60.0


class Seen(NamedTuple):
    """What can be seen of the one message, and what the last call said."""

    folder: str
    tries: int
    done: bool


def follow(world: World, *labels: str) -> World | None:
    """The state after some steps; None: one of them is not possible."""
    for label in labels:
        found = dict(steps(world, REAL)).get(label)
        if found is None:
            return None
        world = found
    return world


def in_the_model(world: World, call: str) -> tuple[World, bool | None]:
    """Run all steps of a call. Return whether it succeeded, or None if its caller cannot know."""
    what, _, worker = call.partition(" ")
    ways: list[tuple[str, ...]]
    if what == "publish":
        ways = [("publish: write to tmp", "publish: rename")]
    elif what == "lease":
        ways = [(f"{worker} opens and locks", f"{worker} leases")]
    elif what == "reap":
        ways = [("the reaper reads a name", "the reaper renames")]
    elif what == "expire":
        ways = [
            ("the reaper reads a name", "the reaper renames"),
            ("a lease is over", "the reaper reads a name", "the reaper renames"),
        ]
    elif what == "cancel":
        ways = [("cancel: writes the reason", "cancel: rename")]
    elif what == "requeue":
        ways = [("requeue: rename",)]
    elif what == "die":
        ways = [(f"worker {worker} dies", f"worker {worker} starts again")]
    else:
        ways = [(f"{worker} {LABELS[what]}",)]
        lost = follow(world, f"{worker} {LABELS[what]}: ENOENT", f"{worker} looks")
        if lost is not None:
            # A reaper at the same millisecond makes the very name that the retry of a stale holder would have made.
            claim, name = world.files[0].claims[int(worker)], world.files[0].name
            same = what == "retry" and claim is not None and name == Name("delay", claim.name.tries + 1)
            return lost, None if same else False
    for way in ways:
        after = follow(world, *way)
        if after is not None and what in {"reap", "expire"}:
            # The reaper is worker 0, which closes its own.
            after = follow(after, "0 closes") or after
        if after is not None:
            return after, True
    return world, False


def possible(world: World, call: str) -> bool:
    """Whether the call makes sense: only holders end leases, deaths and first publishes are made once."""
    what, _, worker = call.partition(" ")
    file = world.files[0]
    if what == "publish":
        return file.publisher == "new"
    if file.publisher == "new":
        return False
    if what == "cancel":
        return file.canceller == "idle" and file.name is not None and file.name.folder not in {"done", "fail"}
    if what == "requeue":
        return file.canceller == "told" and not file.requeued
    claim = file.claims[int(worker)] if worker else None
    if what in LABELS:
        return claim is not None and (what != "retry" or claim.name.tries < MOST_TRIES)
    if what == "lease":
        return claim is None
    if what in {"reap", "expire"}:
        return file.name is not None and file.name.tries < MOST_TRIES
    return True


def coarse(world: World) -> object:
    """What makes states differ for those who call: numbers that only rise do not."""
    file = world.files[0]
    assert file.name is None or file.name.folder != "tmp"
    claims = tuple(
        None if claim is None else (claim.name == file.name, claim.locked, claim.name.tries, claim.stale)
        for claim in file.claims
    )
    name = file.name
    held = (
        None
        if name is None or name.holder is None
        else name.holder == (name.holder[0], world.processes[name.holder[0]][1])
    )
    return file.publisher, name and (name.folder, name.tries, name.cancelled), held, claims, file.requeued


def every_call_in_every_state() -> list[tuple[str, ...]]:
    """Paths of calls that together make each call in each state of the model that calls can reach."""
    first = start(REAL, crashes=4)
    known = {coarse(first)}
    queue: deque[tuple[World, tuple[str, ...]]] = deque([(first, ())])
    paths: list[tuple[str, ...]] = []
    while queue:
        world, path = queue.popleft()
        for call in CALLS:
            if not possible(world, call) or (call.startswith("die") and not world.crashes):
                continue
            after, _ = in_the_model(world, call)
            paths.append((*path, call))
            if coarse(after) not in known:
                known.add(coarse(after))
                queue.append((after, (*path, call)))
    prefixes = {path[:end] for path in paths for end in range(1, len(path))}
    return [path for path in paths if path not in prefixes]


class Real:
    """The file backend, called as the model is."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = FakeClock()
        self.workers = [self.make(), self.make()]
        self.leases: list[Lease | None] = [None, None]

    def make(self) -> Backend:
        return open_backend(f"file://{self.root}?sync=off&keep_done=1d", clock=self.clock)

    async def call(self, call: str) -> bool:
        what, _, number = call.partition(" ")
        if what == "publish":
            return bool(await self.workers[0].publish("q", [Draft(body=b"x", id="20260101000000_000000001_1_h")]))
        if what in {"reap", "expire"}:
            # Its count is of what became ready, a retry that was due among it; what moved is seen.
            await self.workers[0].reap("q")
            if what == "expire":
                self.clock.advance(VISIBILITY * 2)
                await self.workers[0].reap("q")
            return True
        ids = Selection(ids=["20260101000000_000000001_1_h"])
        if what == "cancel":
            # The canceller is another process than both workers.
            canceller = self.make()
            found = await canceller.cancel("q", ids)
            await canceller.aclose()
            return [one.state in {State.READY, State.DELAYED, State.LEASED} for one in found] == [True]
        if what == "requeue":
            return await self.workers[0].requeue("q", ids) == 1
        return await self.work(what, int(number))

    async def work(self, what: str, number: int) -> bool:
        worker, lease = self.workers[number], self.leases[number]
        if what == "lease":
            leases = await worker.lease("q", 1, VISIBILITY)
            self.leases[number] = leases[0] if leases else None
            return bool(leases)
        if what == "die":
            # To the kernel a closed worker is a dead one: its descriptors, and so its locks, are gone.
            await worker.aclose()
            self.workers[number], self.leases[number] = self.make(), None
            return True
        assert lease is not None
        if what == "extend":
            lost = worker.extend([lease], VISIBILITY)
            if lost:
                # The next reap of this worker does that.
                assert isinstance(lease, FileLease)
                lease.close()
            self.leases[number] = None if lost else lease
            return not lost
        how = {
            "ack": SettleAction.ACK,
            "fail": SettleAction.FAIL_PERM,
            "release": SettleAction.RELEASE,
            "retry": SettleAction.FAIL_TMP,
        }[what]
        self.leases[number] = None
        return not await worker.settle([Settlement(lease=lease, action=how, error="e")])

    def seen(self, done: bool) -> Seen:
        found: list[tuple[str, int]] = []
        for folder in ("tmp", "queue", "lease", "delay", "done", "fail"):
            for name in os.listdir(self.root / "q" / folder):
                match = re.search(r"_\d{14}_\d+_\d+_[^_]*_(\d+)", name)
                if match is not None and not name.startswith("."):
                    found.append((folder, int(match[1])))
        assert len(found) == 1, f"one message has one name, not {found}"
        return Seen(*found[0], done)

    async def aclose(self) -> None:
        for worker in self.workers:
            await worker.aclose()


async def test_every_call_moves_the_files_as_the_model_says(tmp_path: Path) -> None:
    paths = every_call_in_every_state()
    assert len(paths) > 100
    for number, path in enumerate(paths):
        world = start(REAL, crashes=4)
        real = Real(tmp_path / str(number))
        try:
            for step, call in enumerate(path):
                world, done = in_the_model(world, call)
                name = world.files[0].name
                assert name is not None
                happened = await real.call(call)
                if done is None or call in {"reap", "expire"}:
                    done = happened
                expected = Seen(name.folder, name.tries, done)
                assert real.seen(happened) == expected, f"after {path[: step + 1]}"
        finally:
            await real.aclose()
