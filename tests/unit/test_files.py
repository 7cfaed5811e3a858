"""Files that directory backends share: telling one that is still being written, and closing many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qworker.kit import files, linux
from qworker.kit.directory.liveness import LivenessFile, has_died
from qworker.kit.files import close_all
from qworker.kit.inotify import Inotify
from qworker.kit.opening import open_directory

# A writer: says how its open went, keeps the file open until it is told, and appends.
WRITER = """
import os, sys
try:
    fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | int(sys.argv[2]))
except BlockingIOError:
    print("held off", flush=True)
    raise SystemExit
print("open", flush=True)
sys.stdin.readline()
os.write(fd, b"more")
"""

# Asks, and lets the writer begin at the one moment at which the kernel has to tell somebody of it: between taking the
# read lease and giving it back. In a process of its own, which the kernel's signal would end if it were the usual one.
ASKING = """
import fcntl, os, signal, subprocess, sys
from qworker.kit import linux, opening

path, flags, writer = sys.argv[1:]
fd = opening.open_entry(path, os.O_RDONLY)
started = []

def between(descriptor, command, argument=0, ask=fcntl.fcntl):
    result = ask(descriptor, command, argument)
    if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_RDLCK) and not started:
        started.append(subprocess.Popen([sys.executable, "-c", writer, path, flags], stdin=-1, stdout=-1, text=True))
        if flags == "0":
            # Its open has begun, and waits for the lease to be given back.
            signal.sigwait({signal.SIGURG})
        else:
            print(started[0].stdout.readline().strip())
    return result

fcntl.fcntl = between
if flags == "0":
    # To be waited for; who does not wait for it is not disturbed by it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
print(linux.has_writer(fd))
if flags == "0":
    print(started[0].stdout.readline().strip())
    print(linux.has_writer(fd))
    started[0].communicate("now\\n")
started[0].wait()
print(linux.has_writer(fd), os.fstat(fd).st_size)
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        # Without O_NONBLOCK the writer waits until the question is answered.
        ("0", ["True", "open", "True", "False 8"]),
        # With it the writer is told to come again.
        (str(os.O_NONBLOCK), ["held off", "True", "False 4"]),
    ],
    ids=["a writer that waits", "a writer that does not"],
)
def test_a_writer_that_comes_with_the_question_ends_nobody_and_waits_for_nobody(
    tmp_path: Path, flags: str, said: list[str]
) -> None:
    path = tmp_path / "item"
    path.write_bytes(b"some")
    done = subprocess.run(
        [sys.executable, "-c", ASKING, str(path), flags, WRITER],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == said


def test_closing_many_closes_those_and_no_neighbour() -> None:
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(12)]
    kept = [fds[0], fds[4], fds[5], fds[11]]
    closed = [fd for fd in fds if fd not in kept]
    given = list(reversed(closed))
    close_all(given)
    assert given == []
    for fd in closed:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    for fd in kept:
        os.close(fd)
    close_all([])


def test_a_tree_is_removed_while_another_process_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below" / "file").touch()
    (tree / "link").symlink_to(tmp_path)
    late = [tree / "late", tree / "below" / "late"]
    remove = files.remove_empty

    def slow(name: str, parent: int) -> bool:
        if late:
            late.pop().touch()
        return remove(name, parent)

    monkeypatch.setattr(files, "remove_empty", slow)
    parent = open_directory(tmp_path)
    try:
        assert files.remove_tree("tree", parent)
        assert os.listdir(parent) == []
        assert files.remove_tree("tree", parent), "it is gone"
        tree.mkdir()
        monkeypatch.setattr(files, "remove_empty", lambda _name, _parent: False)
        assert not files.remove_tree("tree", parent)
    finally:
        os.close(parent)


async def test_inotify_reports_arrivals_and_removals_by_name(tmp_path: Path) -> None:
    inotify = Inotify()
    came: list[str | None] = []
    left: list[str | None] = []
    directory = open_directory(tmp_path)
    try:
        watch = inotify.watch(directory, came.append, left.append)
        assert not inotify.drain()
        (tmp_path / "a").touch()
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "b").unlink()
        assert inotify.drain()
        assert (came, left) == (["a", "b"], ["a", "b"])
        inotify.unwatch(watch)
        (tmp_path / "c").touch()
        inotify.drain()
        assert came == ["a", "b"]
    finally:
        inotify.close()
        os.close(directory)


@pytest.mark.parametrize("local", [True, False])
def test_a_holder_is_dead_when_its_file_is_gone_or_unlocked(tmp_path: Path, local: bool) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "workers").mkdir()
    tmp, workers = open_directory(tmp_path / "tmp"), open_directory(tmp_path / "workers")
    try:
        held = LivenessFile(tmp, workers, "a", note="\n1\n")
        assert not has_died(workers, "a", local=local)
        assert (tmp_path / "workers" / "a").read_text() == f"{linux.boot_id()}\n1\n"
        killed = LivenessFile(tmp, workers, "b")
        killed.abandon()
        assert has_died(workers, "b", local=local)
        held.close()
        held.close()
        assert has_died(workers, "a", local=local)
        (tmp_path / "workers" / "c").write_text("another machine")
        assert has_died(workers, "c", local=local) is local
        (tmp_path / "workers" / "d").symlink_to(tmp_path)
        assert not has_died(workers, "d", local=local)
        assert os.listdir(tmp) == []
    finally:
        os.close(tmp)
        os.close(workers)
