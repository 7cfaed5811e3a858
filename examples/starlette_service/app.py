"""A web service that enqueues, and runs the worker inside of its own process.

Everything here but the class's name is the same with FastAPI: `FastAPI(lifespan=lifespan)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qworker import Tasks
from qworker.errors import BackendError
from qworker.worker import Worker, WorkerOptions

tasks = Tasks("file://./spool")
GREETED = Path("greeted")


@tasks.task
async def greet(name: str) -> None:
    """Greet somebody, a little later than the request that asked for it."""
    await asyncio.sleep(0.01)
    GREETED.mkdir(exist_ok=True)
    (GREETED / f"{name}.txt").write_text(f"Hello, {name}!\n")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    """A worker from the service's start to its end. Leave it out where `qworker run app:tasks` runs elsewhere."""
    # Shorter than the time that whatever stops the service gives it.
    worker = Worker(tasks, WorkerOptions(concurrency=10, shutdown_timeout=10))
    working = app.state.working = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.drain()
        await working
        await tasks.aclose()


async def create(request: Request) -> Response:
    """POST /greetings/NAME: it is stored durably when this answers."""
    name = request.path_params["name"]
    if not name.isalnum():
        return JSONResponse({"error": "a name has letters and digits only"}, status_code=400)
    try:
        job = await greet.enqueue(name)
    except BackendError as error:
        return JSONResponse({"error": str(error)}, status_code=503)
    return JSONResponse({"id": job.id}, status_code=202)


async def show(request: Request) -> Response:
    """GET /greetings/NAME."""
    path = GREETED / f"{request.path_params['name']}.txt"
    if not path.is_file():
        return JSONResponse({"error": "not yet"}, status_code=404)
    return JSONResponse({"greeting": path.read_text().strip()})


async def live(request: Request) -> Response:
    """GET /livez: a service whose worker has ended should be restarted."""
    ended = request.app.state.working.done()
    return JSONResponse({"worker": "ended" if ended else "working"}, status_code=503 if ended else 200)


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/greetings/{name}", create, methods=["POST"]),
        Route("/greetings/{name}", show, methods=["GET"]),
        Route("/livez", live),
    ],
)
