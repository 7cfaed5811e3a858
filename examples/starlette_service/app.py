"""A web service that enqueues calls and runs the worker in its own process.

With FastAPI only the name of the class is different: `FastAPI(lifespan=lifespan)`.
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
    """Store a greeting, after the request has finished."""
    await asyncio.sleep(0.01)
    GREETED.mkdir(exist_ok=True)
    (GREETED / f"{name}.txt").write_text(f"Hello, {name}!\n")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    """Run a worker while the service runs. Leave this out if you use `qworker run app:tasks`."""
    # This must be shorter than the grace period of the service manager.
    worker = Worker(tasks, WorkerOptions(concurrency=10, shutdown_timeout=10))
    working = app.state.working = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.drain()
        await working
        await tasks.aclose()


async def create(request: Request) -> Response:
    """Enqueue a greeting (POST /greetings/NAME). The call is stored durably before the response."""
    name = request.path_params["name"]
    if not name.isalnum():
        return JSONResponse({"error": "a name has letters and digits only"}, status_code=400)
    try:
        job = await greet.enqueue(name)
    except BackendError as error:
        return JSONResponse({"error": str(error)}, status_code=503)
    return JSONResponse({"id": job.id}, status_code=202)


async def show(request: Request) -> Response:
    """Show a greeting (GET /greetings/NAME)."""
    path = GREETED / f"{request.path_params['name']}.txt"
    if not path.is_file():
        return JSONResponse({"error": "not yet"}, status_code=404)
    return JSONResponse({"greeting": path.read_text().strip()})


async def live(request: Request) -> Response:
    """Return 503 if the worker has ended, so that the service is restarted (GET /livez)."""
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
