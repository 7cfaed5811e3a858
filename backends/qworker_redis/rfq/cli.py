"""`qworker rfq`: the commands of the rfq package, with its flags, its variables and its output."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import click

from qworker import __version__
from qworker.cli.options import Command, Group, run
from qworker.cli.output import echo, print_json, reporting
from qworker.errors import InvalidURL, UsageError
from qworker.message import Lease, SettleAction, Settlement
from qworker.names import check_existing_queue
from qworker.url import BackendURL
from qworker_redis.rfq.backend import RfqBackend
from qworker_redis.rfq.commands import List

__all__ = ["command"]

F = TypeVar("F", bound=Callable[..., Any])

_VISIBILITY = 30.0
_WAIT = 5.0


def _topic(function: F) -> F:
    return click.option(
        "-t", "--topic", required=True, type=check_existing_queue, metavar="TOPIC", help="Name of the topic."
    )(function)


def _queue(function: F) -> F:
    option = click.option(
        "-q",
        "--queue",
        help="Queue of the topic.",
        type=click.Choice(["backlog", "nextlog"]),
        default="backlog",
        show_default=True,
    )
    return option(function)


def _place(function: F) -> F:
    """Add `--url` and `--json`, which rfq does not have."""
    function = click.option("--json", "json", is_flag=True, help="Print one JSON document instead of text.")(function)
    return click.option(
        "--url",
        default="rfq:",
        metavar="URL",
        allow_from_autoenv=False,
        help="URL rfq://host:port/db, instead of RFQ_REDIS_HOST and RFQ_REDIS_PORT.",
    )(function)


@asynccontextmanager
async def _open_backend(url: str) -> AsyncGenerator[RfqBackend]:
    """Open the Redis of a URL, or of the variables of rfq.

    Raises:
        InvalidURL: It is not an rfq: URL.
        BackendUnavailable: The server does not answer.
    """
    parsed = BackendURL.parse(url)
    if parsed.scheme != "rfq":
        raise InvalidURL(f"{parsed.masked} is not a valid rfq: URL: write rfq://host:6379/0")
    backend = RfqBackend.from_url(parsed)
    try:
        await backend.open()
        yield backend
    finally:
        await backend.aclose()


def _print_lines(lines: list[str], as_json: bool) -> None:
    if as_json:
        print_json(lines)
        return
    for line in lines:
        echo(line)


@click.group("rfq", cls=Group)
def command() -> None:
    r"""Run the commands of the rfq package on the same Redis.

    RFQ_REDIS_HOST and RFQ_REDIS_PORT name the Redis. Without them it is localhost and 6379.

    \b
    Examples:
      qworker rfq publish -t tiles -m '{"tile": "T32U0"}'
      qworker rfq consume -t tiles
      qworker rfq info
    """


@command.command("version", cls=Command)
@_place
def version_command(url: str, json: bool) -> None:
    """Print the versions of qworker and of the server."""

    async def asked() -> str:
        async with _open_backend(url) as backend:
            return await backend.commands.server_version()

    found = run(asked())
    if json:
        print_json({"qworker": __version__, "redis": found})
        return
    echo(f"qworker {__version__}")
    echo(f"redis {found}")


@command.command("info", cls=Command)
@_place
def info_command(url: str, json: bool) -> None:
    """Print how many messages of each topic are waiting and running."""

    async def counted() -> dict[str, tuple[int, int]]:
        async with _open_backend(url) as backend:
            return {topic: await backend.commands.lengths(topic) for topic in await backend.commands.topics()}

    found = run(counted())
    if json:
        print_json({topic: {"backlog": n, "nextlog": m} for topic, (n, m) in found.items()})
        return
    for topic, (backlog, nextlog) in found.items():
        say_raw(f"topic\t\t{topic}")
        say_raw(f"backlog\t\t{backlog}\t\t{_bar(backlog)}")
        say_raw(f"nextlog\t\t{nextlog}\t\t{_bar(nextlog)}")
        say_raw("")


def say_raw(line: str) -> None:
    """Print a line that qworker has made, with its tabs."""
    click.echo(line)


def _bar(count: int) -> str:
    """Return a bar with about 140 characters for a million."""
    return int(10 * math.log(count + 1)) * "#"


@command.command("list-topics", cls=Command)
@_place
def list_topics_command(url: str, json: bool) -> None:
    """List the topics that have messages."""

    async def listed() -> list[str]:
        async with _open_backend(url) as backend:
            return await backend.commands.topics()

    _print_lines(run(listed()), json)


@command.command("list-queue", cls=Command)
@_topic
@_queue
@_place
def list_queue_command(topic: str, queue: str, url: str, json: bool) -> None:
    """List the ids in one of the queues of a topic."""

    async def listed() -> list[str]:
        async with _open_backend(url) as backend:
            return await backend.commands.list_ids(topic, cast("List", queue))

    _print_lines(run(listed()), json)


@command.command("purge-queue", cls=Command)
@_topic
@_queue
@_place
def purge_queue_command(topic: str, queue: str, url: str, json: bool) -> None:
    """Delete the messages of one queue of a topic and print their ids."""

    async def purged() -> list[str]:
        async with _open_backend(url) as backend:
            return await backend.commands.purge_list(topic, cast("List", queue))

    _print_lines(run(purged()), json)


@command.command("publish", cls=Command)
@_topic
@click.option("-m", "--message", required=True, metavar="JSON", help="Message to publish: a JSON object of texts.")
@click.option("-f", "--front", is_flag=True, help="Add the message to the front of the queue.")
@_place
def publish_command(topic: str, message: str, front: bool, url: str, json: bool) -> None:
    """Publish a message and print its id."""
    fields = _fields(message)

    async def published() -> str:
        async with _open_backend(url) as backend:
            return await backend.commands.publish(topic, fields, front=front)

    message_id = run(published())
    with reporting("the message is stored"):
        _print_lines([message_id], json)


def _fields(text: str) -> dict[str, str]:
    """Return the map of a message. Numbers become text, as in rfq.

    Raises:
        UsageError: It is not a map.
    """
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--message is not valid JSON: {error}") from error
    if not isinstance(found, dict) or not found:
        raise UsageError('--message must be an object of texts that is not empty: write \'{"name": "text"}\'')
    fields: dict[str, str] = {}
    for name, value in cast("dict[str, object]", found).items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UsageError(f"the field {name!r} is not a text: messages of rfq are objects of texts")
        fields[name] = str(value)
    return fields


@command.command("consume", cls=Command)
@_topic
@_place
def consume_command(topic: str, url: str, json: bool) -> None:
    """Wait for a message, print it and remove it."""

    async def consumed() -> None:
        async with _open_backend(url) as backend:
            leases: list[Lease] = []
            while not leases:
                leases = await backend.lease(topic, 1, _VISIBILITY, _WAIT)
            message = leases[0].message
            fields = await backend.commands.peek(topic, message.id) or {}
            if json:
                print_json(fields)
            else:
                echo(repr(fields))
            await backend.settle([Settlement(lease=leases[0], action=SettleAction.ACK)])

    try:
        run(consumed())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return


@command.command("harvest", cls=Command)
@_topic
@_place
def harvest_command(topic: str, url: str, json: bool) -> None:
    """Move messages from nextlog back to backlog and print their ids.

    Run it only if the consumers of these messages are dead.
    """

    async def harvested() -> list[str]:
        async with _open_backend(url) as backend:
            return await backend.commands.harvest(topic)

    _print_lines(run(harvested()), json)


@command.command("peek", cls=Command)
@_topic
@click.option("-m", "--msgid", required=True, metavar="ID", help="Id of the message.")
@_place
def peek_command(topic: str, msgid: str, url: str, json: bool) -> int:
    """Print a message without removing it.

    Exit status 1: there is no such message.
    """
    del json

    async def seen() -> dict[str, str] | None:
        async with _open_backend(url) as backend:
            return await backend.commands.peek(topic, msgid)

    fields = run(seen())
    if fields is None:
        return 1
    echo(_dump(fields))
    return 0


def _dump(fields: dict[str, str]) -> str:
    # This is a separate function, because in a command `json` is the option.
    return json.dumps(fields)


@command.command("completions", cls=Command)
@click.argument("shell", type=click.Choice(["bash"]))
def completions_command(shell: str) -> None:
    """Print completions for a shell in which rfq is an alias of `qworker rfq`."""
    del shell
    echo(f"complete -W '{' '.join(command.commands)}' rfq")
