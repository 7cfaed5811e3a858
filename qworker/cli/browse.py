"""`qworker browse`: list messages without changing them."""

from __future__ import annotations

import time

import click
import msgspec

from qworker.cli.filters import filter_options, states_of
from qworker.cli.options import URLCommand, backend_from_url, json_option, limit_option, run, state_option
from qworker.cli.output import echo, format_seconds, format_time, preview_body, print_json, print_table
from qworker.errors import UsageError
from qworker.failures.bulk import list_matching
from qworker.failures.message_filter import MessageFilter
from qworker.logs import one_line
from qworker.message import Query, State, StoredMessage
from qworker.names import check_existing_queue

__all__ = ["command"]


@click.command("browse", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@state_option("List only messages in this state.")
@filter_options
@limit_option("Maximum number of messages in each state.")
@click.option(
    "--after",
    metavar="POSITION",
    help="Start after the message with this `position`, from --json, even if it is gone. Needs --state.",
)
@click.option("--newest", is_flag=True, help="List each state in reverse order, the last message first.")
@json_option
def command(
    url: str,
    queue: str,
    state: str | None,
    matching: MessageFilter,
    limit: int,
    after: str | None,
    newest: bool,
    json: bool,
) -> None:
    r"""List the messages of a queue without changing them.

    Each state is listed in its order: ready messages as they will be leased, delayed ones as they become due, leased
    ones as their leases expire, done and failed ones as they have finished. With filters, only messages that match all
    of them are listed.

    \b
    Examples:
      qworker browse file://./spool thumbs
      qworker browse file://./spool thumbs --state failed --newest --limit 5
      qworker browse file://./spool thumbs --task thumbnail --error TimeoutError --since 2h
      qworker browse file://./spool thumbs --state failed --json
    """
    if after is not None and state is None:
        raise UsageError("--after needs --state: a position belongs to the order of one state")
    queries = [Query(each, after=after, limit=limit, newest=newest) for each in states_of(state, matching)]
    found = run(_browse(url, queue, queries, matching))
    if json:
        print_json([stored.to_text_json() for stored in found])
    elif found:
        _show(found)
    elif matching.is_empty:
        echo(f"nothing {state or 'stored'} in {queue}")
    else:
        echo(f"no message matches in {queue}")


async def _browse(url: str, queue: str, queries: list[Query], matching: MessageFilter) -> list[StoredMessage]:
    async with backend_from_url(url) as backend:
        return [stored for query in queries for stored in await list_matching(backend, queue, query, matching)]


def _show(found: list[StoredMessage]) -> None:
    rows = [
        (s.state.word, s.message.id, str(s.message.tries), format_time(s.message.enqueued_at), _note(s), _body(s))
        for s in found
    ]
    print_table(("state", "id", "tries", "enqueued", "", "body"), rows, texts=("", "body"))


def _body(stored: StoredMessage) -> str:
    message = stored.message
    extra = " ".join(message.argv)
    if message.fields:
        extra = preview_body(msgspec.json.encode(message.fields))
    return preview_body(message.body) or extra


def _note(stored: StoredMessage) -> str:
    if stored.state is State.DELAYED and stored.due_at is not None:
        return f"due in {format_seconds(max(0.0, stored.due_at - time.time()))}"
    if stored.state is State.LEASED:
        return f"by {stored.holder or 'another process'} until {format_time(stored.expires_at)}"
    if stored.state is State.FAILED:
        return one_line(stored.error or "")[:80]
    return ""
