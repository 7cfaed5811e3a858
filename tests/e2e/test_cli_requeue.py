"""`qworker requeue` with filters: what matches all of them is requeued, and nothing else."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.message import Draft, SettleAction, Settlement
from qworker.testing.clock import FakeClock

QUEUE = "work"
# What has failed: its task, its error, and how many seconds ago.
FAILED = {
    "picture-1": ("resize", "TimeoutError: the server was slow", 7200.0),
    "picture-2": ("resize", "TimeoutError: the server was slow", 60.0),
    "picture-3": ("resize", "ValueError: no picture", 60.0),
    "letter-1": ("send", "TimeoutError: no answer", 60.0),
    "bytes-1": (None, "TimeoutError: no answer", 60.0),
}


@pytest.fixture(params=["file", "sq", "vsqs", "fsq"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store whose queue has what has failed, and one message that is ready."""
    url = f"{request.param}://{tmp_path}"
    asyncio.run(_fill(url))
    return url


async def _fill(url: str) -> None:
    for name, (task, error, ago) in FAILED.items():
        backend = open_backend(url, clock=FakeClock(time.time() - ago))
        try:
            await backend.create(QUEUE)
            await backend.publish(QUEUE, [Draft(body=_body(name, task))])
            (lease,) = await backend.lease(QUEUE, 1, 30.0)
            await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=error)])
        finally:
            await backend.aclose()
    backend = open_backend(url)
    try:
        await backend.publish(QUEUE, [Draft(body=_body("ready", "resize"))])
    finally:
        await backend.aclose()


def _body(name: str, task: str | None) -> bytes:
    return name.encode() if task is None else json.dumps({"task": task, "args": [name]}).encode()


def requeued(url: str, capsys: pytest.CaptureFixture[str], *options: str) -> set[str]:
    """Which messages are ready after a requeue that says how many it has requeued."""
    assert main(["requeue", url, QUEUE, *options, "--json"]) == 0
    count = json.loads(capsys.readouterr().out)["requeued"]
    assert main(["browse", url, QUEUE, "--state", "ready", "--json"]) == 0
    bodies = [json.dumps(message) for message in json.loads(capsys.readouterr().out)]
    names = {name for name in FAILED for body in bodies if name in body}
    assert len(names) == count
    return names


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--task", "resize"], {"picture-1", "picture-2", "picture-3"}),
        (["--task", "resize", "--task", "send"], {"picture-1", "picture-2", "picture-3", "letter-1"}),
        (["--error", "timeouterror"], {"picture-1", "picture-2", "letter-1", "bytes-1"}),
        (["--task", "resize", "--error", "no picture", "--since", "1h"], {"picture-3"}),
        (["--task", "nothing"], set[str]()),
        (list[str](), set(FAILED)),
    ],
)
def test_what_matches_every_filter_is_requeued(
    url: str, options: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert requeued(url, capsys, *options) == expected


# On file: and fsq: a message has failed when its file was renamed, whatever a clock of a test says.
@pytest.mark.parametrize("url", ["sq", "vsqs"], indirect=True)
def test_what_has_failed_earlier_is_left_alone(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert requeued(url, capsys, "--since", "1h", "--task", "resize") == {"picture-2", "picture-3"}


def test_ids_and_filters_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requeue", f"file://{tmp_path}", QUEUE, "x", "--task", "resize"]) == 2
    assert (
        capsys.readouterr().err == "qworker: IDs cannot be combined with --task, --error, --code, --since or --group\n"
    )


# -- the same filters in other commands ------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    """What a command prints on both streams."""
    assert main(words) == status
    said = capsys.readouterr()
    return said.out, said.err


# One store: tests/unit/test_failures.py has the filters on all of them.
@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_group_is_listed_browsed_exported_requeued_and_removed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    groups = json.loads(run(capsys, "failures", url, QUEUE, "--json")[0])
    (slow,) = [one for one in groups if one["error"] == "TimeoutError: the server was slow"]
    assert (slow["task"], slow["code"], slow["error_type"], slow["count"]) == ("resize", "error", "TimeoutError", 2)
    assert slow["first_at"] <= slow["last_at"]
    assert [one["count"] for one in groups] == [2, 1, 1, 1]
    assert json.loads(run(capsys, "failures", url, "--json")[0]) == groups
    table = run(capsys, "failures", url, QUEUE, "--limit", "1")[0].splitlines()
    assert slow["group"] in table[1]
    assert table[2] == "3 more groups: add --limit to show them"
    chosen = ("--group", slow["group"])
    browsed = json.loads(run(capsys, "browse", url, QUEUE, *chosen, "--json")[0])
    exported = [json.loads(line) for line in run(capsys, "export", url, QUEUE, *chosen)[0].splitlines()]
    assert sorted(one["id"] for one in browsed) == sorted(one["id"] for one in exported)
    assert len(run(capsys, "export", url, QUEUE)[0].splitlines()) == len(FAILED) + 1
    one = browsed[0]["id"]
    assert run(capsys, "requeue", url, QUEUE, *chosen, "--dry-run")[0] == "would requeue 2 messages of work\n"
    assert run(capsys, "remove", url, QUEUE, one, "--dry-run")[0] == "would remove 1 message of work\n"
    assert run(capsys, "remove", url, QUEUE, one, "--yes")[0] == "removed 1 message of work\n"
    assert run(capsys, "remove", url, QUEUE, *chosen, "--yes", "--json")[0] == (
        '{"queue":"work","removed":1,"dry_run":false}\n'
    )
    assert run(capsys, "failures", url, QUEUE, *chosen)[0] == "no failed message matches in work\n"


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_filter_that_matches_nothing_says_so(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    none = ("--error", "never")
    assert run(capsys, "requeue", url, QUEUE, *none)[0] == "requeued 0 messages of work: no failed message matches\n"
    assert run(capsys, "remove", url, QUEUE, *none, "--yes")[0] == (
        "removed 0 messages of work: no failed message matches\n"
    )
    assert run(capsys, "browse", url, QUEUE, *none)[0] == "no message matches in work\n"
    assert run(capsys, "export", url, QUEUE, *none) == ("", "no message matches in work\n")
    assert run(capsys, "failures", url, *none)[0] == "no failed message matches\n"


@pytest.mark.parametrize("url", ["file"], indirect=True)
@pytest.mark.parametrize("answer", ["n", "y"])
def test_remove_counts_and_asks_on_a_terminal(
    url: str, answer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    out, err = run(capsys, "remove", url, QUEUE, "--task", "resize", status=0 if answer == "y" else 130)
    assert "Delete 3 messages of work permanently? [y/N]: " in err
    assert out == ("removed 3 messages of work\n" if answer == "y" else "")
    left = json.loads(run(capsys, "browse", url, QUEUE, "--state", "failed", "--json")[0])
    assert len(left) == len(FAILED) - (3 if answer == "y" else 0)


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_poison_is_left_out_and_counted_unless_it_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def poison() -> None:
        backend = open_backend(url)
        try:
            lease = (await backend.lease(QUEUE, 1, 30.0))[0]
            error = "code: poison\nthe handler's process died"
            await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=error)])
        finally:
            await backend.aclose()

    asyncio.run(poison())
    assert run(capsys, "requeue", url, QUEUE)[0].splitlines() == [
        "requeued 5 messages of work",
        "left out 1 poison message: add --code poison to requeue them",
    ]
    assert run(capsys, "requeue", url, QUEUE, "--code", "poison")[0] == "requeued 1 message of work\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["remove", "URL", QUEUE], "remove takes IDs, or --task, --error, --code, --since or --group: use purge to"),
        (["remove", "URL", QUEUE, "x", "--task", "resize"], "remove takes IDs, or --task, --error, --code, --since or"),
        (["remove", "URL", QUEUE, "x"], "remove deletes messages permanently: add --yes to confirm"),
        (
            ["browse", "URL", QUEUE, "--state", "ready", "--error", "x"],
            "--error, --code and --group need --state",
        ),
        (
            ["export", "URL", QUEUE, "--state", "leased", "--since", "2h"],
            "--since needs --state done or failed",
        ),
        (["failures", "URL", QUEUE, "--error", ""], "error must not be empty: leave it out to match every error"),
        (
            ["requeue", "URL", QUEUE, "--code", "oops"],
            "Invalid value for '--code': 'oops' is not one",
        ),
        (
            ["requeue", "URL", QUEUE, "--since", "soon"],
            "'soon' is not a valid duration: use seconds (90)",
        ),
    ],
)
def test_a_mistake_is_one_line(words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, *[f"file://{tmp_path}" if word == "URL" else word for word in words], status=2)
    assert out == ""
    assert text in err.splitlines()[-1]
