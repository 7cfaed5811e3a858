"""Which store a command means, that looking makes none, and messages that are not there."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.cli.main import exit_status, main
from qworker.errors import BackendUnavailable, FormatTooNew, PermissionDenied, QueueDamaged, StorageFull
from qworker.message import Draft, SettleAction, Settlement
from qworker.names import counted
from tests.support.processes import environment
from tests.support.waiting import PATIENCE

DIRECTORIES = ["file", "fsq", "vsqs", "mq", "sq"]
APP = """
from qworker import Tasks
tasks = Tasks("file://./spool")

@tasks.task(queue="sums")
async def add(a: int) -> None:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def said(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        out, err = capsys.readouterr()
        return status, out, err

    return call


def qworker(folder: Path, *arguments: str, before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    line = f'{before} exec "$0" -m qworker "$@"'
    return subprocess.run(
        ["bash", "-c", line, sys.executable, *arguments],
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


# -- looking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", DIRECTORIES)
@pytest.mark.parametrize(
    "command",
    [
        "ls URL",
        "stats URL",
        "stats URL inbox --json",
        "browse URL inbox",
        "explain URL inbox x",
        "history URL",
        "top URL --once",
        "requeue URL inbox",
        "purge URL inbox --yes",
        "pause URL inbox",
        "resume URL inbox",
        "move URL file://./target",
        "pipeline archive URL ./archive",
        "pipeline replay URL inbox --where true",
    ],
)
def test_looking_into_a_directory_that_is_not_there_makes_none_and_names_it(
    command: str, scheme: str, folder: Path, said: Callable[..., tuple[int, str, str]]
) -> None:
    status, out, err = said(*command.replace("URL", f"{scheme}://./nowhere").split())
    assert (status, out) == (1, "")
    assert err.startswith(f"qworker: the directory {folder}/nowhere does not exist: ")
    assert err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["app.py"]


@pytest.mark.parametrize("scheme", DIRECTORIES)
def test_a_scan_and_the_doctor_make_no_directory_either(
    scheme: str, folder: Path, said: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, err = said("scan", f"{scheme}://./nowhere", "inbox", "cat")
    assert status == 111
    assert f"{folder}/nowhere" in err
    assert f"{folder}/nowhere" in said("doctor", f"{scheme}://./nowhere")[1]
    assert sorted(path.name for path in folder.iterdir()) == ["app.py"]


@pytest.mark.parametrize("scheme", DIRECTORIES)
def test_what_stores_makes_the_directory(scheme: str, said: Callable[..., tuple[int, str, str]]) -> None:
    url = f"{scheme}://./new"
    assert said("publish", url, "inbox", "--body", "x")[0] == 0
    assert said("stats", url, "inbox", "--json")[1].count('"ready":1') == 1


def test_an_empty_directory_is_a_store_without_queues(folder: Path, said: Callable[..., tuple[int, str, str]]) -> None:
    (folder / "spool").mkdir()
    assert said("ls", "file://./spool") == (0, "", "")
    assert said("stats", "file://./spool")[1].startswith("no queues yet")


# -- which store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", DIRECTORIES)
def test_enqueue_doctor_and_run_begin_with_the_whole_path(scheme: str, folder: Path) -> None:
    url = f"{scheme}://./spool"
    where = f"{scheme}://{folder}/spool"
    done = qworker(folder, "enqueue", "app:tasks", "add", "1", "--url", url)
    assert done.returncode == 0
    assert done.stderr == f"qworker: the store is {where}\n"
    assert len(done.stdout.split()) == 1
    first = qworker(folder, "doctor", url).stdout.splitlines()[0]
    assert first == f"ok     store: {where}"
    first = qworker(folder, "run", "app:tasks", "--burst", "--url", url).stderr.splitlines()[0]
    event = json.loads(first)
    assert (event["event"], event["backend"]) == ("worker_started", where)


def test_a_new_directory_is_warned_of_where_the_apps_folder_has_one_of_its_name(folder: Path) -> None:
    assert qworker(folder, "enqueue", "app:tasks", "add", "1").returncode == 0
    other = folder / "other"
    other.mkdir()
    for expected in (True, False):
        done = qworker(other, "run", "app:tasks", "--burst", PYTHONPATH=str(folder))
        assert done.returncode == 0
        warnings = [json.loads(line) for line in done.stderr.splitlines() if "store_is_new" in line]
        assert bool(warnings) is expected
        if warnings:
            assert warnings[0]["directory"] == str(other / "spool")
            assert warnings[0]["beside_the_app"] == str(folder / "spool")
            assert warnings[0]["level"] == "warning"
    # In its own folder, and where its folder has none, nothing is odd about a new one.
    (folder / "spool").rename(folder / "moved")
    assert "store_is_new" not in qworker(folder, "run", "app:tasks", "--burst").stderr


# -- messages that are not there ---------------------------------------------------------------------------------------


@pytest.fixture
def failed(folder: Path) -> list[str]:
    """The ids of two failed messages and of a ready one."""

    async def fill() -> list[str]:
        backend = open_backend("file://./spool")
        ids = await backend.publish("inbox", [Draft(body=b"x")] * 2)
        for lease in await backend.lease("inbox", 2, 30.0):
            await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="no")])
        ids += await backend.publish("inbox", [Draft(body=b"y")])
        await backend.aclose()
        return ids

    return asyncio.run(fill())


def test_requeue_names_the_messages_that_it_cannot_requeue(
    failed: list[str], said: Callable[..., tuple[int, str, str]]
) -> None:
    first, second, ready = failed
    status, out, err = said("requeue", "file://./spool", "inbox", "nothing", first, ready, first)
    assert (status, out) == (1, "requeued 1 message of inbox\n")
    assert err == (
        f"qworker: not requeued in inbox: nothing (there is no such message), {ready} (it is ready, not failed)\n"
    )
    status, out, err = said("requeue", "file://./spool", "inbox", second, "nothing", "--json")
    assert status == 1
    missed = {"nothing": "there is no such message"}
    assert json.loads(out) == {"queue": "inbox", "requeued": 1, "missed": missed, "dry_run": False}
    assert said("requeue", "file://./spool", "inbox") == (0, "requeued 0 messages of inbox\n", "")
    # Any text can be an id.
    assert said("requeue", "file://./spool", "inbox", "a/b")[0] == 1


def test_requeue_counts_what_is_missing_of_many(failed: list[str], said: Callable[..., tuple[int, str, str]]) -> None:
    many = [f"nothing-{number}" for number in range(150)]
    status, out, err = said("requeue", "file://./spool", "inbox", *failed[:2], *many)
    assert (status, out) == (1, "requeued 2 messages of inbox\n")
    assert err.startswith("qworker: not requeued in inbox: 150 of 152 ids, ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    ["browse URL other", "explain URL other x", "requeue URL other", "purge URL other --yes", "pause URL other"],
)
def test_a_queue_that_is_not_there_is_one_line(
    command: str, failed: list[str], said: Callable[..., tuple[int, str, str]]
) -> None:
    status, out, err = said(*command.replace("URL", "file://./spool").split())
    assert (status, out) == (2, "")
    assert err.startswith("qworker: queue 'other' does not exist")
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [BackendUnavailable, PermissionDenied, QueueDamaged, StorageFull, FormatTooNew])
def test_a_store_that_cannot_be_used_has_a_status_of_its_own(error: type[StorageFull]) -> None:
    assert exit_status(error("no")) == 3


# -- small limits, small numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", DIRECTORIES)
def test_many_calls_are_stored_with_few_open_files(scheme: str, folder: Path) -> None:
    unsynced = "?sync=off"
    (folder / "many").write_text("[1]\n" * 400)
    for arguments in (
        ("enqueue", "app:tasks", "add", "--from-file", "many", "--url", f"{scheme}://./spool{unsynced}"),
        ("publish", f"{scheme}://./spool{unsynced}", "sums", "--lines", "-f", "many"),
    ):
        done = qworker(folder, *arguments, before="ulimit -n 64;")
        assert done.returncode == 0, done.stderr
        assert "400" in done.stdout


def test_one_is_not_many() -> None:
    assert [counted(number, "message") for number in (0, 1, 2, 1000)] == [
        "0 messages",
        "1 message",
        "2 messages",
        "1,000 messages",
    ]


def test_one_message_is_not_called_many(failed: list[str], said: Callable[..., tuple[int, str, str]]) -> None:
    later = said("publish", "file://./spool", "inbox", "--body", "z")[1].strip()
    assert said("explain", "file://./spool", "inbox", later)[1].startswith(
        "it is ready. There is 1 message ahead of it. [ready]\n"
    )
    assert said("purge", "file://./spool", "inbox", "--state", "ready", "--yes")[1] == "purged 2 messages of inbox\n"


def test_purge_without_a_state_leaves_what_is_leased_and_what_is_done(
    said: Callable[..., tuple[int, str, str]],
) -> None:
    url = "file://./spool?keep_done=all"
    with asyncio.Runner() as runner:
        backend = open_backend(url)
        drafts = [Draft(body=b"%d" % number) for number in range(5)]
        runner.run(backend.publish("inbox", [*drafts, Draft(body=b"later", delay=1000.0)]))
        done, failed, _ = runner.run(backend.lease("inbox", 3, 1000.0))
        ends = [
            Settlement(lease=done, action=SettleAction.ACK),
            Settlement(lease=failed, action=SettleAction.FAIL_PERM, error="no"),
        ]
        assert runner.run(backend.settle(ends)) == []
        assert said("purge", url, "inbox", "--yes") == (0, "purged 4 messages of inbox\n", "")
        left = runner.run(backend.stats("inbox"))
        runner.run(backend.aclose())
    assert (left.ready, left.delayed, left.failed, left.leased, left.done) == (0, 0, 0, 1, 1)
