"""`qworker remove`: delete messages by their ids, or failed ones by a filter."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from qworker.cli.by_id import change_by_id, count_by_id, print_change_by_id, verb_of
from qworker.cli.filters import FILTERS, filter_options
from qworker.cli.options import URLCommand, backend_from_url, json_option, run
from qworker.cli.output import echo, print_json
from qworker.errors import UsageError
from qworker.failures.bulk import count_matching, remove_matching, until_now
from qworker.failures.message_filter import MessageFilter
from qworker.names import check_existing_queue, counted

__all__ = ["command"]


@click.command("remove", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@filter_options
@click.option("--dry-run", is_flag=True, help="Count the messages, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def command(
    url: str, queue: str, ids: tuple[str, ...], matching: MessageFilter, dry_run: bool, yes: bool, json: bool
) -> int:
    r"""Delete messages of a queue permanently.

    Deletes the messages with the given IDs, in any state, or the failed messages that match all filters. `qworker
    purge` deletes all messages in a state. Asks for confirmation on a terminal, and needs --yes elsewhere. Exit status
    1: there is no message with one of the IDs. It is named, and the others are deleted.

    \b
    Examples:
      qworker remove file://./spool thumbs 20261121071038_123456789_4242_host-7f3a9b21 --yes
      qworker remove file://./spool thumbs --task thumbnail --error "no such file" --dry-run
      qworker remove file://./spool thumbs --group 3f0c9a51d2 --yes
    """
    wanted = list(dict.fromkeys(ids))
    if bool(wanted) == (not matching.is_empty):
        raise UsageError(f"remove takes IDs, or {FILTERS}: use purge to delete all messages in a state")
    if not (yes or dry_run or sys.stdin.isatty()):
        raise UsageError("remove deletes messages permanently: add --yes to confirm")
    if wanted:
        if not (yes or dry_run):
            _confirm(len(wanted), queue)
        changed = run(_remove_by_id(url, queue, wanted, dry_run))
        return print_change_by_id("remove", queue, wanted, changed, dry_run=dry_run, json=json)
    count = run(_remove_matching(url, queue, matching, dry_run, yes))
    if json:
        print_json({"queue": queue, "removed": count, "dry_run": dry_run})
    else:
        note = "" if count else ": no failed message matches"
        echo(f"{verb_of('remove', dry_run)} {counted(count, 'message')} of {queue}{note}")
    return 0


def _confirm(count: int, queue: str) -> None:
    click.confirm(f"Delete {counted(count, 'message')} of {queue} permanently?", abort=True, err=True)


async def _remove_by_id(url: str, queue: str, ids: Sequence[str], dry_run: bool) -> tuple[int, dict[str, str]]:
    async with backend_from_url(url) as backend:
        if dry_run:
            return await count_by_id(backend, queue, ids, failed_only=False)
        return await change_by_id(backend, backend.remove, queue, ids, failed_only=False)


async def _remove_matching(url: str, queue: str, matching: MessageFilter, dry_run: bool, yes: bool) -> int:
    async with backend_from_url(url) as backend:
        # What fails during the question is not deleted.
        matching = await until_now(backend, queue, matching)
        if dry_run or not yes:
            count = await count_matching(backend, queue, matching)
            if dry_run or not count:
                return count
            _confirm(count, queue)
        return await remove_matching(backend, queue, matching)
