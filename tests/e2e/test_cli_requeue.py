"""`qworker requeue` with filters: what matches all of them is requeued, and nothing else."""

from __future__ import annotations

import asyncio
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
        (["--task", "nothing"], set()),
        ([], set(FAILED)),
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
    assert capsys.readouterr().err == "qworker: IDs cannot be combined with --task, --error or --since\n"
