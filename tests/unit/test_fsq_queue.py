"""An fsq queue: hostile files and requests, what the lock is worth, and what a worker does with it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qworker import Retry, Tasks
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.message import Draft, Message, Query, Selection, SettleAction, Settlement, State
from qworker.testing import FakeClock, run_until_idle, wait_until
from qworker_fsq.environment import Constants
from qworker_fsq.lease import LEAST_LINGER, LINGER
from qworker_fsq.rpc.methods import RpcMethods
from tests.support.depth import DEPTH
from tests.support.immutable import make_immutable
from tests.support.waiting import wait_for

QUEUE = "q"
ITEM = "_20131005205643_0_77_host_0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
async def backend(root: Path) -> AsyncIterator[Backend]:
    backend = open_backend(f"fsq://{root}")
    await backend.create(QUEUE)
    yield backend
    await backend.aclose()


def outside(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in a folder, to be compared with what it was."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
        if "root" not in path.parts
    }


# -- hostile files ---------------------------------------------------------------------------------------------------


def plant(queue: Path, secret: Path) -> int:
    """Put a corpus of files into a queue that must fail; how many."""
    (queue / f"{ITEM}_link").symlink_to(secret)
    (queue / f"{ITEM}_dangling").symlink_to(queue / "nowhere")
    (queue / f"{ITEM}_loop").symlink_to(queue / f"{ITEM}_loop")
    (queue / f"{ITEM}_directory").mkdir()
    (queue / f"{ITEM}_folder").symlink_to(secret.parent)
    os.mkfifo(queue / f"{ITEM}_fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        # A socket's path is short.
        os.chdir(queue)
        listener.bind("_20131005205643_0_77_host_0_socket")
    for name in (
        b"stranger",
        b"%",
        b"_",
        b"_____",
        b"\xff\xfe",
        b"a\nb",
        b"-rf",
        b"_x_0_1_h_0",
        ITEM.encode() + b"_%2",
    ):
        (Path(os.fsdecode(os.fsencode(queue) + b"/" + name))).write_bytes(b"?")
    return 16


async def test_hostile_files_fail_with_a_reason_and_everything_else_flows(
    backend: Backend, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret" / "file"
    secret.parent.mkdir()
    secret.write_text("secret")
    before = outside(tmp_path)
    planted = plant(root / QUEUE / "queue", secret)
    # These are items, however they look.
    odd = ["..%2f..%2fsecret%2ffile", "..", "$(id)", "a" * 200, "\udcff", "x;y|z\n"]
    for argument in odd:
        (root / QUEUE / "queue" / f"{ITEM}_{argument}").write_bytes(b"odd")
    await backend.publish(QUEUE, [Draft(body=b"good")])
    leases = await backend.lease(QUEUE, 100, 30.0)
    assert [lease.message.body for lease in leases] == [b"odd"] * len(odd) + [b"good"]
    assert "../../secret/file" in {lease.message.argv[0] for lease in leases[:-1]}
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    failed = await list_messages(backend, QUEUE, Query(State.FAILED))
    assert len(failed) == planted
    assert all(stored.error for stored in failed)
    assert b"secret" not in {stored.message.body for stored in failed}
    assert outside(tmp_path) == before
    assert await backend.remove(QUEUE, Selection(state=State.FAILED)) == planted
    assert outside(tmp_path) == before


async def test_a_name_without_room_for_a_try_fails_and_is_not_lost(backend: Backend, root: Path) -> None:
    name = f"{ITEM[:-1]}9_" + "x" * (255 - len(ITEM) - 1)
    (root / QUEUE / "queue" / name).write_bytes(b"long")
    (lease,) = await backend.lease(QUEUE, 1, 30.0)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, error="again")]) == []
    (stored,) = await list_messages(backend, QUEUE, Query(State.FAILED))
    assert (stored.message.body, stored.error) == (b"long", "its name has no room for one more try")


async def test_a_copy_of_an_item_is_never_overwritten(backend: Backend, root: Path) -> None:
    for part, name in (("queue", ITEM), ("queue", f"{ITEM[:-1]}1"), ("fail", ITEM)):
        (root / QUEUE / part / name).write_text(f"{part} {name[-1]}")
    first, second = await backend.lease(QUEUE, 2, 30.0)
    assert await backend.settle([Settlement(lease=first, action=SettleAction.FAIL_TMP)]) == []
    (again,) = await backend.lease(QUEUE, 1, 30.0)
    assert (again.message.body, again.message.tries) == (b"queue 0", 2)
    # Enqueued once more under the name of one that failed.
    (root / QUEUE / "queue" / ITEM).write_text("new")
    (lease,) = await wait_until(lambda: backend.lease(QUEUE, 1, 30.0))
    ends = [Settlement(lease=one, action=SettleAction.FAIL_PERM) for one in (lease, again, second)]
    assert await backend.settle(ends) == []
    failed = {stored.message.body for stored in await list_messages(backend, QUEUE, Query(State.FAILED))}
    assert failed == {b"fail 0", b"new", b"queue 0", b"queue 1"}


async def test_a_full_name_is_refused_and_leaves_nothing(backend: Backend, root: Path) -> None:
    from qworker.errors import NotSupported

    with pytest.raises(NotSupported, match="255 bytes"):
        await backend.publish(QUEUE, [Draft(body=b"1"), Draft(body=b"2", argv=("x" * 250,))])
    assert [os.listdir(root / QUEUE / part) for part in ("tmp", "queue")] == [[], []]


# -- the lock --------------------------------------------------------------------------------------------------------


async def test_a_forked_child_does_not_keep_an_item_locked(backend: Backend, root: Path) -> None:
    await backend.publish(QUEUE, [Draft(body=b"x")])
    (lease,) = await backend.lease(QUEUE, 1, 30.0)
    read, write = os.pipe()
    with warnings.catch_warnings():
        # There is another thread, which syncs; the child does nothing that could wait for it.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:  # pragma: no cover - another process
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        os.close(read)
        other = open_backend(f"fsq://{root}")
        try:
            assert await other.lease(QUEUE, 1, 30.0) == []
            # As if this process had died: its descriptors are closed, and nothing is unlocked.
            os.close(lease.claimed.fd)  # type: ignore[attr-defined]
            lease.claimed.fd = -1  # type: ignore[attr-defined]
            (again,) = await wait_until(lambda: other.lease(QUEUE, 1, 30.0))
            assert again.message.id == lease.message.id
        finally:
            await other.aclose()
    finally:
        os.close(write)
        os.waitpid(pid, 0)


async def test_an_item_that_a_person_moved_is_lost_to_its_worker(backend: Backend, root: Path) -> None:
    await backend.publish(QUEUE, [Draft(body=b"1"), Draft(body=b"2")])
    moved, kept = await backend.lease(QUEUE, 2, 30.0)
    (name, _) = sorted(os.listdir(root / QUEUE / "queue"))
    os.rename(root / QUEUE / "queue" / name, root / QUEUE / "fail" / name)
    assert backend.extend([moved, kept], 30.0) == [moved]
    settlements = [Settlement(lease=lease, action=SettleAction.ACK) for lease in (moved, kept)]
    assert await backend.settle(settlements) == settlements[:1]
    assert len(os.listdir(root / QUEUE / "done")) == 1


@pytest.mark.parametrize("step", [3600.0, -3600.0])
async def test_a_step_of_the_wall_clock_ends_no_lease_early_and_keeps_none(root: Path, step: float) -> None:
    clock = FakeClock()
    backend = open_backend(f"fsq://{root}", clock=clock, remote_leases=True)
    try:
        await backend.publish(QUEUE, [Draft(body=b"x")])
        assert len(await backend.lease(QUEUE, 1, 30.0)) == 1
        clock.step(step)
        clock.advance(20)
        assert (await backend.reap(QUEUE)).returned == 0
        clock.advance(20)
        assert (await backend.reap(QUEUE)).returned == 1
    finally:
        await backend.aclose()


async def test_where_holders_are_elsewhere_a_lease_ends_by_time(root: Path) -> None:
    clock = FakeClock()
    backend = open_backend(f"fsq://{root}", clock=clock, remote_leases=True)
    assert backend.remote_leases is None, "the kernel frees the locks of a process that dies"
    try:
        await backend.publish(QUEUE, [Draft(body=b"x")])
        (lease,) = await backend.lease(QUEUE, 1, 30.0)
        clock.advance(20)
        assert backend.extend([lease], 30.0) == []
        clock.advance(20)
        assert (await backend.reap(QUEUE)).returned == 0
        clock.advance(20)
        assert (await backend.reap(QUEUE)).returned == 1
        settlement = Settlement(lease=lease, action=SettleAction.ACK)
        assert await backend.settle([settlement]) == [settlement]
        (again,) = await backend.lease(QUEUE, 1, 30.0)
        assert again.message.tries == 1
    finally:
        await backend.aclose()


async def test_an_item_that_is_put_off_is_taken_when_it_is_due_by_another_process_too(root: Path) -> None:
    clock = FakeClock()
    backend, other = (open_backend(f"fsq://{root}", clock=clock) for _ in range(2))
    try:
        await backend.publish(QUEUE, [Draft(body=b"later", delay=60.0)])
        assert await other.lease(QUEUE, 1, 30.0) == []
        (stored,) = await list_messages(other, QUEUE, Query(State.DELAYED))
        assert stored.due_at is not None
        assert abs(stored.due_at - clock.time() - 60) < 0.01
        clock.advance(61)
        assert len(await other.lease(QUEUE, 1, 30.0)) == 1
    finally:
        await backend.aclose()
        await other.aclose()


async def test_limits_of_the_url_fail_what_used_them_up(root: Path) -> None:
    clock = FakeClock()
    backend = open_backend(f"fsq://{root}?max_tries=2&ttl=600", clock=clock)
    try:
        await backend.publish(QUEUE, [Draft(body=b"tries"), Draft(body=b"ttl", enqueued_at=clock.time() - 500)])
        for _ in range(2):
            (lease,) = [one for one in await backend.lease(QUEUE, 9, 30.0) if one.message.body == b"tries"]
            assert await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, error="no")]) == []
        await backend.aclose()
        clock.advance(200)
        assert await backend.lease(QUEUE, 9, 30.0) == []
        failed = {
            stored.message.body: stored.error for stored in await list_messages(backend, QUEUE, Query(State.FAILED))
        }
        assert failed == {b"tries": "no\n\nMax tries exceeded: 2 (2)", b"ttl": "TTL Expired: 600"}
    finally:
        await backend.aclose()


# -- a worker --------------------------------------------------------------------------------------------------------


async def test_a_worker_runs_tasks_and_raw_items_with_their_arguments(root: Path) -> None:
    tasks = Tasks(f"fsq://{root}")
    seen: list[object] = []

    @tasks.task(queue="sums")
    async def add(a: int, b: int) -> int:
        seen.append(a + b)
        return a + b

    @tasks.raw_handler(queue="inbox")
    async def on_item(message: Message) -> None:
        seen.append((message.body, message.argv, message.tries))
        if message.tries < 2:
            raise Retry(delay=0)

    await add.enqueue(1, 2)
    backend = await tasks.backend()
    await backend.publish("inbox", [Draft(body=b"hello", argv=("a_b", "c/d"))])
    await run_until_idle(tasks)
    expected = [3, *[(b"hello", ("a_b", "c/d"), tries) for tries in range(3)]]
    assert sorted(map(str, seen)) == sorted(map(str, expected))
    assert [len(os.listdir(root / queue / "done")) for queue in ("sums", "inbox")] == [1, 1]


# -- scan on any backend ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["file", "vsqs", "fsq"])
def test_any_program_is_a_handler_on_any_backend(
    scheme: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("QWORKER_", "FSQ_"))]:
        monkeypatch.delenv(name)
    url = f"{scheme}://{tmp_path}/root"
    for body in ("done", "again", "bad"):
        assert main(["publish", url, QUEUE, "--body", body]) == 0
    script = 'b=$(cat); echo "$b $FSQ_ITEM_TRIES $1"; case $b in done) exit 0;; again) exit 111;; *) exit 7;; esac'
    capfd.readouterr()
    assert main(["scan", "-m", "2", url, QUEUE, "sh", "-c", script, "sh", "own"]) == 0
    assert capfd.readouterr().out == "done 0 own\nagain 0 own\nbad 0 own\n"
    assert main(["scan", "-m", "2", url, QUEUE, "sh", "-c", script, "sh", "own"]) == 0
    out, err = capfd.readouterr()
    assert out == "again 1 own\n"
    assert "Max tries exceeded: 2 (2)" in err
    assert main(["stats", url, QUEUE, "--json"]) == 0
    stats: dict[str, Any] = json.loads(capfd.readouterr().out)
    found = stats if "ready" in stats else stats[0]
    assert (found["ready"], found["failed"]) == (0, 2)
    assert main(["pause", url, QUEUE]) == 0
    assert main(["scan", url, QUEUE, "true"]) == 111
    assert main(["scan", url, "absent", "true"]) == 111
    assert main(["scan", url, QUEUE]) == 100
    assert main(["scan", "nothing://x", QUEUE, "true"]) == 100
    if scheme != "fsq":
        assert main(["scan", "-a", url, QUEUE, "true"]) == 100


# -- jsonrpcd --------------------------------------------------------------------------------------------------------


@pytest.fixture
def methods(root: Path) -> RpcMethods:
    for part in ("tmp", "queue", "done", "fail"):
        (root / QUEUE / part).mkdir(parents=True)
    return RpcMethods(str(root), Constants())


def ask(methods: RpcMethods, method: str, *params: object) -> dict[str, Any]:
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)}
    found: dict[str, Any] = json.loads(methods.answer(json.dumps(request).encode()))
    return found


HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc/passwd",
    "a\0b",
    "x" * 300,
    ".hidden",
    "stranger",
    f"{ITEM}_%",
    "é",
    "\ud800",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
METHODS = st.sampled_from(
    ["enqueue", "trigger_pull", "is_down", "api_version", "system.listMethods", "system.methodHelp", "x"]
)


def test_hostile_pushes_reach_nothing(methods: RpcMethods, root: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    before = outside(tmp_path)
    for name in HOSTILE:
        assert "error" in ask(methods, "enqueue", name, QUEUE, "data")
        assert "error" in ask(methods, "enqueue", ITEM, name, "data")
        assert "error" in ask(methods, "trigger_pull", QUEUE, True, name)
        assert "error" in ask(methods, "is_down", name)
    assert outside(tmp_path) == before
    assert [os.listdir(root / QUEUE / part) for part in ("tmp", "queue")] == [[], []]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150 * DEPTH)
@given(request=st.one_of(st.binary(), JSON, st.fixed_dictionaries({"method": METHODS, "params": JSON, "id": JSON})))
def test_any_request_has_an_answer(methods: RpcMethods, root: Path, request: object) -> None:
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    answer = methods.answer(body)
    if answer:
        assert isinstance(json.loads(answer), dict | list)
    assert sorted(os.listdir(root)) == [QUEUE]


def test_an_item_that_is_pushed_twice_is_there_once(methods: RpcMethods, root: Path) -> None:
    for _ in range(2):
        assert ask(methods, "enqueue", f"{ITEM}_é", QUEUE, "dätä")["result"] == f"{ITEM}_é"
    (name,) = os.listdir(root / QUEUE / "queue")
    assert name == f"{ITEM}_é"
    assert (root / QUEUE / "queue" / name).read_text() == "dätä"
    assert stat.S_IMODE((root / QUEUE / "queue" / name).stat().st_mode) & ~0o640 == 0
    assert os.listdir(root / QUEUE / "tmp") == []


@pytest.mark.parametrize("body", [b"", b"{", b'"\xff"', b"[" * 100_000], ids=["empty", "torn", "not text", "deep"])
def test_a_request_that_is_no_json_is_answered(methods: RpcMethods, body: bytes) -> None:
    assert json.loads(methods.answer(body))["error"]["code"] == -32700


def test_batches_notifications_and_the_older_form_are_understood(methods: RpcMethods) -> None:
    old = json.loads(methods.answer(b'{"id": 5, "method": "api_version", "params": []}'))
    assert old == {"id": 5, "result": "1.0", "error": None}
    assert methods.answer(b'{"jsonrpc": "2.0", "method": "api_version"}') == b""
    many = json.loads(
        methods.answer(b'[{"jsonrpc": "2.0", "id": 1, "method": "is_down", "params": {"queue": "q"}}, 7]')
    )
    assert many[0] == {"jsonrpc": "2.0", "id": 1, "result": False}
    assert many[1]["error"]["code"] == -32600
    assert "enqueue" in ask(methods, "system.listMethods")["result"]


def test_jsonrpcd_listens_beyond_this_machine_only_when_told(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root.mkdir()
    assert main(["fsq", "jsonrpcd", f"fsq://{root}", "0.0.0.0", "0"]) == 100
    assert "QWORKER_HTTP_TOKEN" in capfd.readouterr().err


# -- a move ----------------------------------------------------------------------------------------------------------


async def test_a_message_that_is_moved_here_twice_is_stored_once_and_keeps_its_old_id(backend: Backend) -> None:
    drafts = [
        Draft(body=b"%d" % n, original_id=f"old-{n}", enqueued_at=1_600_000_000.25, tries=n, argv=("a",))
        for n in range(3)
    ]
    ids = await backend.publish(QUEUE, drafts)
    assert len(set(ids)) == 3
    first, second, third = await backend.lease(QUEUE, 3, 30.0)
    assert {lease.message.original_id for lease in (first, second, third)} == {"old-0", "old-1", "old-2"}
    ends = [
        Settlement(lease=first, action=SettleAction.ACK),
        Settlement(lease=second, action=SettleAction.FAIL_TMP),
        Settlement(lease=third, action=SettleAction.FAIL_PERM),
    ]
    assert await backend.settle(ends) == []
    # Wherever it is by now.
    assert await backend.publish(QUEUE, drafts) == ids
    stats = await backend.stats(QUEUE)
    assert (stats.ready, stats.failed, stats.done) == (1, 1, 1)
    (failed,) = await list_messages(backend, QUEUE, Query(State.FAILED))
    assert failed.message.original_id == third.message.original_id


# -- many items ------------------------------------------------------------------------------------------------------

CONSUMER = """
import asyncio, os, sys
from qworker.backend.registry import open_backend
from qworker.message import SettleAction, Settlement

async def consume(url, ledger):
    backend = open_backend(url)
    while True:
        for lease in await backend.lease("q", 5, 30.0, 0.2):
            os.write(ledger, lease.message.body + b"\\n")
            await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)])

asyncio.run(consume(sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)))
"""


@pytest.mark.timeout(120)
async def test_workers_that_are_killed_lose_nothing_and_finish_everything_once(
    backend: Backend, root: Path, tmp_path: Path
) -> None:
    count, kills, ledger = 400, 6, tmp_path / "ledger"
    bodies = [b"%d" % n for n in range(count)]
    await backend.publish(QUEUE, [Draft(body=body) for body in bodies])
    ledger.touch()
    command = [sys.executable, "-c", CONSUMER, f"fsq://{root}?sync=off", str(ledger)]

    def ran() -> list[bytes]:
        return ledger.read_bytes().split()

    def finished() -> int:
        return len(os.listdir(root / QUEUE / "done"))

    workers = [subprocess.Popen(command) for _ in range(2)]
    try:
        for kill in range(kills):
            mark = (kill + 1) * count // (kills + 2)
            await wait_until(lambda mark=mark: len(ran()) >= mark, 60.0)
            workers[kill % 2].kill()
            workers[kill % 2].wait()
            workers[kill % 2] = subprocess.Popen(command)
        await wait_until(lambda: finished() == count, 60.0)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert sorted(set(ran())) == sorted(bodies)
    # At most what was being worked on at a kill ran again.
    assert len(ran()) <= count + kills
    assert [os.listdir(root / QUEUE / part) for part in ("queue", "tmp", "fail")] == [[], [], []]


async def test_no_directory_is_listed_for_each_message(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = 0
    scandir = os.scandir

    def counted(*arguments: Any) -> Any:
        nonlocal listings
        listings += 1
        return scandir(*arguments)

    await backend.publish(QUEUE, [Draft(body=b"x") for _ in range(300)])
    monkeypatch.setattr(os, "scandir", counted)
    done = 0
    while done < 600:
        leases = await backend.lease(QUEUE, 1, 30.0)
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
        done += len(leases)
        if done < 301:
            await backend.publish(QUEUE, [Draft(body=b"x")])
    assert listings <= 3


async def test_what_is_put_off_does_not_hide_what_is_ready(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qworker.kit.directory import window

    monkeypatch.setattr(window, "SIZE", 10)
    await backend.publish(QUEUE, [Draft(body=b"later", delay=600.0) for _ in range(60)])
    await backend.publish(QUEUE, [Draft(body=b"now") for _ in range(30)])
    taken: list[bytes] = []
    for _ in range(20):
        taken += [lease.message.body for lease in await backend.lease(QUEUE, 7, 30.0)]
    assert taken == [b"now"] * 30


async def test_a_scan_goes_on_after_an_item_that_cannot_be_moved(
    backend: Backend, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await backend.publish("q", [Draft(body=b"%d" % number) for number in range(3)])
    stuck, *others = sorted((root / "q" / "queue").iterdir())
    make_immutable(stuck, True)
    try:
        assert await asyncio.to_thread(main, ["scan", f"fsq://{root}", "q", "cat"]) == 0
    finally:
        make_immutable(stuck, False)
    printed = capfd.readouterr()
    assert printed.out == "012"
    assert printed.err == f"{stuck.name}: it cannot be moved, so it stays in the queue: Operation not permitted\n"
    assert list((root / "q" / "queue").iterdir()) == [stuck]
    assert sorted(path.name for path in (root / "q" / "done").iterdir()) == [path.name for path in others]


async def test_an_expired_lease_of_an_item_that_cannot_be_moved_keeps_no_other_from_its_end(root: Path) -> None:
    clock = FakeClock()
    backend = open_backend(f"fsq://{root}?sync=off", clock=clock, remote_leases=True)
    await backend.publish("q", [Draft(body=b"stuck"), Draft(body=b"other")])
    stuck = min((root / "q" / "queue").iterdir())
    assert len(await backend.lease("q", 10, 30.0)) == 2
    clock.advance(31.0)
    make_immutable(stuck, True)
    try:
        assert (await backend.reap("q")).returned == 1
        assert [lease.message.body for lease in await backend.lease("q", 10, 30.0)] == [b"other"]
        assert (await backend.stats("q")).blocked == 1
    finally:
        make_immutable(stuck, False)
    await backend.aclose()


# -- programs that lock an item and do not check its name again ------------------------------------------------------


def seconds_locked(opened: int) -> float:
    """Wait until an item is unlocked that fsq opened before it was finished. The seconds since it was finished."""

    def can_lock() -> bool:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        wait_for(can_lock)
        # A rename changes it.
        return time.time() - os.fstat(opened).st_ctime
    finally:
        os.close(opened)


@pytest.mark.parametrize("how", ["scan", "worker"])
def test_an_item_that_was_finished_at_the_end_stays_locked_for_a_moment(tmp_path: Path, how: str) -> None:
    url = f"fsq://{tmp_path}/root"

    async def publish() -> None:
        backend = open_backend(url)
        await backend.publish("q", [Draft(body=b"x")])
        await backend.aclose()

    async def ack() -> None:
        backend = open_backend(url)
        (lease,) = await backend.lease("q", 1, 30.0)
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []
        await backend.aclose()

    asyncio.run(publish())
    (item,) = (tmp_path / "root" / "q" / "queue").iterdir()
    opened = os.open(item, os.O_RDONLY)
    if how == "scan":
        assert main(["scan", url, "q", "/bin/true"]) == 0
    else:
        asyncio.run(ack())
    # Its change time has the precision of the kernel's clock.
    assert seconds_locked(opened) > LEAST_LINGER - 0.02


async def test_a_finished_item_stays_locked_for_longer_while_its_worker_runs(tmp_path: Path) -> None:
    backend = open_backend(f"fsq://{tmp_path}/root")
    await backend.publish("q", [Draft(body=b"x")])
    (item,) = (tmp_path / "root" / "q" / "queue").iterdir()
    opened = os.open(item, os.O_RDONLY)
    (lease,) = await backend.lease("q", 1, 30.0)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []
    assert await asyncio.to_thread(seconds_locked, opened) > LINGER - 0.02
    await backend.aclose()
