"""`qworker publish`: publish raw messages from the shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import click

from qworker.cli.options import URLCommand, backend_from_url, batches, duration_type, json_option, run
from qworker.cli.output import Progress, echo, print_json, reporting
from qworker.errors import UsageError
from qworker.message import Draft
from qworker.names import check_existing_queue, check_key, counted, to_message_id

__all__ = ["command"]


@click.command("publish", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@click.argument("arguments", nargs=-1, metavar="[ARGUMENT]...")
@click.option(
    "-f", "--file", type=click.File("rb"), metavar="FILE", help="Read the body from FILE. - is standard input."
)
@click.option("--body", metavar="TEXT", help="Body of the message.")
@click.option("--lines", is_flag=True, help="Publish each line of FILE as one message, without its line end.")
@click.option("--delay", type=duration_type(), default="0s", help="Delay before the message is ready, such as 15m.")
@click.option(
    "--priority",
    type=click.IntRange(0, 9),
    metavar="0-9",
    default=0,
    help="Priority from 0 to 9 (first), if the backend has priorities.",
)
@click.option(
    "--unique-key", metavar="KEY", help="Store nothing while a message with this key is ready, delayed or leased."
)
@click.option("--id", "id", metavar="ID", help="Message id. If a message with this id is stored, nothing is stored.")
@json_option
def command(
    url: str,
    queue: str,
    arguments: tuple[str, ...],
    file: BinaryIO | None,
    body: str | None,
    lines: bool,
    delay: float,
    priority: int,
    unique_key: str | None,
    id: str | None,  # noqa: A002
    json: bool,
) -> None:
    r"""Publish a message with any body and print its id.

    The message is stored durably when the command ends. The body is from --file or --body. Without them it is empty.
    Backends that store ARGUMENTs, such as fsq:, deliver them with the message.

    \b
    Examples:
      echo hello | qworker publish file://./spool inbox -f -
      qworker publish file://./spool inbox --body '{"task": "add", "args": [1, 2]}'
      find /srv -name '*.jpg' | qworker publish file://./spool images --lines -f -
    """
    if file is not None and body is not None:
        raise UsageError("--file and --body cannot be combined: use one of them")
    if lines and (file is None or unique_key is not None or id is not None):
        raise UsageError("--lines needs --file, and cannot be combined with --unique-key or --id")
    if unique_key is not None:
        check_key(unique_key)
    if id is not None:
        id = to_message_id(id)  # noqa: A001
    bodies = _bodies(file, body, lines)
    drafts = (
        Draft(body=b, id=id, delay=delay, priority=priority, unique_key=unique_key, argv=arguments) for b in bodies
    )
    ids = run(_publish(url, queue, drafts))
    with reporting("what was published is stored"):
        _report(queue, ids, lines, json)


def _report(queue: str, ids: list[str], lines: bool, json: bool) -> None:
    if json:
        print_json({"queue": queue, "count": len(ids), "ids": ids})
    elif lines:
        echo(f"published {counted(len(ids), 'message')} to {queue}")
    else:
        echo(ids[0])


def _bodies(file: BinaryIO | None, body: str | None, lines: bool) -> Iterator[bytes]:
    if file is None:
        yield (body or "").encode(errors="surrogateescape")
    elif lines:
        for line in file:
            yield line.removesuffix(b"\n").removesuffix(b"\r")
    else:
        yield file.read()


async def _publish(url: str, queue: str, drafts: Iterator[Draft]) -> list[str]:
    ids: list[str] = []
    async with backend_from_url(url, make=True) as backend:
        with Progress("published") as progress:
            for batch in batches(drafts):
                ids += await backend.publish(queue, batch)
                progress.add(len(batch))
    return ids
