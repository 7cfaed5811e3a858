"""Count a queue in a process of its own: a pass over a million names stops no event loop.

The process has the lowest priority that leaves it running, opens the store, counts once, and ends. It gets its order
and gives its answer as JSON, because a URL can have a password.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys

import msgspec

from qworker.backend.offers import OffersCount, QueueCount
from qworker.backend.registry import open_backend
from qworker.errors import BackendError, QueueNotFound

__all__ = ["count_in_process", "main"]

_NICE = 10
# The module is imported with the same search path as here, wherever it comes from. Without rich, which structlog would
# import for tracebacks that nobody sees, it takes a fifth less time.
_START = (
    "import sys; sys.path[:] = sys.argv[1:]; sys.modules['rich'] = None;"
    " from qworker.backend.count_process import main; main()"
)


class _Order(msgspec.Struct, frozen=True):
    url: str
    queue: str


class _Answer(msgspec.Struct, frozen=True):
    """What the process found. One of `count` and `problem` is set, or neither if the queue does not exist."""

    cpu_s: float
    count: QueueCount | None = None
    problem: str | None = None


async def count_in_process(url: str, queue: str) -> tuple[QueueCount, float]:
    """Count a queue in a new process and return the count, and the CPU seconds that it took.

    If this call is cancelled, the process is killed.

    Raises:
        QueueNotFound: The queue does not exist.
        BackendError: The process could not count.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _START,
        *sys.path,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await process.communicate(msgspec.json.encode(_Order(url, queue)))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer = msgspec.json.decode(output, type=_Answer)
    except msgspec.DecodeError:
        raise BackendError(
            f"cannot count {queue!r}: the process that counts it ended with status {process.returncode}"
        ) from None
    if answer.problem is not None:
        raise BackendError(answer.problem)
    if answer.count is None:
        raise QueueNotFound(queue)
    return answer.count, answer.cpu_s


def main() -> None:
    """Read an order, count, and print the answer."""
    os.nice(_NICE)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=_Order)
    count, problem = asyncio.run(_count(order))
    used = resource.getrusage(resource.RUSAGE_SELF)
    answer = _Answer(used.ru_utime + used.ru_stime, count, problem)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


async def _count(order: _Order) -> tuple[QueueCount | None, str | None]:
    backend = open_backend(order.url)
    try:
        assert isinstance(backend, OffersCount), order.queue
        return await backend.count(order.queue), None
    except QueueNotFound:
        return None, None
    except (BackendError, OSError) as error:
        return None, str(error)
    finally:
        await backend.aclose()
