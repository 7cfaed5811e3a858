"""An `fsq:` queue shared with the released program fsq 0.2.5: both run items in place, under one lock."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import os
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from qworker.testing.wait_until_blocked import wait_until_blocked
from tests.interop.fsq_peer import PATIENCE, Fsq
from tests.support.archives import unpack
from tests.support.waiting import work_for

QUEUE = "work"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "fsq.tar.gz"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
async def backend(root: Path) -> AsyncIterator[Backend]:
    backend = open_backend(f"fsq://{root}")
    await backend.create(QUEUE)
    yield backend
    await backend.aclose()


@pytest.fixture
def peer(fsq: tuple[str, Path], root: Path) -> Fsq:
    return Fsq(fsq, root)


async def start_qworker(*arguments: str, output: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QWORKER_", "FSQ_"))}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "qworker",
        *arguments,
        env=kept,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
    )


async def qworker(*arguments: str, **variables: str) -> tuple[int, bytes]:
    """Run a command in this process, for speed; its status and what it printed on standard error."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as printed:
        for name, value in variables.items():
            patch.setenv(name, value)
        status = await asyncio.to_thread(main, arguments)
    return status, printed.getvalue().encode()


async def qworker_process(*arguments: str) -> tuple[int, bytes]:
    """Run a real process to its end."""
    process = await start_qworker(*arguments)
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode is not None
    return process.returncode, output


async def settle(backend: Backend, lease: Lease, how: SettleAction, error: str | None = None) -> bool:
    return await backend.settle([Settlement(lease=lease, action=how, error=error)]) == []


def names(root: Path, part: str, queue: str = QUEUE) -> list[str]:
    return sorted(name for name in os.listdir(root / queue / part) if name[0] != ".")


def tree(folder: Path) -> dict[str, str]:
    """Every path below a folder, with its kind and mode."""
    return {str(path.relative_to(folder)): stat.filemode(path.lstat().st_mode) for path in folder.rglob("*")}


# -- enqueueing ------------------------------------------------------------------------------------------------------


async def test_what_fsq_enqueues_is_leased_with_its_arguments(backend: Backend, peer: Fsq, root: Path) -> None:
    expected = [("a_b", "c/d", "%25"), ("é", ""), ()]
    for arguments in expected:
        status, output = await peer.run("enqueue", QUEUE, *arguments, body=b"from fsq")
        assert status == 0, output
    leases = await backend.lease(QUEUE, 10, 30.0)
    assert {lease.message.argv for lease in leases} == set(expected)
    assert {lease.message.body for lease in leases} == {b"from fsq"}
    assert all(abs(time.time() - lease.message.enqueued_at) < 60 for lease in leases)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    assert len(names(root, "done")) == 3


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
async def test_times_are_local_to_the_host_as_fsq_writes_them(
    fsq: tuple[str, Path], backend: Backend, root: Path, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        await backend.publish(QUEUE, [Draft(body=b"ours")])
        assert (await Fsq(fsq, root).run("enqueue", QUEUE, body=b"theirs"))[0] == 0
        leases = await backend.lease(QUEUE, 2, 30.0)
        assert {lease.message.body for lease in leases} == {b"ours", b"theirs"}
        assert all(abs(time.time() - lease.message.enqueued_at) < 60 for lease in leases)
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_what_qworker_publishes_is_scanned_by_fsq(backend: Backend, peer: Fsq, root: Path) -> None:
    drafts = [Draft(body=f"body {n}\n".encode(), argv=("a_b", "c/d", "%", str(n))) for n in range(5)]
    ids = await backend.publish(QUEUE, drafts)
    assert [name.rsplit("_0_", 1)[0][1:] for name in names(root, "queue")] == ids
    out = root / "out"
    script = f'{{ cat; printf "%s|" "$@"; echo "$FSQ_ITEM_TRIES"; }} >> {out}'
    status, output = await peer.run("scan", QUEUE, "/bin/sh", "-c", script, "sh")
    assert status == 0, output
    assert out.read_text() == "".join(f"body {n}\na_b|c/d|%|{n}|0\n" for n in range(5))
    assert len(names(root, "done")) == 5
    assert [stored.message.id for stored in await list_messages(backend, QUEUE, Query(State.DONE))] == ids


# -- one lock --------------------------------------------------------------------------------------------------------


async def test_workers_scans_and_fsq_share_a_queue_and_each_item_runs_once(
    backend: Backend, peer: Fsq, root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    script = f'echo "$(cat)" >> {out}'
    ours: list[bytes] = []

    async def work() -> None:
        while len(names(root, "queue")):
            leases = await backend.lease(QUEUE, 3, 30.0, 0.02)
            ours.extend(lease.message.body for lease in leases)
            assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
            await work_for(0.002)

    await backend.publish(QUEUE, [Draft(body=b"q%d" % n) for n in range(300)])
    await peer.python(f"import fsq\nfor n in range(100): fsq.senqueue({QUEUE!r}, 'f%d' % n, 'a')")
    # One of fsq: two of them process an item twice if one stands still between its open and its lock.
    scans = [peer.run("scan", QUEUE, "/bin/sh", "-c", script, "sh")]
    scans += [qworker_process("scan", f"fsq://{root}", QUEUE, "/bin/sh", "-c", script, "sh") for _ in range(2)]
    scanning = asyncio.gather(*scans)
    # Beside a scan that has begun, so that both get some.
    await wait_until(lambda: out.exists() or scanning.done())
    async with asyncio.timeout(PATIENCE):
        await work()
        results = await scanning
    assert [status for status, _ in results] == [0] * 3, results
    theirs = out.read_bytes().split()
    assert sorted([*ours, *theirs]) == sorted([b"q%d" % n for n in range(300)] + [b"f%d" % n for n in range(100)])
    assert ours
    assert theirs
    assert len(names(root, "done")) == 400
    assert names(root, "fail") == []


async def test_each_leaves_alone_what_the_other_works_on(backend: Backend, peer: Fsq, tmp_path: Path) -> None:
    await backend.publish(QUEUE, [Draft(body=b"first"), Draft(body=b"second")])
    (lease,) = await backend.lease(QUEUE, 1, 30.0)
    gate, out = tmp_path / "gate", tmp_path / "out"
    os.mkfifo(gate)
    scanning = asyncio.create_task(peer.run("scan", QUEUE, "/bin/sh", "-c", f"cat > {out}; read x < {gate}"))
    await wait_until(lambda: out.exists() and out.read_bytes() == b"second")
    assert await backend.lease(QUEUE, 10, 30.0) == []
    stats = await backend.stats(QUEUE)
    assert (stats.ready, stats.leased) == (0, 2)
    gate.write_text("go\n")
    status, output = await scanning
    assert status == 0, output
    assert await settle(backend, lease, SettleAction.ACK)
    assert (await backend.stats(QUEUE)).done == 2


@pytest.mark.parametrize("who", ["qworker", "fsq"])
async def test_what_a_killed_scan_worked_on_is_taken_by_the_other(
    backend: Backend, peer: Fsq, root: Path, tmp_path: Path, who: str
) -> None:
    await backend.publish(QUEUE, [Draft(body=b"x")])
    out = tmp_path / "out"
    # Its standard input is the locked file, which it must not keep when the scan dies.
    command = (QUEUE, "/bin/sh", "-c", f"echo $$ > {out}.new; mv {out}.new {out}; exec sleep 60 < /dev/null")
    if who == "qworker":
        process = await start_qworker("scan", f"fsq://{root}", *command, output=asyncio.subprocess.DEVNULL)
    else:
        process = await peer.start("scan", *command, output=asyncio.subprocess.DEVNULL)
    await wait_until(out.exists)
    assert await backend.lease(QUEUE, 1, 30.0) == []
    process.kill()
    await process.wait()
    try:
        if who == "fsq":
            # Its programs inherit the locked file whatever they do with their standard input.
            os.kill(int(out.read_text()), signal.SIGKILL)
            (lease,) = await wait_until(lambda: backend.lease(QUEUE, 1, 30.0))
            assert (lease.message.body, lease.message.tries) == (b"x", 0)
            assert await settle(backend, lease, SettleAction.ACK)
        else:
            assert (await peer.run("scan", QUEUE, "/bin/true"))[0] == 0
        assert len(names(root, "done")) == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(out.read_text()), signal.SIGKILL)


async def test_a_finished_item_stays_locked_for_whoever_has_opened_it_before(backend: Backend, root: Path) -> None:
    await backend.publish(QUEUE, [Draft(body=b"x")])
    with open(root / QUEUE / "queue" / names(root, "queue")[0], "rb") as late:
        (lease,) = await backend.lease(QUEUE, 1, 30.0)
        assert await settle(backend, lease, SettleAction.ACK)
        with pytest.raises(BlockingIOError):
            fcntl.flock(late, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # And what was finished meanwhile is not worked on by us either.
        await wait_until(lambda: _locked(late.fileno()))
    assert await backend.lease(QUEUE, 1, 30.0) == []


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def test_a_queue_that_is_down_is_down_for_both(backend: Backend, peer: Fsq, root: Path, tmp_path: Path) -> None:
    await backend.publish(QUEUE, [Draft(body=b"x")])
    await backend.pause(QUEUE)
    assert stat.S_IMODE((root / QUEUE / "down").stat().st_mode) == 0o640
    # The manual says 111, and the release says that it is down, and ends with 0.
    _, output = await peer.run("scan", QUEUE, "/bin/sh", "-c", f"touch {tmp_path}/ran")
    assert b"is down" in output
    assert not (tmp_path / "ran").exists()
    assert (await peer.run("up", QUEUE))[0] == 0
    (lease,) = await backend.lease(QUEUE, 1, 30.0)
    assert (await peer.run("down", QUEUE))[0] == 0
    assert await settle(backend, lease, SettleAction.RELEASE)
    assert await backend.lease(QUEUE, 1, 30.0) == []
    status, output = await qworker("scan", f"fsq://{root}", QUEUE, "true")
    assert (status, output) == (111, b"work is paused\n")
    assert (await qworker("fsq", "up", f"fsq://{root}", QUEUE))[0] == 0
    assert (await peer.run("scan", QUEUE, "/bin/sh", "-c", f"touch {tmp_path}/ran"))[0] == 0
    assert (tmp_path / "ran").exists()


async def test_tries_are_counted_by_both_in_the_name(backend: Backend, peer: Fsq, root: Path) -> None:
    await backend.publish(QUEUE, [Draft(body=b"x", argv=("a",))])
    assert (await peer.run("scan", "-m", "9", QUEUE, "/bin/sh", "-c", "exit 111"))[0] == 0
    (lease,) = await backend.lease(QUEUE, 1, 30.0)
    assert lease.message.tries == 1
    assert await settle(backend, lease, SettleAction.FAIL_TMP, "again")
    out = root / "tries"
    script = f"echo $FSQ_ITEM_TRIES > {out}; exit 100"
    assert (await peer.run("scan", "-m", "9", QUEUE, "/bin/sh", "-c", script))[0] == 0
    assert out.read_text() == "2\n"
    (stored,) = await list_messages(backend, QUEUE, Query(State.FAILED))
    assert (stored.message.tries, stored.message.argv, stored.error) == (2, ("a",), None)
    assert await backend.requeue(QUEUE, Selection(state=State.FAILED)) == 1
    assert (await peer.run("scan", QUEUE, "/bin/true"))[0] == 0
    assert (await backend.stats(QUEUE)).done == 1


async def test_a_trigger_wakes_the_other(fsq: tuple[str, Path], root: Path) -> None:
    peer = Fsq(fsq, root)
    root.mkdir()
    assert (await peer.run("install", "-t", QUEUE))[0] == 0
    code = (
        f"import fsq\nfor item in fsq.scan_forever({QUEUE!r}):\n"
        "    print(item.item.read().decode())\n    fsq.success(item); break"
    )
    listening = asyncio.create_task(peer.python(code))
    backend = open_backend(f"fsq://{root}")
    try:

        async def publish_more() -> bool:
            if not names(root, "queue"):
                await backend.publish(QUEUE, [Draft(body=b"pulled")])
            return listening.done()

        await wait_until(publish_more, PATIENCE)
        assert (await listening).strip() == b"pulled"
        await backend.remove(QUEUE, Selection(state=State.READY))
        # A worker that waits is a listener: to pull the trigger is no error. It reads old pulls first.
        assert await backend.lease(QUEUE, 1, 30.0, 0.1) == []
        waiting = asyncio.create_task(backend.lease(QUEUE, 1, 30.0, PATIENCE))
        assert await wait_until_blocked(waiting)
        status, output = await peer.run("enqueue", "-t", QUEUE, body=b"x")
        assert (status, b"No listener" in output) == (0, False)
        (lease,) = await waiting
        assert lease.message.body == b"x"
    finally:
        await backend.aclose()


# -- scan ------------------------------------------------------------------------------------------------------------

SCANS = [
    ([], "exit 0"),
    ([], "exit 100"),
    ([], "exit 111"),
    ([], "exit 7"),
    ([], "kill -9 $$"),
    (["-m", "3"], "exit 111"),
    (["-m", "0"], "exit 111"),
    (["-D"], "exit 0"),
    (["-S", "5", "-T", "0", "-F", "6"], "exit 5"),
    (["-S", "5", "-T", "0", "-m", "2"], "exit 0"),
    (["-E"], 'test -z "$FSQ_ITEM_ID"'),
    (["-v", "-L"], 'test "$FSQ_ITEM_ENTROPY$FSQ_ITEM_PID" = 077 && test "$FSQ_ITEM_HOSTNAME" = host'),
    (["--verbose"], 'test "$FSQ_ITEM_ENQUEUED_AT" = 20131005205643 && test "$FSQ_ITEM_TRIES" = 0'),
    (["-n"], "exit 0"),
    (["-r", "100"], 'test "$1" = a_b && test "$(cat)" = body'),
    (["-k"], "exit 0"),
    (["--no-such-flag"], "exit 0"),
]


@pytest.mark.parametrize(("flags", "script"), SCANS, ids=[" ".join([*flags, script]) for flags, script in SCANS])
async def test_a_scan_ends_as_fsqs_own_does(
    fsq: tuple[str, Path], tmp_path: Path, flags: list[str], script: str
) -> None:
    found: list[tuple[int, dict[str, list[str]]]] = []
    for who in ("fsq", "qworker"):
        root = tmp_path / who
        for part in ("tmp", "queue", "done", "fail"):
            (root / QUEUE / part).mkdir(parents=True)
        for tries in (0, 1):
            (root / QUEUE / "queue" / f"_20131005205643_{tries}_77_host_{tries}_a%5fb").write_text("body\n")
        (root / QUEUE / "queue" / "stranger").write_text("?")
        command = (QUEUE, "/bin/sh", "-c", script, "sh")
        if who == "fsq":
            status, _ = await Fsq(fsq, root).run("scan", *flags, *command)
        else:
            status, _ = await qworker("scan", *flags, f"fsq://{root}", *command)
        found.append((status, {part: names(root, part) for part in ("tmp", "queue", "done", "fail")}))
    theirs, ours = found
    if flags == ["--no-such-flag"]:
        # The manual says 100 for wrong usage, and the release ends with 111.
        assert (theirs[0], ours[0]) == (111, 100)
        assert theirs[1] == ours[1]
    else:
        assert ours == theirs


async def test_a_scan_of_no_queue_ends_with_111(peer: Fsq, root: Path) -> None:
    root.mkdir()
    assert (await peer.run("scan", "absent", "/bin/true"))[0] == 111
    assert (await qworker("scan", f"fsq://{root}", "absent", "true"))[0] == 111
    assert list(root.iterdir()) == []


async def test_every_variable_means_what_it_means_to_fsq(fsq: tuple[str, Path], tmp_path: Path) -> None:
    variables = {
        "FSQ_QUEUE": "in",
        "FSQ_DONE": "out",
        "FSQ_FAIL": "bad",
        "FSQ_TMP": "new",
        "FSQ_DOWN": "stop",
        "FSQ_TRIGGER": "wake",
        "FSQ_HOSTS": "machines",
        "FSQ_HOSTS_TRIGGER": "wake-machines",
        "FSQ_DELIMITER": ",",
        "FSQ_ENCODE": "+",
        "FSQ_TIMEFMT": "%s",
        "FSQ_ITEM_MODE": "0600",
        "FSQ_QUEUE_MODE": "0750",
        "FSQ_ITEM_USER": str(os.getuid()),
        "FSQ_ITEM_GROUP": str(os.getgid()),
        "FSQ_QUEUE_USER": str(os.getuid()),
        "FSQ_QUEUE_GROUP": str(os.getgid()),
        "FSQ_USE_TRIGGER": "1",
        "FSQ_SUCCESS": "3",
        "FSQ_FAIL_TMP": "4",
        "FSQ_FAIL_PERM": "5",
        "FSQ_MAX_TRIES": "2",
        "FSQ_LOCK": "0",
    }
    trees: list[dict[str, str]] = []
    for who in ("fsq", "qworker"):
        root = tmp_path / who
        root.mkdir()
        peer = Fsq(fsq, root, **variables)
        (tmp_path / "body").write_text("body")
        if who == "fsq":
            assert await peer.run("install", "-a", "web1", QUEUE) == (0, b"")
            assert await peer.run("down", QUEUE) == (0, b"")
            assert (root / QUEUE / "stop").exists()
            assert await peer.run("up", QUEUE) == (0, b"")
        else:
            url = f"fsq://{root}"
            assert await qworker("fsq", "install", "-a", "web1", url, QUEUE, **variables) == (0, b"")
            assert await qworker("fsq", "down", url, QUEUE, **variables) == (0, b"")
            assert (root / QUEUE / "stop").exists()
            assert await qworker("fsq", "up", url, QUEUE, **variables) == (0, b"")
        for argument, code in (("done", 3), ("again", 4), ("bad", 5)):
            enqueue = ("-f", str(tmp_path / "body"))
            if who == "fsq":
                assert (await peer.run("enqueue", *enqueue, QUEUE, argument, "a,b+/"))[0] == 0
                ran = await peer.run("scan", QUEUE, "/bin/sh", "-c", f"exit {code}")
            else:
                published = await qworker("publish", url, QUEUE, *enqueue, argument, "a,b+/", **variables)
                assert published[0] == 0, published
                ran = await qworker("scan", url, QUEUE, "/bin/sh", "-c", f"exit {code}", **variables)
            assert ran[0] == 0, ran
        # Times and pids differ.
        trees.append(
            {re.sub(r",\d+,\d+,\d+,", ",T,E,P,", path): mode for path, mode in tree(root).items() if "/." not in path}
        )
    assert trees[1] == trees[0]


# -- the layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [[], ["-d"], ["-t"], ["-a", "web1", "-a", "web2"], ["-t", "-a", "web1"], ["-m", "0700"]]
)
async def test_an_installed_queue_is_as_fsq_installs_it(
    fsq: tuple[str, Path], tmp_path: Path, flags: list[str]
) -> None:
    for who in ("fsq", "qworker"):
        (tmp_path / who).mkdir()
    assert (await Fsq(fsq, tmp_path / "fsq").run("install", *flags, QUEUE))[0] == 0
    status, output = await qworker("fsq", "install", *flags, f"fsq://{tmp_path}/qworker", QUEUE)
    assert status == 0, output
    assert tree(tmp_path / "qworker") == tree(tmp_path / "fsq")


async def test_installing_a_queue_that_is_there_is_an_error(backend: Backend, peer: Fsq, root: Path) -> None:
    await backend.publish(QUEUE, [Draft(body=b"x")])
    status, output = await peer.run("install", QUEUE)
    assert b"queue exists" in output
    status, output = await qworker("fsq", "install", f"fsq://{root}", QUEUE)
    assert (status, b"queue exists: work" in output) == (111, True)
    assert (await qworker("fsq", "install", "-i", f"fsq://{root}", QUEUE))[0] == 0
    assert len(names(root, "queue")) == 1
    assert (await qworker("fsq", "install", "-f", f"fsq://{root}", QUEUE))[0] == 0
    assert names(root, "queue") == []


def test_fixtures_are_unpacked_where_they_are_looked_for(tmp_path: Path) -> None:
    unpack(FIXTURE, tmp_path)
    assert (tmp_path / "fsq" / "root" / "a_queue").is_dir()


async def test_a_queue_that_fsq_wrote_is_read_as_it_is(tmp_path: Path) -> None:
    unpack(FIXTURE, tmp_path)
    root = tmp_path / "fsq" / "root"
    before = set(tree(root))
    backend = open_backend(f"fsq://{root}")
    try:
        assert await backend.queues() == ["a_queue", "downed", "hosted", "trig"]
        (done,) = await list_messages(backend, "a_queue", Query(State.DONE))
        (failed,) = await list_messages(backend, "a_queue", Query(State.FAILED))
        assert (done.message.argv, failed.message.argv) == (("d",), ("f",))
        ready = await list_messages(backend, "a_queue", Query(State.READY))
        assert [stored.message.id.split("_")[1] for stored in ready] == ["0", "10", "1", "2", "3", "4", "5", "6", "7"]
        assert set(tree(root)) == before
        leases = await backend.lease("a_queue", 20, 30.0)
        arguments = [lease.message.argv for lease in leases]
        assert arguments[0] == ("args", "to", "enqueue")
        assert arguments[6:] == [("a_b", "100%", "x/y", ""), ("café",), ()]
        assert [lease.message.tries for lease in leases] == [0, 2, 0, 0, 0, 0, 0, 0, 0]
        assert await backend.lease("downed", 1, 30.0) == []
        assert (await backend.stats("downed")).paused
        assert len(await backend.lease("trig", 1, 30.0)) == 1
    finally:
        await backend.aclose()


# -- hosts -----------------------------------------------------------------------------------------------------------


async def test_hosts_are_added_paused_and_removed_as_by_fsq(fsq: tuple[str, Path], tmp_path: Path) -> None:
    roots = {who: tmp_path / who for who in ("fsq", "qworker")}
    for root in roots.values():
        root.mkdir()
    peer, url = Fsq(fsq, roots["fsq"]), f"fsq://{roots['qworker']}"
    steps = [
        ("install", [QUEUE]),
        ("add-host", ["web1", QUEUE]),
        ("add-host", ["web2", QUEUE]),
        ("add-host", ["web2", QUEUE]),
        ("add-host", ["-i", "web2", QUEUE]),
        ("down-host", ["web1", QUEUE]),
        ("down-host", ["web2", QUEUE]),
        ("up-host", ["web2", QUEUE]),
        ("rm-host", ["web2", QUEUE]),
        ("rm-host", ["-f", "web2", QUEUE]),
    ]
    for program, arguments in steps:
        # The released programs end with 0 whatever happened, and say what went wrong.
        _, complaint = await peer.run(program, *arguments)
        flags = [word for word in arguments if word[0] == "-"]
        ours, output = await qworker("fsq", program, *flags, url, *[word for word in arguments if word[0] != "-"])
        assert (ours == 0) == (complaint == b""), (program, arguments, complaint, output)
        assert tree(roots["qworker"]) == tree(roots["fsq"]), (program, arguments)


async def test_items_are_distributed_to_every_host_and_scanned_there_by_either(
    backend: Backend, peer: Fsq, root: Path, tmp_path: Path
) -> None:
    url, out = f"fsq://{root}", tmp_path / "out"
    for host in ("web1", "web2"):
        assert (await qworker("fsq", "add-host", url, host, QUEUE))[0] == 0
    await backend.publish(QUEUE, [Draft(body=b"1", argv=("a",))])
    assert (await qworker("fsq", "host-dist", "-g", url, QUEUE))[0] == 0
    await backend.publish(QUEUE, [Draft(body=b"2", argv=("b",))])
    status, output = await peer.run("host-dist", QUEUE, "web1", "web2")
    assert status == 0, output
    await backend.publish(QUEUE, [Draft(body=b"3")])
    assert (await qworker("fsq", "host-dist", "-I", url, QUEUE, "web2"))[0] == 0
    assert names(root, "queue") == []
    assert len(names(root, "done")) == 3
    script = f'echo "$(cat) $FSQ_ITEM_HOST" >> {out}'
    assert (await peer.run("scan", "-A", "web1", QUEUE, "/bin/sh", "-c", script))[0] == 0
    assert out.read_text() == "1 web1\n2 web1\n"
    of_host = open_backend(f"{url}?host=web2")
    try:
        (lease,) = await of_host.lease(QUEUE, 1, 30.0)
        assert (lease.message.body, lease.message.argv) == (b"1", ("a",))
        assert await settle(of_host, lease, SettleAction.ACK)
    finally:
        await of_host.aclose()
    assert (await qworker("scan", "-a", url, QUEUE, "/bin/sh", "-c", script))[0] == 0
    assert out.read_text() == "1 web1\n2 web1\n2 web2\n3 web2\n"
    assert [len(names(root, f"hosts/{host}/done")) for host in ("web1", "web2")] == [2, 3]


# -- between hosts ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(root: Path) -> AsyncIterator[int]:
    """A qworker jsonrpcd; its port."""
    process = await start_qworker("fsq", "jsonrpcd", f"fsq://{root}", "127.0.0.1", "0")
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
        yield int(line.rsplit(b":", 1)[1])
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0, output


@contextlib.asynccontextmanager
async def fsq_serving(peer: Fsq) -> AsyncIterator[int]:
    """fsq's own jsonrpcd; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = await peer.start("jsonrpcd", "-w", "1", "127.0.0.1", str(port))
    try:

        async def answers() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return False
            writer.close()
            return True

        await wait_until(answers)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        # Its children defer the signal until a request has come; none does.
        await asyncio.wait_for(process.communicate(), PATIENCE)


async def test_items_are_pushed_by_either_to_either(fsq: tuple[str, Path], tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    peer, url = Fsq(fsq, here), f"fsq://{here}"
    assert (await peer.run("install", "-a", "web1", QUEUE))[0] == 0
    assert (await Fsq(fsq, there).run("install", "-t", QUEUE))[0] == 0
    backend = open_backend(f"{url}?host=web1")
    target = open_backend(f"fsq://{there}")
    try:
        bodies = ["plain", "ünïcode\n", "", "four"]
        await backend.publish(QUEUE, [Draft(body=body.encode(), argv=("a_b", body)) for body in bodies])
        first, second, third, fourth = names(here, "hosts/web1/queue")
        async with serving(there) as ours, fsq_serving(Fsq(fsq, there)) as theirs:
            to_fsq, to_us = f"http://127.0.0.1:{theirs}", f"http://127.0.0.1:{ours}"
            assert await qworker("fsq", "push", url, to_fsq, QUEUE, QUEUE, "web1", first) == (0, b"")
            assert await qworker("fsq", "push", url, to_us, QUEUE, QUEUE, "web1", second) == (0, b"")
            status, output = await peer.run("push", to_us, QUEUE, QUEUE, "web1", third)
            assert status == 0, output
            # Under a scan, whose exit status says what becomes of it; a trigger that nobody listens on is a failure,
            # unless told.
            push = ("fsq", "push", "-L", "-t", "-i", url, to_us, QUEUE, QUEUE)
            script = f'{sys.executable} -m qworker {" ".join(push)} "$FSQ_ITEM_HOST" "$FSQ_ITEM_ID"'
            assert (await qworker("scan", "-A", "web1", url, QUEUE, "/bin/sh", "-c", script))[0] == 0
            assert names(here, "hosts/web1/done") == [first, second, third, fourth]
            # What is there already is there once.
            assert names(there, "queue") == [first, second, third, fourth]
            status, output = await qworker("fsq", "push", "-t", url, to_us, QUEUE, "absent", "-", first)
            assert status == 111, output
        leases = await target.lease(QUEUE, 10, 30.0)
        assert [lease.message.body.decode() for lease in leases] == bodies
        assert [lease.message.argv for lease in leases] == [("a_b", body) for body in bodies]
    finally:
        await backend.aclose()
        await target.aclose()


async def test_a_push_that_fails_leaves_the_item_to_be_tried_again(tmp_path: Path) -> None:
    url = f"fsq://{tmp_path}/here"
    backend = open_backend(url)
    try:
        await backend.publish(QUEUE, [Draft(body=b"\xff\xfe"), Draft(body=b"text")])
        binary, text = names(tmp_path / "here", "queue")
        status, output = await qworker("fsq", "push", url, "http://127.0.0.1:1", QUEUE, QUEUE, "-", text)
        assert (status, b"refused" in output) == (111, True)
        status, output = await qworker("fsq", "push", url, "http://127.0.0.1:1", QUEUE, QUEUE, "-", binary)
        assert (status, b"sends only text" in output) == (100, True)
        assert len(await backend.lease(QUEUE, 10, 30.0)) == 2
    finally:
        await backend.aclose()
