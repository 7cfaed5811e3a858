"""Standard streams that are closed, full, or cannot encode a character: at most one line, and the right status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.processes import environment
from tests.support.waiting import PATIENCE, wait_for

URL = "file://./spool"
CLOSED = [">&-", "2>&-", "<&- >&- 2>&-"]

APP = """
import os
from qworker import Tasks
tasks = Tasks("file://./spool")

@tasks.task(queue="sums")
async def add(a: int) -> None:
    with open("ran", "a") as file:
        file.write(f"{a} {[os.path.exists(f'/proc/self/fd/{n}') for n in range(3)]}\\n")
    print("added", a)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def shell(folder: Path, command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line in which `Q` stands for qworker."""
    line = re.sub(r"\bQ\b", f"{sys.executable} -m qworker", command)
    # Buffered, as users have it: what is not written at once is written at the end.
    given = environment(**env)
    if "PYTHONUNBUFFERED" not in env:
        del given["PYTHONUNBUFFERED"]
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE,
        check=False,
    )


def ready(folder: Path, queue: str) -> int:
    return len(list((folder / "spool" / queue / "queue").glob("[!.]*")))


def the_line(done: subprocess.CompletedProcess[str], text: str) -> None:
    assert text in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("command", ["Q publish file://./spool sums --body x", "Q enqueue app:tasks add 1"])
def test_what_is_stored_is_a_success_without_standard_streams(folder: Path, command: str, closed: str) -> None:
    done = shell(folder, f"{command} {closed}")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ready(folder, "sums") == 1


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        ("Q publish file://./spool sums --body x", ""),
        ("echo x | Q publish file://./spool sums --lines -f -", "1"),
        ("Q enqueue app:tasks add 1", "1"),
        ("Q enqueue app:tasks add 1 --json", ""),
        ("echo '[1]' | Q enqueue app:tasks add --from-file -", ""),
    ],
)
def test_what_is_stored_is_a_success_though_its_id_cannot_be_written(
    folder: Path, command: str, unbuffered: str
) -> None:
    done = shell(folder, f"{command} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 0, done.stderr
    assert "is stored; the report cannot be written to standard output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert ready(folder, "sums") == 1


def test_what_is_stored_is_a_success_though_nothing_at_all_can_be_written(folder: Path) -> None:
    assert shell(folder, "Q enqueue app:tasks add 1 >/dev/full 2>/dev/full").returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments", ["ls URL", "stats URL", "browse URL sums --json", "run --help", "--version", "-h"]
)
def test_output_that_cannot_be_written_is_one_line_and_status_1(folder: Path, arguments: str, unbuffered: str) -> None:
    shell(folder, f"Q publish {URL} sums --body x")
    done = shell(folder, f"Q {arguments.replace('URL', URL)} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    the_line(done, "qworker: cannot write to standard output: No space left on device")


@pytest.mark.parametrize(
    ("command", "status"), [("Q run nowhere:tasks", 2), ("Q run --no-such-option", 2), ("Q ls x:", 2)]
)
def test_a_mistake_keeps_its_status_though_nothing_can_be_said(folder: Path, command: str, status: int) -> None:
    assert shell(folder, f"{command} 2>/dev/full").returncode == status
    assert shell(folder, f"{command} 2>&-").returncode == status


@pytest.mark.parametrize(
    ("workers", "closed"), [*(("", closed) for closed in CLOSED), ("", "2>/dev/full"), ("-w 2", CLOSED[-1])]
)
def test_a_worker_works_without_standard_streams(folder: Path, workers: str, closed: str) -> None:
    shell(folder, "echo '[1]' | Q enqueue app:tasks add --from-file -")
    done = shell(folder, f"Q run app:tasks --burst {workers} {closed}")
    assert done.returncode == 0, done.stderr
    # The handler has all three, and no file of the worker's stands in the place of one.
    assert (folder / "ran").read_text() == "1 [True, True, True]\n"


def test_handlers_output_that_is_lost_is_one_line_at_the_end(folder: Path) -> None:
    shell(folder, "Q enqueue app:tasks add 1")
    done = shell(folder, "Q run app:tasks --burst >/dev/full")
    assert done.returncode == 1
    assert done.stderr.endswith("qworker: cannot write to standard output: No space left on device\n")
    assert ready(folder, "sums") == 0


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_server_serves_without_standard_streams(folder: Path, closed: str) -> None:
    shell(folder, f"Q create {URL} inbox")
    line = f"exec {sys.executable} -m qworker serve {URL} --port 0 {closed}"
    with subprocess.Popen(["bash", "-c", line], cwd=folder, env=environment()) as server:
        try:
            port = wait_for(lambda: _listening(server.pid), "it listens", lambda: f"status {server.poll()}")
            with urlopen(f"http://127.0.0.1:{port}/inbox/messages", b"hello", timeout=PATIENCE) as answer:
                assert answer.status == 201
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
        finally:
            server.kill()
    assert ready(folder, "inbox") == 1


def _listening(pid: int) -> int | None:
    """The port on which a process listens."""
    here = f"/proc/{pid}/fd"
    try:
        sockets = {os.readlink(f"{here}/{name}") for name in os.listdir(here)}
    except FileNotFoundError:
        return None
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            return int(fields[1].rpartition(":")[2], 16)
    return None


@pytest.mark.parametrize("encoding", ["latin-1", "euc-jp", "ascii"])
def test_output_is_possible_in_every_encoding(folder: Path, encoding: str) -> None:
    # A Japanese character, one that only UTF-8 has, and one that is cut off in its middle.
    (folder / "body").write_bytes(b"\xe6\x97\xa5 \xf0\x9f\x90\x8d \xe6\x97")
    shell(folder, f"Q publish {URL} inbox -f body")
    for arguments, status in ((f"browse {URL} inbox", 0), ("enqueue app:tasks '\u65e5\u672c'", 2), ("'\u65e5'", 2)):
        done = shell(folder, f"Q {arguments}", PYTHONIOENCODING=encoding)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr


def test_json_is_utf_8_where_the_terminal_is_and_ascii_elsewhere(folder: Path) -> None:
    shell(folder, f"Q publish {URL} inbox --body '\u00e9\u65e5\U0001f40d'")
    bodies = {}
    for encoding in ("utf-8", "latin-1"):
        text = shell(folder, f"Q browse {URL} inbox --json", PYTHONIOENCODING=encoding).stdout
        assert json.loads(text)[0]["body"] == "\u00e9\u65e5\U0001f40d"
        bodies[encoding] = text.isascii()
    assert bodies == {"utf-8": False, "latin-1": True}
