"""`qworker enqueue`: enqueue calls of an app's tasks from the shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import click
import msgspec

from qworker.app import Tasks
from qworker.cli.app_loader import load_app
from qworker.cli.configured import did_you_mean
from qworker.cli.options import Command, batches, duration_type, json_option, run, url_option
from qworker.cli.output import Progress, echo, print_json, reporting, say_where
from qworker.errors import InvalidArguments, UsageError
from qworker.names import counted
from qworker.task import Call, ConfiguredTask, Job, Task

__all__ = ["command"]

_AnyTask = Task[..., Any]
_UNSET = msgspec.UNSET


@click.command("enqueue", cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("app")
@click.argument("task")
@click.argument("arguments", nargs=-1, metavar="[JSON]...")
@click.option("--kwargs", metavar="JSON", help="Keyword arguments, as a JSON object.")
@click.option(
    "--from-file",
    type=click.File("rb"),
    metavar="FILE",
    help="Enqueue one call for each line of FILE: a JSON array of arguments, or a JSON object of keyword "
    "arguments. - is standard input.",
)
@click.option("--delay", type=duration_type(), help="Delay before the call can run, such as 15m.")
@click.option(
    "--priority",
    type=click.IntRange(0, 9),
    metavar="0-9",
    help="Priority from 0 (default) to 9 (first), if the backend has priorities.",
)
@click.option(
    "--unique-key", metavar="KEY", help="Store nothing while a call with this key is ready, delayed or leased."
)
@click.option("--id", "id", metavar="ID", help="Message id. If a message with this id is stored, nothing is stored.")
@click.option("--hold", type=duration_type(), help="Time from now for which the id stays taken, such as 1d.")
@click.option(
    "--timeout",
    type=duration_type(),
    # QWORKER_TIMEOUT is how long `qworker health` waits for an answer.
    allow_from_autoenv=False,
    help="Longest time of an attempt, such as 30s.",
)
@click.option(
    "--max-tries",
    type=click.IntRange(1),
    metavar="N",
    # QWORKER_MAX_TRIES is that of the items of `qworker scan`.
    allow_from_autoenv=False,
    help="Failed attempts after which it fails.",
)
@click.option("--result", type=duration_type(), help="Time for which the result is kept, such as 1h.")
@click.option("--expires", type=duration_type(), help="Time from now after which it is not started, such as 2m.")
@url_option
@json_option
def command(
    app: str,
    task: str,
    arguments: tuple[str, ...],
    kwargs: str | None,
    from_file: BinaryIO | None,
    delay: float | None,
    priority: int | None,
    unique_key: str | None,
    id: str | None,  # noqa: A002
    hold: float | None,
    timeout: float | None,
    max_tries: int | None,
    result: float | None,
    expires: float | None,
    url: str | None,
    json: bool,
) -> None:
    r"""Enqueue a call of a task and print its id.

    TASK is a task that APP registers. Each argument is JSON: write text in double quotes, inside the single quotes of
    the shell. Arguments are checked against the annotations of the task before anything is stored.

    \b
    Examples:
      qworker enqueue app:tasks thumbnail '"a.png"' 640
      qworker enqueue app:tasks thumbnail '"a.png"' --kwargs '{"width": 640}' --delay 60
      seq 1000 | sed 's/.*/[&]/' | qworker enqueue app:tasks square --from-file -
    """
    tasks = load_app(app, url)
    chosen = tasks[task]
    bound = chosen.using(
        delay=delay,
        priority=priority,
        unique_key=unique_key,
        id=id,
        hold=hold,
        timeout=_UNSET if timeout is None else timeout,
        max_tries=_UNSET if max_tries is None else max_tries,
        result=_UNSET if result is None else result,
        expires=expires,
    )
    if from_file is None:
        args, named = _given(arguments, kwargs)
        jobs = run(_enqueue(tasks, iter([bound.call(*args, **named)])))
    else:
        if arguments or kwargs or unique_key or id:
            raise UsageError("--from-file cannot be combined with arguments, --kwargs, --unique-key or --id")
        jobs = run(_enqueue(tasks, _calls(bound, from_file)))
    with reporting("what was enqueued is stored"):
        _report(jobs, chosen, from_file is not None, json)


def _report(jobs: list[Job[Any]], task: _AnyTask, many: bool, json: bool) -> None:
    if json:
        print_json({"queue": task.queue, "count": len(jobs), "ids": [job.id for job in jobs]})
    elif many:
        echo(f"enqueued {counted(len(jobs), 'call')} of {task.name} in {task.queue}")
    else:
        echo(jobs[0].id)


def _given(arguments: tuple[str, ...], kwargs: str | None) -> tuple[list[Any], dict[str, Any]]:
    return [_json(text) for text in arguments], _object(kwargs) if kwargs is not None else {}


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if text.startswith("--"):
            name = text.partition("=")[0]
            known = (option for param in command.params for option in param.opts)
            raise InvalidArguments(
                f"unknown option {name}: {did_you_mean(name, known) or 'see qworker enqueue --help'}"
            ) from error
        quoted = msgspec.json.encode(text).decode()
        raise InvalidArguments(
            f"{text!r} is not valid JSON: write text as '{quoted}' (double quotes inside single quotes)"
        ) from error


def _object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise InvalidArguments(f"--kwargs must be a JSON object such as '{{\"width\": 640}}' (got {text!r})")
    return cast("dict[str, Any]", value)


def _calls(bound: ConfiguredTask[..., Any], lines: BinaryIO) -> Iterator[Call]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            args, kwargs = _line(line)
            yield bound.call(*args, **kwargs)
        except (msgspec.DecodeError, InvalidArguments) as error:
            raise InvalidArguments(
                f"line {number} of {lines.name}: {error}; the lines before it may be stored"
            ) from error


def _line(line: bytes) -> tuple[list[Any], dict[str, Any]]:
    if line.lstrip().startswith(b"["):
        return msgspec.json.decode(line, type=list[Any]), {}
    return [], msgspec.json.decode(line, type=dict[str, Any])


async def _enqueue(tasks: Tasks, calls: Iterator[Call]) -> list[Job[Any]]:
    jobs: list[Job[Any]] = []
    say_where(await tasks.backend())
    with Progress("enqueued") as progress:
        for batch in batches(calls):
            jobs += await tasks.enqueue_many(batch)
            progress.add(len(batch))
    return jobs
