"""`qworker requeue`: make failed messages ready again."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from qworker.app import Tasks
from qworker.backend import Backend
from qworker.cli.options import URLCommand, backend_from_url, batches, duration_type, json_option, run
from qworker.cli.output import echo, print_json
from qworker.envelope import Envelope, open_envelope
from qworker.errors import UsageError
from qworker.jobs.cancel import finish_all_cancels
from qworker.jobs.source import JobSource
from qworker.message import FinishedMessage, Query, Selection, State, StoredMessage
from qworker.names import check_existing_queue, counted, id_forms
from qworker.parcel import unpack

__all__ = ["command"]

_EXIT_MISSED = 1
# Up to this number of messages are requeued one by one, to name those that fail. More are only counted, in one step.
_NAMED = 100


@click.command("requeue", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="Requeue only calls of this task; repeatable.")
@click.option("--error", metavar="TEXT", help="Requeue only messages whose error contains this text, in any case.")
@click.option("--since", type=duration_type(), help="Requeue only messages that have failed in this time, such as 2h.")
@json_option
def command(
    url: str,
    queue: str,
    ids: tuple[str, ...],
    tasks: tuple[str, ...],
    error: str | None,
    since: float | None,
    json: bool,
) -> int:
    r"""Make failed messages of a queue ready again, with tries 0.

    Requeues the failed messages with the given IDs, those that match all filters, or every one. Exit status 1: there is
    no message with one of the IDs, or it has not failed. It is named, and the others are requeued.

    \b
    Examples:
      qworker requeue file://./spool thumbs 20261121071038_123456789_4242_host-7f3a9b21
      qworker requeue file://./spool thumbs --task thumbnail --error TimeoutError --since 2h
      qworker requeue file://./spool thumbs
    """
    wanted = list(dict.fromkeys(ids))
    chosen = _filter(tasks, error, since)
    if wanted and chosen is not None:
        raise UsageError("IDs cannot be combined with --task, --error or --since")
    done, missed = run(_requeue(url, queue, wanted, chosen))
    if json:
        print_json({"queue": queue, "requeued": done} | ({"missed": missed} if ids else {}))
    else:
        echo(f"requeued {counted(done, 'message')} of {queue}")
    if not wanted or done == len(wanted):
        return 0
    named = ", ".join(f"{message_id} ({why})" for message_id, why in missed.items())
    rest = f"{len(wanted) - done:,} of {len(wanted):,} ids, which are not there or have not failed"
    echo(f"qworker: not requeued in {queue}: {named or rest}", err=True)
    return _EXIT_MISSED


_Filter = Callable[[StoredMessage], bool]


def _filter(tasks: tuple[str, ...], error: str | None, since: float | None) -> _Filter | None:
    """Return a function that checks whether a failed message matches all filters. None: no filter is given."""
    if not tasks and error is None and since is None:
        return None
    first = None if since is None else time.time() - since

    def matches(stored: StoredMessage) -> bool:
        return (
            (first is None or (stored.finished_at is not None and stored.finished_at >= first))
            and (error is None or error.casefold() in (stored.error or "").casefold())
            and (not tasks or _task(stored) in tasks)
        )

    return matches


def _task(stored: StoredMessage) -> str | None:
    """Return the task that a message calls, or None for a raw message."""
    found = open_envelope(unpack(stored.message).body)
    return found.task if isinstance(found, Envelope) else None


async def _requeue(url: str, queue: str, ids: list[str], matches: _Filter | None) -> tuple[int, dict[str, str]]:
    """Requeue messages. Return the number of requeued ones, and the ids and reasons of the others."""
    async with backend_from_url(url) as backend:
        await finish_all_cancels(backend, JobSource(Tasks(url), None), queue)
        if matches is not None:
            return await _requeue_matching(backend, queue, matches), {}
        if not ids:
            return await backend.requeue(queue, Selection(state=State.FAILED)), {}
        if len(ids) > _NAMED:
            forms = [form for given in ids for form in id_forms(given)]
            return await backend.requeue(queue, Selection(ids=forms)), {}
        left = [given for given in ids if not await backend.requeue(queue, Selection(ids=id_forms(given)))]
        missed = dict.fromkeys(left, "there is no such message")
        for given in left:
            for stored in await backend.find(queue, id_forms(given)):
                missed[given] = f"it is {stored.state.word}, not failed"
        return len(ids) - len(missed), missed


async def _requeue_matching(backend: Backend, queue: str, matches: _Filter) -> int:
    # All messages are found before the first one is requeued, so that one that fails again is not requeued twice.
    found: list[FinishedMessage] = []
    async for page in backend.browse(queue, Query(State.FAILED)):
        found += [_finished(stored) for stored in page if matches(stored)]
    return sum([await backend.requeue(queue, Selection(unchanged=batch)) for batch in batches(found)])


def _finished(stored: StoredMessage) -> FinishedMessage:
    return FinishedMessage(
        id=stored.message.id, state=stored.state, finished_at=stored.finished_at, location=stored.location
    )
