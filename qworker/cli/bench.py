"""`qworker bench`: measure how fast a backend is, in a few seconds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable

import click
import msgspec

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.cli.options import URLCommand, json_option, run
from qworker.cli.output import echo, print_json, print_table
from qworker.message import Draft, Lease, SettleAction, Settlement
from qworker.names import counted

__all__ = ["command"]

_VISIBILITY_S = 600.0


class _Rate(msgspec.Struct, frozen=True):
    """One measured step."""

    step: str
    messages: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.messages / max(self.seconds, 1e-9)


@click.command("bench", cls=URLCommand)
@click.argument("url")
@click.option(
    "--messages", type=click.IntRange(1), metavar="N", default=2000, show_default=True, help="Number of messages."
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    metavar="N",
    default=100,
    show_default=True,
    help="Number of messages in one call.",
)
@click.option("--size", type=click.IntRange(0), default=100, show_default=True, metavar="BYTES", help="Size of a body.")
@json_option
def command(url: str, messages: int, batch: int, size: int, json: bool) -> None:
    r"""Measure how fast a store publishes, leases and acks.

    Creates a queue at URL and deletes it afterwards. Measures the store, and no handlers.

    \b
    Examples:
      qworker bench file://./spool
      qworker bench 'file://./spool?sync=off' --messages 20000 --batch 1000 --json
    """
    durability, rates = run(_bench(url, messages, batch, b"x" * size))
    if json:
        steps = {r.step: {"seconds": r.seconds, "per_second": r.per_second} for r in rates}
        print_json({"durability": durability, "messages": messages, "batch": batch, "size": size, "steps": steps})
        return
    echo(f"durability {durability}, {counted(messages, 'message')} of {counted(size, 'byte')}, {batch} at a time")
    rows = [(r.step, f"{r.per_second:,.0f}", f"{r.seconds / r.messages * 1e6:,.1f}") for r in rates]
    print_table(("step", "messages/s", "us each"), rows)


async def _bench(url: str, messages: int, batch: int, body: bytes) -> tuple[str, list[_Rate]]:
    backend = open_backend(url)
    queue = f"bench-{secrets.token_hex(4)}"
    try:
        await backend.open()
        await backend.create(queue)
        try:
            return backend.durability, await _steps(backend, queue, messages, batch, body)
        finally:
            await backend.delete(queue)
    finally:
        await backend.aclose()


async def _steps(backend: Backend, queue: str, messages: int, batch: int, body: bytes) -> list[_Rate]:
    sizes = [min(batch, messages - start) for start in range(0, messages, batch)]
    leases: list[Lease] = []

    async def publish() -> None:
        for size in sizes:
            await backend.publish(queue, [Draft(body=body) for _ in range(size)])

    async def lease() -> None:
        while len(leases) < messages:
            leases.extend(await backend.lease(queue, batch, _VISIBILITY_S))

    async def ack() -> None:
        for start in range(0, messages, batch):
            await backend.settle(
                [Settlement(lease=one, action=SettleAction.ACK) for one in leases[start : start + batch]]
            )

    rates = [await _timed("publish", messages, publish), await _timed("lease", messages, lease)]
    rates.append(await _timed("ack", messages, ack))
    return [*rates, _Rate("all", messages, sum(rate.seconds for rate in rates))]


async def _timed(step: str, messages: int, work: Callable[[], Awaitable[None]]) -> _Rate:
    began = time.perf_counter()
    await work()
    return _Rate(step, messages, time.perf_counter() - began)
