"""`qworker requeue`: failed messages get another chance."""

from __future__ import annotations

import click

from qworker.cli.common import URLCommand, json_option, opened, run
from qworker.cli.output import print_json, say
from qworker.message import Selection, State
from qworker.names import check_id, check_queue, counted

__all__ = ["command"]

_EXIT_MISSED = 1
# So many are requeued one by one, to name those that are not; more go in one step, which only counts.
_NAMED = 100


@click.command("requeue", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_queue)
@click.argument("ids", nargs=-1, type=check_id, metavar="[ID]...")
@json_option
def command(url: str, queue: str, ids: tuple[str, ...], json: bool) -> int:
    r"""Make failed messages of QUEUE ready again with tries 0: those with the IDs given, or all.

    Exit status 1: a message with one of the IDs is not there, or has not failed; it is named, and the others are requeued.

    \b
    Examples:
      qworker requeue file://./spool thumbs 20261121071038_123456789_4242_host-7f3a9b21
      qworker requeue file://./spool thumbs
    """
    wanted = list(dict.fromkeys(ids)) or None
    done, missed = run(_requeue(url, queue, wanted))
    if json:
        print_json({"queue": queue, "requeued": done} | ({"missed": missed} if ids else {}))
    else:
        say(f"requeued {counted(done, 'message')} of {queue}")
    if wanted is None or done == len(wanted):
        return 0
    named = ", ".join(f"{message_id} ({why})" for message_id, why in missed.items())
    rest = f"{len(wanted) - done:,} of {len(wanted):,} ids, which are not there or have not failed"
    say(f"qworker: not requeued in {queue}: {named or rest}", err=True)
    return _EXIT_MISSED


async def _requeue(url: str, queue: str, ids: list[str] | None) -> tuple[int, dict[str, str]]:
    """How many were requeued; and which were not, with the reason, where not too many were asked for."""
    async with opened(url) as backend:
        if ids is None:
            return await backend.requeue(queue, Selection(state=State.FAILED)), {}
        if len(ids) > _NAMED:
            return await backend.requeue(queue, Selection(ids=ids)), {}
        left = [message_id for message_id in ids if not await backend.requeue(queue, Selection(ids=[message_id]))]
        missed = dict.fromkeys(left, "there is no such message")
        for stored in await backend.find(queue, left):
            missed[stored.message.id] = f"it is {stored.state.word}, not failed"
        return len(ids) - len(missed), missed
