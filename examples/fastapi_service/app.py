"""A web service for long calculations. It enqueues them, and runs the worker in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from qworker import Context, Job, Retry, Status, Tasks
from qworker.errors import BackendError, InvalidName, JobCancelled, JobFailed, JobGone
from qworker.logs import configure
from qworker.worker import Worker, WorkerOptions

STATISTICS = Path("statistics.json")
CHUNK = 20_000

tasks = Tasks("file://./spool")


# -- the tasks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """The result of a job."""

    pi: float
    samples: int


@tasks.task(result=timedelta(hours=1))
def estimate(ctx: Context, samples: int) -> Estimate:
    """Estimate pi from random points. A plain function runs in a thread, so requests are answered meanwhile."""
    inside = 0
    for done in range(0, samples, CHUNK):
        if ctx.cancelled():
            raise Retry(f"stopped at sample {done}")  # The outcome of a cancelled handler does not count.
        points = min(CHUNK, samples - done)
        inside += sum(random.random() ** 2 + random.random() ** 2 <= 1 for _ in range(points))
        ctx.progress(done + points, samples)
    return Estimate(pi=4 * inside / samples, samples=samples)


@tasks.every(timedelta(seconds=2))
@tasks.task(queue="statistics")
async def count_jobs() -> None:
    """Count the jobs in each state. One worker of all services does it, every 2 s."""
    counts = Counter([status.state async for status in tasks.jobs(task=estimate)])
    unfinished = STATISTICS.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(counts))
    unfinished.rename(STATISTICS)


# -- the service -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Run a worker while the service runs. Leave this out if you use `qworker run app:tasks`."""
    configure()  # The log of the worker, as `qworker run` writes it.
    # `shutdown_timeout` must be shorter than the grace period of the service manager.
    worker = Worker(tasks, WorkerOptions(concurrency=10, shutdown_timeout=10))
    working = app.state.working = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.drain()
        await working
        await tasks.aclose()


app = FastAPI(lifespan=lifespan)


class Order(BaseModel):
    """The body of a request for an estimate."""

    samples: Annotated[int, Field(ge=1, le=1_000_000_000)]


@app.exception_handler(BackendError)
async def unavailable(request: Request, error: BackendError) -> JSONResponse:
    """Answer 503 if the queue cannot be used, so that the client asks again later."""
    return JSONResponse({"detail": str(error)}, status_code=503)


@app.exception_handler(InvalidName)
async def unknown(request: Request, error: InvalidName) -> JSONResponse:
    """Answer 404 if the id in an address cannot be the id of a job."""
    return JSONResponse({"detail": str(error)}, status_code=404)


@app.post("/estimates", status_code=202)
async def create(order: Order, response: Response) -> dict[str, str]:
    """Start a job. When `enqueue` returns, the call is stored durably."""
    job = await estimate.enqueue(order.samples)
    response.headers["Location"] = f"/estimates/{job.id}"
    return {"id": job.id}


@app.get("/estimates/{job_id}")
async def show(job_id: str) -> dict[str, object]:
    """Show the state and the progress of a job."""
    status = await find(job_id)
    progress = status.progress
    return {
        "state": status.state,
        "code": status.code,
        "done": progress.done if progress else 0,
        "total": progress.total if progress else None,
    }


@app.get("/estimates/{job_id}/result")
async def result(job_id: str, wait: Annotated[float, Field(ge=0, le=30)] = 0) -> Estimate:
    """Return the result of a job, and wait up to `wait` seconds for it."""
    job: Job[Estimate] = estimate.job(job_id)
    try:
        return await job.result(timeout=wait)
    except TimeoutError:
        raise HTTPException(409, "the job has not ended yet") from None
    except JobGone as error:
        raise HTTPException(404, str(error)) from error
    except (JobCancelled, JobFailed) as error:
        raise HTTPException(410, str(error)) from error


@app.delete("/estimates/{job_id}")
async def cancel(job_id: str) -> dict[str, str]:
    """Cancel a job, whether it waits or runs."""
    await find(job_id)
    return {"was": await estimate.job(job_id).cancel(by="the client")}


@app.get("/statistics")
async def statistics() -> dict[str, int]:
    """Return what the schedule has counted last."""
    counts: dict[str, int] = json.loads(STATISTICS.read_text()) if STATISTICS.is_file() else {}
    return counts


@app.get("/livez")
async def live(request: Request) -> JSONResponse:
    """Return 503 if the worker has ended, so that the service is restarted."""
    ended = request.app.state.working.done()
    return JSONResponse({"worker": "ended" if ended else "working"}, status_code=503 if ended else 200)


async def find(job_id: str) -> Status:
    """Return the status of a job that exists."""
    status = await estimate.job(job_id).status()
    if status.state == "gone":
        raise HTTPException(404, "there is no such job, or its result has expired")
    return status
