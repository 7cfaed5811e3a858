"""Stores that cannot be used: every command says in one line what is wrong and what to do, and ends with status 3."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from qworker.cli.main import main
from qworker_memory import MemoryBackend
from tests.support.servers import RedisServer, free_port
from tests.support.serving import served

SCHEMES = ["file", "fsq", "mq", "sq", "vsqs"]
NOBODY = 65534
# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER.
POWER_OVER_FILES = 0b1111

_numbers = itertools.count()

APP = """
import os
from qworker import Tasks
tasks = Tasks(os.environ["STORE"])

@tasks.task
async def greet() -> None: ...
"""

# What to run, and where to look for what it says.
Says = Callable[..., None]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: one that every user can reach, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="qworker-unusable-"))
    folder.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in os.environ if name.startswith("QWORKER_")]:
        monkeypatch.delenv(name)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def app(folder: Path) -> str:
    """An app's place; a module of its own in each test, since modules are imported once."""
    module = f"unusable_app_{os.getpid()}_{next(_numbers)}"
    (folder / f"{module}.py").write_text(APP)
    return f"{module}:tasks"


def commands(app: str, url: str) -> dict[str, list[str]]:
    return {
        "run": ["run", app, "--burst", "--log-level", "error"],
        "enqueue": ["enqueue", app, "greet"],
        "stats": ["stats", url],
        "doctor": ["doctor", url],
    }


@pytest.fixture
def says(app: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Says:
    """Run commands on a store: each ends with status 3, and one line has all of the given words."""

    def check(url: str, *words: str, only: tuple[str, ...] = ("run", "enqueue", "stats", "doctor")) -> None:
        monkeypatch.setenv("STORE", url)
        for name, arguments in commands(app, url).items():
            if name in only:
                capsys.readouterr()
                status = main(arguments)
                shown = capsys.readouterr()
                judge(name, status, shown.out, shown.err, words)

    return check


def judge(command: str, status: int, out: str, err: str, words: tuple[str, ...]) -> None:
    assert status == 3, (command, status, out, err)
    assert "Traceback" not in err, err
    lines = (
        [line for line in out.splitlines() if line.startswith("BROKEN ")] if command == "doctor" else err.splitlines()
    )
    last = lines[0] if command == "doctor" else lines[-1]
    assert command == "doctor" or last.startswith("qworker: "), err
    for word in words:
        assert word in last, (command, word, lines)


# -- directories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_is_no_directory_of_queues(scheme: str, below: str, folder: Path, says: Says) -> None:
    (folder / "spool").write_bytes(b"precious")
    says(f"{scheme}://{folder}/spool{below}", str(folder), "a file where a directory should be: check the URL")
    assert (folder / "spool").read_bytes() == b"precious"


@contextmanager
def without_privileges(*paths: Path) -> Generator[None]:
    """Take root's power over others' files away for a while, and give some paths to another user.

    The process stays root, because what it has not imported yet may lie where only root can read. Any other user has no
    such power.
    """
    if os.geteuid() != 0:
        yield
        return
    for path in paths:
        os.chown(path, NOBODY, NOBODY)
    libc = ctypes.CDLL(None, use_errno=True)
    # The header of version 3, and the effective, permitted and inheritable sets: 32 capabilities, then the others.
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    before = sets[0]
    sets[0] = before & ~POWER_OVER_FILES
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_directory_of_somebody_elses_takes_no_queues(scheme: str, folder: Path, says: Says) -> None:
    place = folder / "place"
    place.mkdir(0o555)
    with without_privileges(place):
        says(
            f"{scheme}://{place}/spool",
            "cannot",
            "Permission denied: run as the directory's owner, or let its group write to it",
            only=("run", "enqueue", "doctor"),
        )
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_directory_that_may_not_be_entered_is_a_matter_of_permission(scheme: str, folder: Path, says: Says) -> None:
    spool = folder / "spool"
    spool.mkdir(0)
    with without_privileges(spool):
        says(f"{scheme}://{spool}", str(spool), "Permission denied: run as the directory's owner")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_queues_of_somebody_elses_are_not_worked_on(scheme: str, folder: Path, says: Says) -> None:
    url = f"{scheme}://{folder}/spool"
    assert main(["publish", url, "default", "--body", "x"]) == 0
    paths = [folder / "spool", *(folder / "spool").rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with without_privileges(*paths):
        says(url, "Permission denied: run as the directory's owner", only=("run", "enqueue"))


@cache
def namespace() -> tuple[str, ...]:
    """Return the command that runs a program with its own mounts: as root, in a chroot, or in a user namespace."""
    probe = ("sh", "-c", "mount -t tmpfs none /mnt && umount /mnt")
    for how in (("--mount",), ("--mount", "--propagation", "unchanged"), ("--map-root-user", "--mount")):
        start = ("unshare", *how)
        if subprocess.run([*start, *probe], check=False, capture_output=True).returncode == 0:
            return start
    return ()


def read_only_mount() -> Path:
    """Return a directory on a file system that is mounted read-only, such as /proc and /sys in a container."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if "ro" in fields[5].split(",") and os.path.isdir(fields[4]) and os.access(fields[4], os.X_OK):
            return Path(fields[4])
    raise AssertionError("neither may this user mount anything, nor is there a read-only mount: run the tests as root")


# In a process of its own, where mounts are its own too: a queue on a new file system, which is then mounted read-only.
_COMMANDS = """
import contextlib, io, json, os, subprocess, sys
from qworker.cli.main import main

def run(arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()

tasks = json.loads(sys.argv[1])
if tasks["mount"]:
    subprocess.run(["mount", "-t", "tmpfs", "none", tasks["mount"]], check=True)
    assert run(["publish", tasks["old"], "default", "--body", "x"])[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", tasks["mount"]], check=True)
found = []
try:
    for url, module, name, arguments in tasks["commands"]:
        os.environ["STORE"] = url
        sys.modules.pop(module, None)
        found.append((name, *run(arguments)))
finally:
    if tasks["mount"]:
        subprocess.run(["umount", "--lazy", tasks["mount"]], check=True)
print(json.dumps(found))
"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_system_that_is_mounted_read_only_is_named_as_that(scheme: str, app: str, folder: Path) -> None:
    place = folder / "mount" if namespace() else read_only_mount()
    (folder / "mount").mkdir()
    old = f"{scheme}://{place}/old"
    # One that is to be made, and one that is there.
    rows = [
        (url, app.partition(":")[0], name, arguments)
        for url in (f"{scheme}://{place}/new", *([old] if namespace() else []))
        for name, arguments in commands(app, url).items()
        if name != "stats"
    ]
    given = json.dumps({"mount": str(place) if namespace() else "", "old": old, "commands": rows})
    command = [*namespace(), sys.executable, "-c", _COMMANDS, given]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 0, ended.stderr
    for name, status, out, err in json.loads(ended.stdout.splitlines()[-1]):
        words = ("the file system is mounted read-only: remount it, or choose another directory",)
        judge(name, status, out, err, words)


def test_the_doctor_of_a_full_disk_says_that_it_is_full(folder: Path) -> None:
    place = folder / "mount"
    place.mkdir()
    assert namespace(), "this user may not mount anything: run the tests as root"
    script = (
        f'mount -t tmpfs -o size=16k none {place} && head -c 16k /dev/zero > {place}/ballast && "$@"; '
        f"status=$?; umount --lazy {place}; exit $status"
    )
    program = (sys.executable, "-m", "qworker", "doctor", f"file://{place}/spool")
    ended = subprocess.run(
        [*namespace(), "sh", "-c", script, "sh", *program], check=False, capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 1, ended.stderr
    broken = [line for line in ended.stdout.splitlines() if line.startswith("BROKEN ")]
    assert broken[0].startswith("BROKEN space: 0.0 GB of 0.0 GB are free")
    assert {"BROKEN rename: No space left on device", "BROKEN fsync: No space left on device"} <= set(broken)
    assert "       free some space" in ended.stdout
    assert "give this user the directory" not in ended.stdout


# -- Redis -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, int]]:
    """The ports of a plain server, of one with a password, and of one with TLS only."""
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = f"{folder}/key.pem", f"{folder}/certificate.pem"
        subprocess.run(
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {key}"
            f" -out {certificate} -days 2 -subj /CN=localhost".split(),
            check=True,
            capture_output=True,
        )
        ports = {"plain": free_port(), "locked": free_port(), "tls": free_port()}
        secured = {
            "tls-port": str(ports["tls"]),
            "tls-cert-file": certificate,
            "tls-key-file": key,
            "tls-ca-cert-file": certificate,
            "tls-auth-clients": "no",
        }
        with (
            RedisServer(port=ports["plain"]),
            RedisServer(port=ports["locked"], requirepass="sesame"),
            RedisServer(**secured),
        ):
            yield ports


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "rediss://127.0.0.1:{plain}/0?timeout=0.5",
            "no answer in time: if it does not speak TLS on this port, use redis://",
        ),
        ("redis://127.0.0.1:{tls}/0", "if it speaks TLS on this port, use rediss://"),
        (
            "rediss://127.0.0.1:{tls}/0",
            "its certificate is not trusted (self-signed certificate): name its authority with ?tls_ca=FILE",
        ),
        ("redis://127.0.0.1:{locked}/0", "Redis asks for a password: set QWORKER_REDIS_PASSWORD"),
        ("redis://:wrong@127.0.0.1:{locked}/0", "Redis refuses the user or the password: check QWORKER_REDIS_PASSWORD"),
        ("redis://me:sesame@127.0.0.1:{locked}/0", "Redis refuses the user or the password"),
        ("redis://127.0.0.1:{plain}/99", "Redis has no database of this number: use a lower one"),
        ("rfq://127.0.0.1:{plain}/99", "Redis has no database of this number: use a lower one"),
        (
            "redis://127.0.0.1:1/0",
            "cannot connect to Redis at 127.0.0.1:1: Connection refused: check that it is running",
        ),
        (
            "redis://localhost:1/0",
            "cannot connect to Redis at localhost:1: Connection refused: check that it is running",
        ),
    ],
)
def test_a_redis_that_cannot_be_used_says_why(url: str, words: str, servers: dict[str, int], says: Says) -> None:
    says(url.format(**servers), words)


def test_a_number_that_no_redis_has_a_database_for_is_the_urls_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "redis://localhost/99999999999"]) == 2
    assert "the database must be a number" in capsys.readouterr().err


# -- a server over HTTP ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of one that asks for a token."""
    with served(MemoryBackend("unusable"), token="sesame") as running:
        yield running.port


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "mq+http://127.0.0.1:1",
            "cannot connect to the server at 127.0.0.1:1: Connection refused: check that it is running",
        ),
        ("mq+http://127.0.0.1:{port}", "refuses this client: set its token in QWORKER_HTTP_TOKEN"),
        ("mq+https://127.0.0.1:{port}", "it does not speak TLS on this port: use mq+http://"),
    ],
)
def test_a_server_that_cannot_be_used_says_why(url: str, words: str, server: int, says: Says) -> None:
    says(url.format(port=server), words)
