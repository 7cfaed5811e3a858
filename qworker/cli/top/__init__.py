"""`qworker top`: watch queues live."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

import click

from qworker.cli.options import URLCommand, backend_from_url, duration_type, json_option, run
from qworker.cli.output import echo, print_json, print_table
from qworker.cli.top.sampler import Sample, Sampler
from qworker.cli.top.table import COLUMNS, cells, heading, running_line, schedule_line
from qworker.clock import SYSTEM_CLOCK
from qworker.extras import not_installed
from qworker.names import check_existing_queue

__all__ = ["command"]

# Seconds for which a single snapshot waits for rates, and between two looks meanwhile.
_RATES_WAIT_S = 1.0
_LOOK_S = 0.1


@click.command("top", cls=URLCommand)
@click.argument("url")
@click.argument("queue", required=False, type=check_existing_queue)
@click.option(
    "--interval",
    type=duration_type(least=0.1),
    default="2s",
    show_default=True,
    help="Time between two refreshes.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    multiple=True,
    help="Health port of a worker, which counts what it has finished; repeatable.",
)
@click.option(
    "--once", is_flag=True, help="Print one snapshot and exit (the default if standard output is not a terminal)."
)
@json_option
def command(url: str, queue: str | None, interval: float, health: tuple[str, ...], once: bool, json: bool) -> None:
    r"""Watch the queues of a backend, their rates and their workers.

    backlog/s: growth of the number of ready, leased and delayed messages. acked/s and failed/s: messages that workers
    have finished, from the history, or from the health ports of --health. workers: those that hold a lease, or have
    recorded an event in the last 10 s. Needs the extra "tui" on a terminal.

    A deep queue in a directory is counted less often, so that counting takes at most 2 % of a core. The note says how
    old its numbers are. "approximate": messages moved during the count.

    Below the queues are the schedules: the last tick with its outcome, and the next one. Then the running jobs that
    have reported progress.

    Keys: q quits, space pauses, r refreshes now, s sorts by the next column.

    \b
    Examples:
      qworker top file://./spool
      qworker top redis://localhost/0 --health 127.0.0.1:9090
      qworker top file://./spool --once --json
    """
    if once or json or not sys.stdout.isatty():
        sample = run(_once(url, queue, health, interval))
        if json:
            print_json(sample)
        else:
            _print(sample)
        return
    try:
        from qworker.cli.top.screen import TopScreen
    except ModuleNotFoundError as error:
        raise not_installed(error, "qworker top on a terminal (all but --once)") from error

    async def watch() -> None:
        async with backend_from_url(url) as backend, aclosing(Sampler(backend, queue, health, url=url)) as sampler:
            await TopScreen(sampler.sample, await sampler.sample(), interval).run_async()

    run(watch())


async def _once(url: str, queue: str | None, health: tuple[str, ...], interval: float) -> Sample:
    async with backend_from_url(url) as backend, aclosing(Sampler(backend, queue, health, url=url)) as sampler:
        await sampler.sample()
        await asyncio.sleep(interval)
        sample = await sampler.sample()
        # The second count of a queue may be due a little later, if its first one was not cheap.
        until = SYSTEM_CLOCK.monotonic() + _RATES_WAIT_S
        while _lacks_rates(sample) and SYSTEM_CLOCK.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
            sample = await sampler.sample()
        return sample


def _lacks_rates(sample: Sample) -> bool:
    return any(row.backlog_rate is None and row.problem is None for row in sample.rows)


def _print(sample: Sample) -> None:
    echo(heading(sample))
    if sample.rows:
        print_table(COLUMNS, [cells(row) for row in sample.rows])
    else:
        echo("no queues yet: `qworker run`, `enqueue` or `create` creates them")
    for row in sample.schedules:
        echo(schedule_line(row))
    for job in sample.running:
        echo(running_line(job, sample.at))
    if sample.problem is not None:
        echo(sample.problem, err=True)
