"""`qworker job`: the status of one job, its result, or its cancellation."""

from __future__ import annotations

import getpass

import click

from qworker.app import Tasks
from qworker.cli.options import URLCommand, json_option, run
from qworker.cli.output import echo, print_error, print_json
from qworker.errors import JobError, JobFailed, UsageError
from qworker.jobs.status import Status
from qworker.names import check_existing_queue

__all__ = ["command"]

_EXIT_NO_VALUE = 1


@click.command("job", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@click.argument("id")
@click.option(
    "--wait", is_flag=True, help="Wait until the job has ended, and print its result as JSON. With --json, also its id."
)
@click.option("--cancel", is_flag=True, help="Cancel the job: its message fails with the code cancelled.")
@json_option
def command(url: str, queue: str, id: str, wait: bool, cancel: bool, json: bool) -> int:  # noqa: A002
    r"""Show the status of a job, wait for its result, or cancel it.

    Exit status 1: the job is not stored, or, with --wait, it has no result because it failed or was cancelled.

    \b
    Examples:
      qworker job file://./spool thumbs 20261121071038_123456789_4242_host-7f3a9b21
      qworker job file://./spool thumbs order-17 --wait
      qworker job file://./spool thumbs order-17 --cancel
    """
    if wait and cancel:
        raise UsageError("--wait and --cancel cannot be combined")
    if cancel:
        return _cancel(url, queue, id, json)
    return _wait(url, queue, id, json) if wait else _show(url, queue, id, json)


def _show(url: str, queue: str, message_id: str, json: bool) -> int:
    async def look() -> Status:
        return await Tasks(url).job(message_id, queue).status()

    status = run(look())
    if json:
        print_json(status)
    else:
        for line in _lines(status):
            echo(line)
    return _EXIT_NO_VALUE if status.state == "gone" else 0


def _lines(status: Status) -> list[str]:
    lines = [f"{status.id}: {status.state}" + (f" ({status.code})" if status.code else "")]
    if status.task is not None:
        lines.append(f"task {status.task}, tries {status.tries}")
    if status.progress is not None:
        total = "" if status.progress.total is None else f"/{status.progress.total:g}"
        lines.append(f"progress {status.progress.done:g}{total} {status.progress.text}".rstrip())
    if status.holder:
        lines.append(f"held by {status.holder}")
    return lines


def _wait(url: str, queue: str, message_id: str, json: bool) -> int:
    async def wait() -> object:
        return await Tasks(url).job(message_id, queue).result()

    try:
        value = run(wait())
    except JobError as error:
        if json:
            code = error.code if isinstance(error, JobFailed) else None
            print_json({"id": message_id, "queue": queue, "error": str(error), "code": code})
        else:
            print_error(error)
        return _EXIT_NO_VALUE
    print_json({"id": message_id, "queue": queue, "result": value} if json else value)
    return 0


def _cancel(url: str, queue: str, message_id: str, json: bool) -> int:
    async def cancel() -> str:
        return await Tasks(url).job(message_id, queue).cancel(by=getpass.getuser())

    was = run(cancel())
    if json:
        print_json({"id": message_id, "queue": queue, "was": was})
    elif was == "finished":
        echo(f"{message_id} had ended, or is not stored: nothing is changed")
    else:
        echo(f"cancelled {message_id}, which was {was}")
    return 0
