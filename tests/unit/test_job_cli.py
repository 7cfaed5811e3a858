"""`qworker job` and `qworker stats`: what they say of jobs, on every store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qworker import Context, Fail, Tasks
from qworker.cell import Cell, CellOp
from qworker.cli.main import main
from qworker.cli.top.sampler import Sampler
from qworker.cli.top.table import running_line
from qworker.errors import PermissionDenied
from qworker.jobs import kept
from qworker.testing.helpers import run_until_idle
from qworker.testing.wait_until import wait_until
from qworker.worker import Worker, WorkerOptions
from tests.unit.test_jobs import working

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(list(arguments))
        output = capsys.readouterr()
        return status, output.out, output.err

    return call


@pytest.fixture
def tasks(tmp_path: Path) -> Tasks:
    tasks = Tasks(f"file://{tmp_path}/spool?sync=off")

    @tasks.task(result=60)
    async def double(n: int) -> int:
        if n < 0:
            raise Fail("n is negative")
        return 2 * n

    return tasks


def finished(tasks: Tasks, n: int) -> str:
    """Return the id of a job that has ended."""

    async def run() -> str:
        job = await tasks["double"].enqueue(n)
        await run_until_idle(tasks)
        await tasks.aclose()
        return job.id

    return asyncio.run(run())


def test_the_end_of_a_job_is_a_value_or_one_json_document(tasks: Tasks, run: Run) -> None:
    done, failed = finished(tasks, 21), finished(tasks, -1)
    assert run("job", tasks.url, "default", done, "--wait") == (0, "42\n", "")
    status, out, _ = run("job", tasks.url, "default", done, "--wait", "--json")
    assert (status, json.loads(out)) == (0, {"id": done, "queue": "default", "result": 42})
    status, out, err = run("job", tasks.url, "default", failed, "--wait")
    assert (status, out, err) == (1, "", "qworker: the job failed (error): n is negative [JobFailed]\n")
    status, out, _ = run("job", tasks.url, "default", failed, "--wait", "--json")
    told = json.loads(out)
    assert (status, told["id"], told["error"], told["code"]) == (
        1,
        failed,
        "the job failed (error): n is negative",
        "error",
    )


@pytest.mark.parametrize("scheme", ["vsqs", "fsq", "mq", "sq"])
def test_a_store_without_cells_shows_a_job_and_says_in_one_line_what_it_cannot(
    scheme: str, tmp_path: Path, run: Run
) -> None:
    url = f"{scheme}://{tmp_path}/root"
    body = tmp_path / "body"
    body.write_text("x")
    assert run("create", url, "q")[0] == 0
    status, out, _ = run("publish", url, "q", "--file", str(body))
    message_id = out.split()[-1]
    assert status == 0
    assert run("job", url, "q", message_id) == (0, f"{message_id}: ready\n", "")
    status, out, _ = run("job", url, "q", message_id, "--json")
    assert (status, json.loads(out)["id"], json.loads(out)["state"]) == (0, message_id, "ready")
    for command, what in (
        (["job", url, "q", message_id, "--wait"], "results"),
        (["schedules", url], "schedules"),
        (["schedules", url, "run", "daily"], "schedules"),
    ):
        status, out, err = run(*command)
        assert (status, out, err.count("\n")) == (2, "", 1), command
        assert err.startswith(f"qworker: {scheme}: does not support {what}"), command
        assert "use file: or redis:" in err
    assert "also kept" not in run("stats", url, "q")[1]
    assert json.loads(run("top", url, "--once", "--interval", "0.1", "--json")[1])["running"] == []


def test_stats_counts_what_the_jobs_of_one_queue_keep_and_nothing_where_they_keep_nothing(
    tasks: Tasks, run: Run
) -> None:
    assert run("create", tasks.url, "plain")[0] == 0
    for n in range(3):
        finished(tasks, n)
    assert "also kept" not in run("stats", tasks.url, "plain")[1]
    assert "kept" not in json.loads(run("stats", tasks.url, "plain", "--json")[1])
    assert run("stats", tasks.url, "default")[1].splitlines()[-1] == "also kept: 3 results"
    assert json.loads(run("stats", tasks.url, "default", "--json")[1])["kept"] == {"results": 3}


async def test_a_count_ends_at_its_limit(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_COUNTED", 250)
    backend = await tasks.backend()
    await backend.cells("q", [CellOp("put", Cell("results", f"{n:03}")) for n in range(260)])
    assert await kept.count_kept(backend, "q") == {"results": 250}
    await backend.cells("q", [CellOp("delete", Cell("results", f"{n:03}")) for n in range(200)])
    assert await kept.count_kept(backend, "q") == {"results": 60}
    await tasks.aclose()


async def test_top_shows_the_progress_of_running_jobs_and_of_no_others(tasks: Tasks) -> None:
    reported = False

    @tasks.task(result=60)
    async def copy(context: Context) -> None:
        nonlocal reported
        context.progress(3, 10, "page 3")
        reported = True
        await context.stopping.wait()

    backend = await tasks.backend()
    async with working(tasks) as worker:
        sampler = Sampler(backend)
        job = await copy.enqueue()
        await wait_until(lambda: reported)
        while not (running := (await sampler.sample()).running):
            pass
        (shown,) = running
        assert shown.started_at is not None
        line = running_line(shown, shown.started_at + 12)
        assert line == f"copy {job.id} in default: 3/10, page 3, running for 12.0 s"
        worker.drain()
    assert (await sampler.sample()).running == []
    await tasks.aclose()


async def test_top_looks_once_at_a_queue_whose_jobs_report_no_progress(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await tasks.backend()
    await tasks["double"].enqueue(1)
    (lease,) = await backend.lease("default", 1, 60)
    looks: list[str] = []
    cells = type(backend).cells

    async def counted(self, queue, ops):
        looks.extend(op.do for op in ops if not op.cell.group.startswith("schedules"))
        return await cells(self, queue, ops)

    monkeypatch.setattr(type(backend), "cells", counted)
    sample = await Sampler(backend).sample()
    assert (sample.rows[0].leased, sample.running, looks) == (1, [], ["list"])
    assert lease.message.queue == "default"
    await Worker(tasks, WorkerOptions(burst=True, queues=("elsewhere",))).run()
    await tasks.aclose()


async def test_top_shows_the_counts_of_a_queue_whose_progress_cannot_be_read(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await tasks.backend()
    await tasks["double"].enqueue(1)
    await backend.lease("default", 1, 60)

    async def denied(self, queue, ops):
        raise PermissionDenied("cells/ belongs to another user")

    monkeypatch.setattr(type(backend), "cells", denied)
    sample = await Sampler(backend).sample()
    assert (sample.problem, sample.running, [row.leased for row in sample.rows]) == (None, [], [1])
    await tasks.aclose()
