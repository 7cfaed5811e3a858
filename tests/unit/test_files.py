"""Files that directory backends share: telling one that is still being written, and closing many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qworker.kit.files import close_all

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

# Asks, and lets the writer begin at the one moment at which the kernel has to tell somebody of it: between taking the read lease and
# giving it back. In a process of its own, which the kernel's signal would end if it were the usual one.
ASKING = """
import fcntl, os, signal, subprocess, sys
from qworker.kit import files

path, flags, writer = sys.argv[1:]
fd = os.open(path, files.READ)
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
print(files.has_writer(fd))
if flags == "0":
    print(started[0].stdout.readline().strip())
    print(files.has_writer(fd))
    started[0].communicate("now\\n")
started[0].wait()
print(files.has_writer(fd), os.fstat(fd).st_size)
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
