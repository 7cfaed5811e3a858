"""`qworker explain`: explain why a message is not running, or what happened to it."""

from __future__ import annotations

import click

from qworker.app import Tasks
from qworker.cli.app_loader import import_tasks, load_app
from qworker.cli.history import event_line
from qworker.cli.options import URLCommand, backend_from_url, json_option, run
from qworker.cli.output import echo, print_json
from qworker.names import check_existing_queue
from qworker.tools.explain import Explanation, explain

__all__ = ["command"]

_EXIT_NOT_FOUND = 1


@click.command("explain", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@click.argument("id")
@click.option("--app", metavar="MODULE:ATTRIBUTE", help="App that should run the message. Reports whether it can.")
@click.option("--full", is_flag=True, help="Print the whole last error too, with its traceback.")
@json_option
def command(url: str, queue: str, id: str, app: str | None, full: bool, json: bool) -> int:  # noqa: A002
    r"""Explain why a message is not running, or what happened to it.

    Shows its position in the queue, its delay, its lease, its failure, or why the app cannot run it. Each line ends
    with its code, which the documentation explains under "Find out why a message does not run". Shows also what its
    history records, even if it is no longer stored. Exit status 1: there is no such message.

    \b
    Examples:
      qworker explain file://./spool thumbs 20261121071038_123456789_4242_host-7f3a9b21
      qworker explain file://./spool thumbs 20261121071038_123456789_4242_host-7f3a9b21 --app app:tasks
      qworker explain file://./spool thumbs 20261121071038_123456789_4242_host-7f3a9b21 --full
    """
    tasks = None if app is None else load_app(app)
    if tasks is not None:
        # It says what workers do.
        import_tasks(tasks)
    found = run(_explain(url, queue, id, tasks))
    if json:
        message = None if found.stored is None else found.stored.to_text_json()
        reasons = [{"code": reason.code, "text": reason.text} for reason in found.reasons]
        about = {"id": found.id, "queue": found.queue, "state": found.state, "reasons": reasons, "message": message}
        print_json({**about, "error": found.error, "history": found.history})
    else:
        for reason in found.reasons:
            echo(f"{reason.text} [{reason.code}]")
        for event in found.history:
            echo(f"  {event_line(event)}")
        if full and found.error:
            echo("")
            for line in found.error.splitlines():
                echo(line)
    return 0 if found.state is not None else _EXIT_NOT_FOUND


async def _explain(url: str, queue: str, message_id: str, tasks: Tasks | None) -> Explanation:
    async with backend_from_url(url) as backend:
        return await explain(backend, queue, message_id, tasks)
