"""Stores that the code of commit 31528ec has written, read, worked off and completed by the code of today."""

from __future__ import annotations

import base64
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from qworker import Context, Message, Tasks, bulk
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.bulk import StagedPartition
from qworker.envelope import Envelope, open_envelope
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker.parcel import unpack
from qworker.tools.explain import explain
from qworker.worker import Worker
from qworker.worker.worker_options import WorkerOptions
from tests.support.servers import PROGRAMS
from tests.support.written import (
    FOLDER,
    KEEPS_DONE,
    KINDS,
    STATES,
    Written,
    body_of,
    described,
    open_written,
    unpack_all,
)

# A store, and the server that it is on: each that is supported, and the oldest, which wrote the keys.
STORES = [*KINDS, *[f"redis on {program}" for program in PROGRAMS if program != "redis-server"]]
LOADS = ("staged", "sealed", "half", "loaded")
# Of what was written, due or leased, everything by then.
LATER = 12 * 3600.0
# What a copy of a directory cannot have: there it is the change time of a file.
UNKEPT = {"fsq": {"finished_at"}, "mq": {"finished_at"}}


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The names of fsq have the local time of their writer.
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest_asyncio.fixture(params=KINDS)
async def written(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Written]:
    async with open_written(request.param, tmp_path) as written:
        yield written


@pytest_asyncio.fixture(params=STORES)
async def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Written]:
    kind, _, program = request.param.partition(" on ")
    async with open_written(kind, tmp_path, program or "redis-server") as written:
        yield written


# -- looking -----------------------------------------------------------------------------------------------------------


async def test_written_by_31528ec_each_message_is_listed_as_it_was(anywhere: Written) -> None:
    written = anywhere
    backend = await written.open()
    assert await backend.queues() == sorted(written.queues)
    unkept = UNKEPT.get(written.kind, set())
    for queue, facts in written.queues.items():
        stats = await backend.stats(queue)
        assert {word: getattr(stats, state.word) for word, state in STATES.items()} == facts["counts"], queue
        assert stats.paused is facts["down"]
        for word, state in STATES.items():
            found = [described(one) for one in await list_messages(backend, queue, Query(state))]
            assert without(found, unkept) == without(written.messages(queue, word), unkept), (queue, word)
        for one in written.messages(queue):
            (stored,) = await backend.find(queue, [one["id"]])
            assert without([described(stored)], unkept) == without([one], unkept)


def without(rows: Sequence[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    kept = [{name: value for name, value in row.items() if name not in names} for row in rows]
    # Where it is not known when they were finished, their order is not either.
    return sorted(kept, key=lambda row: row["id"]) if names else kept


async def test_written_by_31528ec_each_message_is_explained(written: Written) -> None:
    backend = await written.open()
    for queue in written.queues:
        for one in written.messages(queue):
            found = await explain(backend, queue, one["id"], clock=written.clock)
            assert (found.id, found.state) == (one["id"], STATES[one["state"]])
            assert found.reasons
            if one["state"] == "fail":
                assert found.stored is not None
                assert found.stored.error == one["error"]
    gone = await explain(backend, "work", "20200101000000_000000000_1_nobody-00000000", clock=written.clock)
    assert gone.state is None


async def test_written_by_31528ec_the_history_is_told_as_it_was(written: Written) -> None:
    backend = await written.open()
    events: list[dict[str, Any]] = []
    for part in await backend.history.logs():
        after: str | None = None
        while True:
            found, after = await backend.history.read(part, after, 10)
            if not found:
                break
            events += [event_of(event) for event in found]
    told = written.facts["events"]
    assert {event["event"] for event in told} >= {"enqueued", "leased", "acked", "retried", "failed"}
    assert sorted(events, key=order) == sorted(told, key=order)
    for one in written.messages("told"):
        of_one = [event_of(event) for event in await backend.history.for_message("told", one["id"])]
        assert sorted(of_one, key=order) == sorted((e for e in told if e["id"] == one["id"]), key=order)


def event_of(event: Any) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(event).items() if value is not None}


def order(event: dict[str, Any]) -> tuple[str, float, str]:
    return event["id"], event["at"], event["event"]


# -- holding -----------------------------------------------------------------------------------------------------------


async def test_written_by_31528ec_a_pause_lasts_until_it_is_ended(written: Written) -> None:
    backend = await written.open()
    assert (await backend.stats("paused")).paused
    assert await backend.lease("paused", 10, 60.0) == []
    await backend.resume("paused")
    leases = await backend.lease("paused", 10, 60.0)
    assert [lease.message.body for lease in leases] == [body_of(one) for one in written.messages("paused")]


async def test_written_by_31528ec_a_dead_worker_is_known_by_its_life_sign(tmp_path: Path) -> None:
    async with open_written("file", tmp_path) as written:
        backend = await written.open()
        dead = [one["id"] for one in written.facts["held"]]
        assert sorted(dead) == sorted(one["id"] for one in written.messages("held", "leased"))
        # Long before its leases end.
        assert (await backend.reap("held")).returned == 2
        tries = {lease.message.id: lease.message.tries for lease in await backend.lease("held", 10, 60.0)}
        assert tries == {one["id"]: int(one["id"] in dead) for one in written.messages("held")}
        # Nobody can tell whether those for whom a detached process held leases have died.
        assert (await backend.reap("remote")).returned == 0


# On fsq: and sq: a lease is a lock, and ends with its process.
@pytest.mark.parametrize("written", ["file", "mq", "redis", "rfq", "vsqs"], indirect=True)
async def test_written_by_31528ec_leases_of_others_last_as_long_as_they_were_to(written: Written) -> None:
    leased = {one["id"] for one in written.messages("remote", "leased")}
    backend = await written.open()
    await backend.reap("remote")
    assert {one.message.id for one in await list_messages(backend, "remote", Query(State.LEASED))} == leased
    # One was taken for an hour, the other one extended for two.
    for hours, left in ((0.9, 2), (0.2, 1), (1.1, 0)):
        written.advance(hours * 3600.0)
        await backend.reap("remote")
        assert (await backend.stats("remote")).leased == left, hours
    tries = {lease.message.id: lease.message.tries for lease in await backend.lease("remote", 10, 60.0)}
    assert tries == {one["id"]: int(one["id"] in leased) for one in written.messages("remote")}


@pytest.mark.parametrize("written", ["file", "mq", "redis", "rfq"], indirect=True)
async def test_written_by_31528ec_a_lease_that_outlives_its_process_is_found_by_its_token(written: Written) -> None:
    backend = await written.open(remote_leases=True)
    assert backend.remote_leases is not None
    first, second = written.facts["detached"]
    assert await backend.remote_leases.find("remote", first["id"], first["token"] - 1) is None
    found = [await backend.remote_leases.find("remote", one["id"], one["token"]) for one in (first, second)]
    leases: list[Lease] = [lease for lease in found if lease is not None]
    assert [(lease.message.id, lease.token) for lease in leases] == [(o["id"], o["token"]) for o in (first, second)]
    assert backend.extend(leases, 7200.0) == []
    ends = [
        Settlement(lease=leases[0], action=SettleAction.ACK),
        Settlement(lease=leases[1], action=SettleAction.FAIL_PERM, error="no longer wanted"),
    ]
    assert await backend.settle(ends) == []
    stats = await backend.stats("remote")
    assert (stats.ready, stats.leased, stats.failed) == (1, 0, 1)
    assert await backend.remote_leases.find("remote", first["id"], first["token"]) is None


# -- publishing --------------------------------------------------------------------------------------------------------


async def test_written_by_31528ec_what_is_stored_is_not_stored_again(written: Written) -> None:
    backend = await written.open()
    known = {body_of(one): one for one in written.messages("work")}
    before = await backend.stats("work")
    again: list[tuple[Draft, str]] = []
    given = known.get(f"{written.kind} given".encode())
    if given is not None:
        again.append((Draft(body=b"again", id=given["id"]), given["id"]))
    moved = known.get(f"{written.kind} moved here".encode())
    if moved is not None:
        draft = Draft(
            body=b"again", original_id="20260102030405_000000001_1_elsewhere-00000000", enqueued_at=1767323045.0
        )
        again.append((draft, moved["id"]))
    again += [
        (Draft(body=b"again", unique_key=one["key"], priority=one["priority"]), one["id"])
        for one in known.values()
        if "key" in one
    ]
    assert again
    for draft, there in again:
        assert await backend.publish("work", [draft]) == [there]
    after = await backend.stats("work")
    assert (after.ready, after.delayed) == (before.ready, before.delayed)


# -- bulk loads --------------------------------------------------------------------------------------------------------


async def test_written_by_31528ec_a_load_goes_on_where_it_was(anywhere: Written) -> None:
    written = anywhere
    backend = await written.open()
    for queue in LOADS:
        load = written.facts["loads"][queue]
        writer = bulk.open(backend, queue, load["job"], folder=written.spool)
        sealed = await writer.sealed(0)
        half = [one.name for one in await bulk.incomplete_loads(backend, queue, folder=written.spool)]
        if queue in {"sealed", "half"}:
            assert half == [load["job"]]
            assert sealed is not None
            assert [msgspec.to_builtins(part) for part in sealed.partitions] == load["parts"]
            # Another run finds the seal, whatever it has staged itself.
            theirs = await writer.stage("run2", 0, "a", [[Draft(body=b"of another run")]])
            published = await writer.commit(0, [theirs])
        else:
            assert (half, sealed) == ([], None)
            published = await writer.commit(0, msgspec.convert(load["parts"], list[StagedPartition]))
        assert (published.name, published.step, published.rows) == (load["job"], 0, 9)
        if queue == "loaded":
            assert published.at == load["at"]
        found = [one for state in State for one in await list_messages(backend, queue, Query(state))]
        assert Counter(one.message.body.decode() for one in found) == Counter(load["bodies"])
        delayed = await list_messages(backend, queue, Query(State.DELAYED))
        assert sorted(one.message.body.decode() for one in delayed) == sorted(load["bodies"][2::3])
        if "given_ids" not in backend.deviations:
            ids = {one.message.id: one.message.body.decode() for one in found}
            assert ids == {f"{load['job']}:0:{n // 3}:{n % 3}": body for n, body in enumerate(load["bodies"])}
        assert await bulk.incomplete_loads(backend, queue, folder=written.spool) == []
        assert await writer.done(0) == published


# -- working -----------------------------------------------------------------------------------------------------------


class Run(msgspec.Struct, frozen=True, order=True):
    """What a handler was given, and how often it had failed before."""

    queue: str
    body: bytes
    fields: tuple[tuple[str, str], ...]
    tries: int
    # A stranger's file has no id of its own before its first lease.
    id: str = ""


class Crew:
    """A worker of today with the app of that day, and what it ran."""

    def __init__(self, written: Written) -> None:
        self._written = written
        self._known = {one["id"] for queue in written.queues for one in written.messages(queue)}
        self.runs: list[Run] = []
        # What another program has fetched from mq: returns after so many seconds.
        self.tasks = Tasks(written.url + ("&delay=1" if written.kind == "mq" else ""))
        self.tasks.clock = written.clock
        for name in ("note", "broken", "refused", "flaky", "slow"):
            self._register(name)
        for queue in written.queues:
            self.tasks.raw_handler(queue=queue, max_tries=100)(self._on_message)

    def _register(self, name: str) -> None:
        @self.tasks.task(name=name, queue="told", max_tries=100)
        async def on_call(ctx: Context, text: Any, deep: Any = None) -> None:
            self._ran(ctx.message)

    async def _on_message(self, message: Message) -> None:
        self._ran(message)

    def _ran(self, message: Message) -> None:
        known = message.id if message.id in self._known else ""
        fields = tuple(sorted((message.fields or {}).items()))
        self.runs.append(Run(message.queue, message.body, fields, message.tries, known))

    async def work(self, *queues: str) -> list[Run]:
        """Run everything that is ready; what ran."""
        self.runs = []
        worker = Worker(self.tasks, WorkerOptions(queues=queues, burst=True), clock=self._written.clock)
        assert await worker.run()
        assert worker.counts.acked == len(self.runs)
        return sorted(self.runs)


def runs_of(queue: str, rows: Sequence[dict[str, Any]], *, tries: int | None = None) -> list[Run]:
    """As they are to run; a lease that ended counts as a try."""
    found: list[Run] = []
    for one in rows:
        message = unpack(Message(id=one["id"], queue=queue, body=body_of(one), fields=one.get("fields")))
        before = one["tries"] + (one["state"] == "leased") if tries is None else tries
        known = "" if one["id"].startswith("x-") else one["id"]
        found.append(Run(queue, message.body, tuple(sorted((message.fields or {}).items())), before, known))
    return found


async def test_written_by_31528ec_everything_is_worked_off_once(anywhere: Written) -> None:
    written = anywhere
    backend = await written.open()
    await let_leases_end(written, backend)
    crew = Crew(written)
    open_queues = sorted(set(written.queues) - {"paused"})

    ran = await crew.work(*open_queues)
    waited = [
        run for queue in open_queues for run in runs_of(queue, written.messages(queue, "ready", "leased", "delayed"))
    ]
    assert ran == sorted(waited)
    assert (await backend.stats("paused")).ready == 2

    await backend.resume("paused")
    paused = await crew.work("paused")
    assert paused == sorted(runs_of("paused", written.messages("paused")))

    for queue in written.queues:
        stats = await backend.stats(queue)
        assert (stats.ready, stats.leased, stats.delayed) == (0, 0, 0), queue
        assert stats.failed == len(written.messages(queue, "fail"))
        if written.kind in KEEPS_DONE:
            done = {one.message.id for one in await list_messages(backend, queue, Query(State.DONE))}
            assert done >= {one["id"] for one in written.messages(queue, "done")}
            assert len(done) == len(written.messages(queue, "done")) + sum(run.queue == queue for run in ran + paused)

    await failures_run_again(written, backend, crew)
    await loads_are_completed(written, backend, crew, ran)


async def let_leases_end(written: Written, backend: Backend) -> None:
    """Time passes in the eyes of a reaper that was there all the while."""
    if written.kind == "rfq":
        # What a dead consumer of rfq's own holds is for people to return: its harvest, which is no try.
        assert written.server is not None
        with written.server.client() as client:
            assert client.lrem("rfq:foreign:nextlog", 1, written.facts["fetched"]) == 1
            client.rpush("rfq:foreign:backlog", written.facts["fetched"])
        (fetched,) = written.messages("foreign", "leased")
        fetched["state"] = "ready"
    for queue in written.queues:
        await backend.reap(queue)
    written.advance(LATER)
    for queue in written.queues:
        await backend.reap(queue)


async def failures_run_again(written: Written, backend: Backend, crew: Crew) -> None:
    """Each failed message once more, with no tries; what can never be a message fails as before."""
    failed = {queue: written.messages(queue, "fail") for queue in written.queues}
    never = [one for rows in failed.values() for one in rows if one["error"].startswith(("malformed name", "a link: "))]
    for queue, rows in failed.items():
        assert await backend.requeue(queue, Selection(state=State.FAILED)) == len(rows)
    ran = await crew.work(*sorted(written.queues))
    wanted = [
        run for queue, rows in failed.items() for run in runs_of(queue, [r for r in rows if r not in never], tries=0)
    ]
    assert ran == sorted(wanted)
    left = [one for queue in written.queues for one in await list_messages(backend, queue, Query(State.FAILED))]
    # The wording is today's; whatever was wrong is still wrong.
    causes = {"malformed name": "malformed name: ", "a link": "Too many levels of symbolic links"}
    for one, was in zip(left, never, strict=True):
        assert causes[was["error"].partition(":")[0]] in (one.error or "")


async def loads_are_completed(written: Written, backend: Backend, crew: Crew, ran: Sequence[Run]) -> None:
    """The other half of a load whose first half is done by now, and one that nobody has seen yet."""
    before = [run.body.decode() for run in ran if run.queue == "half"]
    assert 0 < len(before) < 9
    for queue in ("sealed", "half"):
        load = written.facts["loads"][queue]
        writer = bulk.open(backend, queue, load["job"], folder=written.spool)
        manifest = await writer.sealed(0)
        assert manifest is not None
        await writer.publish(manifest)
        after = [run.body.decode() for run in await crew.work(queue)]
        assert Counter(after + (before if queue == "half" else [])) == Counter(load["bodies"])


# -- what the fixtures are ---------------------------------------------------------------------------------------------


def test_written_by_31528ec_has_every_kind_of_key_and_file(tmp_path: Path) -> None:
    rows = json.loads((FOLDER / "redis.keys.json").read_text())
    kinds = {(row["key"].partition("}:")[2].partition(":")[0] or row["key"], row["type"]) for row in rows}
    strings = {(name, "string") for name in ("mark", "void")}
    hashes = {(name, "hash") for name in ("meta", "msg", "claims", "keys", "errors", "gone", "seals", "jobs")}
    sets = {(name, "zset") for name in ("sorted", "delayed", "leased", "fail", "done")}
    others = {("qworker:queues", "set"), ("stage", "set"), ("history", "stream")}
    assert kinds == strings | hashes | sets | others | {(name, "list") for name in ("ready", "wake", "stage")}

    unpack_all("file", tmp_path)
    root = tmp_path / "file"
    longest = {name for name in os.listdir(root / "foreign" / "queue") if len(os.fsencode(name)) == 255}
    assert len(longest) == 1
    assert any("detached-" in name for name in os.listdir(root / "remote" / "lease"))
    assert any(name.startswith("id-") for name in os.listdir(root / "work" / "names"))
    assert (root / "paused" / "down").exists()
    assert {path.name for path in (root).glob("*/tmp/staged/job-*")} == {"job-staged", "job-sealed", "job-half"}
    assert list(root.glob(".history/*/*.q"))


def envelopes() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "envelopes.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", envelopes(), ids=lambda row: row["body"][:40])
def test_written_by_31528ec_each_body_opens_as_it_did(row: dict[str, Any]) -> None:
    body = base64.b64decode(row["body"])
    found = open_envelope(body)
    if isinstance(found, Envelope):
        # That release had no options of a call.
        assert msgspec.to_builtins(found) == {**row["opens"], "options": None}
    elif found is not None:
        assert {"damaged": found[0]} == row["opens"]
    else:
        assert row["opens"] is None
    message = Message(id="1", queue="q", body=body)
    opened = unpack(message)
    if "unpacks" not in row:
        assert opened is message
        return
    assert {
        "body": base64.b64encode(opened.body).decode(),
        "fields": opened.fields,
        "arguments": [base64.b64encode(os.fsencode(word)).decode() for word in opened.argv],
    } == row["unpacks"]
