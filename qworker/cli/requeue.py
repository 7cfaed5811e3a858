"""`qworker requeue`: make failed messages ready again."""

from __future__ import annotations

from collections.abc import Sequence

import click

from qworker.app import Tasks
from qworker.cli.app_loader import import_tasks, load_app
from qworker.cli.by_id import change_by_id, count_by_id, print_change_by_id, verb_of
from qworker.cli.filters import FILTERS, filter_options
from qworker.cli.options import URLCommand, backend_from_url, json_option, run
from qworker.cli.output import echo, print_json
from qworker.errors import UsageError
from qworker.failures.bulk import Requeued, requeue_matching
from qworker.failures.edit import Arguments, Edited, arguments_of, enqueue_edited, read_arguments
from qworker.failures.message_filter import MessageFilter
from qworker.jobs.cancel import finish_all_cancels
from qworker.jobs.source import JobSource
from qworker.message import StoredMessage
from qworker.names import check_existing_queue, counted, id_forms

__all__ = ["command"]

_EXIT_NOT_SAVED = 1


@click.command("requeue", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@filter_options
@click.option("--dry-run", is_flag=True, help="Count the messages, and change nothing.")
@click.option("--edit", is_flag=True, help="Open the arguments of a call in $EDITOR, and enqueue it with the new ones.")
@click.option("--app", metavar="MODULE:ATTRIBUTE", help="App whose signature the arguments of --edit must fit.")
@json_option
def command(
    url: str,
    queue: str,
    ids: tuple[str, ...],
    matching: MessageFilter,
    dry_run: bool,
    edit: bool,
    app: str | None,
    json: bool,
) -> int:
    r"""Make failed messages of a queue ready again, with tries 0.

    Requeues the failed messages with the given IDs, or those that match all filters, or every one. Without IDs, --code
    or --group it leaves out messages that may have killed their workers (poison) and cancelled ones, and counts them.
    Messages that fail meanwhile are not changed. Exit status 1: there is no message with one of the IDs, or it has not
    failed. It is named, and the others are requeued.

    With --edit, the call is enqueued as a new message with the id ID:e1, and the failed one is removed.

    \b
    Examples:
      qworker requeue file://./spool thumbs 20261121071038_123456789_4242_host-7f3a9b21
      qworker requeue file://./spool thumbs --task thumbnail --error TimeoutError --since 2h --dry-run
      qworker requeue file://./spool thumbs --group 3f0c9a51d2
      qworker requeue file://./spool thumbs
      qworker requeue file://./spool thumbs order-17 --edit --app app:tasks
    """
    wanted = list(dict.fromkeys(ids))
    if edit:
        if len(wanted) != 1 or dry_run or not matching.is_empty:
            raise UsageError("--edit takes one ID, and no filter or --dry-run")
        return _edit(url, queue, wanted[0], app, json)
    if app is not None:
        raise UsageError("--app needs --edit")
    if wanted:
        if not matching.is_empty:
            raise UsageError(f"IDs cannot be combined with {FILTERS}")
        changed = run(_requeue_by_id(url, queue, wanted, dry_run))
        return print_change_by_id("requeue", queue, wanted, changed, dry_run=dry_run, json=json)
    result = run(_requeue_matching(url, queue, matching, dry_run))
    if json:
        print_json({"queue": queue, "requeued": result.count, "left_out": result.left_out, "dry_run": dry_run})
        return 0
    note = "" if result.count or result.left_out or matching.is_empty else ": no failed message matches"
    echo(f"{verb_of('requeue', dry_run)} {counted(result.count, 'message')} of {queue}{note}")
    for code, count in sorted(result.left_out.items()):
        echo(f"left out {counted(count, f'{code} message')}: add --code {code} to requeue them")
    return 0


def _edit(url: str, queue: str, message_id: str, app: str | None, json: bool) -> int:
    source = _source(url)
    if app is not None:
        tasks = load_app(app)
        import_tasks(tasks)
        source = JobSource(tasks, None)
    stored = run(_find(url, queue, message_id))
    text = click.edit(arguments_of(stored).text(), extension=".json")
    if text is None:
        echo("nothing is changed: the arguments were not saved", err=True)
        return _EXIT_NOT_SAVED
    edited = run(_enqueue_edited(url, queue, source, stored, read_arguments(text)))
    if json:
        print_json({"queue": queue, "edited": message_id, "id": edited.id, "removed": edited.removed})
    else:
        echo(f"enqueued {edited.id} in {queue}" + ("" if edited.is_new else ": an earlier command had stored it"))
        if not edited.removed:
            echo(f"qworker: {message_id} is not failed any more, so it may run too", err=True)
    return 0


async def _find(url: str, queue: str, message_id: str) -> StoredMessage:
    async with backend_from_url(url) as backend:
        for stored in await backend.find(queue, id_forms(message_id)):
            return stored
    raise UsageError(f"{queue} has no message {message_id}")


async def _enqueue_edited(url: str, queue: str, source: JobSource, stored: StoredMessage, edited: Arguments) -> Edited:
    async with backend_from_url(url) as backend:
        return await enqueue_edited(backend, source, queue, stored, edited)


async def _requeue_matching(url: str, queue: str, matching: MessageFilter, dry_run: bool) -> Requeued:
    async with backend_from_url(url) as backend:
        return await requeue_matching(backend, _source(url), queue, matching, dry_run=dry_run)


async def _requeue_by_id(url: str, queue: str, ids: Sequence[str], dry_run: bool) -> tuple[int, dict[str, str]]:
    async with backend_from_url(url) as backend:
        if dry_run:
            return await count_by_id(backend, queue, ids, failed_only=True)
        await finish_all_cancels(backend, _source(url), queue)
        return await change_by_id(backend, backend.requeue, queue, ids, failed_only=True)


def _source(url: str) -> JobSource:
    return JobSource(Tasks(url), None)
