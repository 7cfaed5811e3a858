"""Schedules on the command line, and what explain and top say of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from qworker import Tasks
from qworker.cli.main import main
from qworker.schedules.records import read_definition
from qworker.testing import FakeClock, run_until_idle
from qworker.testing.helpers import enqueued_calls
from qworker.tools.explain import explain
from qworker.worker import Worker, WorkerOptions


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/spool"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_a_schedule_can_be_put_paused_run_and_removed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedules", url]
    put = [*command, "put", "acme", "--task", "report", "--args", '["long"]', "--cron", "0 6 * * *"]
    assert said(capsys, *put, "--tz", "Europe/Berlin") == "acme is put: 0 6 * * * (Europe/Berlin)\n"
    (row,) = json.loads(said(capsys, *command, "--json"))
    assert (row["name"], row["queue"], row["task"], row["outcome"]) == ("acme", "default", "report", None)
    assert said(capsys, *command, "pause", "acme") == "acme is paused: it does not tick until it is resumed\n"
    assert "paused" in said(capsys, *command)
    assert said(capsys, *command, "resume", "acme") == "acme is resumed\n"
    assert said(capsys, *command, "run", "acme").startswith("acme is enqueued: ")
    ran = json.loads(said(capsys, *command, "run", "acme", "--json"))
    assert said(capsys, "job", url, "default", ran["id"]).startswith(f"{ran['id']}: ready")
    assert "also kept: 1 schedule\n" in said(capsys, "stats", url, "default")
    assert "acme (0 6 * * * (Europe/Berlin)): last not yet, next " in said(capsys, "top", url, "--once")
    assert json.loads(said(capsys, *command, "remove", "acme", "--json")) == {"schedule": "acme", "action": "remove"}
    assert said(capsys, *command).startswith("no schedules")
    assert main([*command, "remove", "acme"]) == 2
    assert "there is no schedule 'acme'" in capsys.readouterr().err


def test_a_schedule_in_the_code_is_listed_and_cannot_be_removed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = Tasks(url)

    @tasks.every(3600)
    @tasks.task
    async def hourly() -> None: ...

    asyncio.run(run_until_idle(tasks))
    capsys.readouterr()
    assert "in code" in said(capsys, "schedules", url)
    for action in (["remove", "hourly"], ["put", "hourly", "--task", "x", "--every", "5s"]):
        assert main(["schedules", url, *action]) == 2
        assert "schedule 'hourly' is defined in code" in capsys.readouterr().err


async def test_explain_names_the_tick_of_a_message(url: str) -> None:
    clock = FakeClock(1_795_428_900.0)
    tasks = Tasks(url)
    tasks.clock = clock

    @tasks.cron("30 11 * * *", tz="Europe/Berlin")
    @tasks.task
    async def daily() -> None: ...

    options = WorkerOptions(burst=True, queues=("elsewhere",))
    await Worker(tasks, options).run()
    clock.advance(3600)
    await Worker(tasks, options).run()
    (call,) = await enqueued_calls(tasks)
    backend: Any = await tasks.backend()
    found = [reason for reason in (await explain(backend, "default", call.id)).reasons if reason.code == "tick"]
    assert [reason.text for reason in found] == ["it is the tick 2026-11-23 11:30 (Europe/Berlin) of schedule daily"]
    await run_until_idle(tasks)
    gone = await explain(backend, "default", call.id)
    assert "it is the tick 2026-11-23 10:30 (UTC) of schedule daily" in [reason.text for reason in gone.reasons]


def test_a_definition_of_another_release_that_cannot_be_read_is_left_out() -> None:
    assert read_definition(None) is None
