"""`qworker scan`: run a program for each ready message. Its exit status decides."""

from __future__ import annotations

import getopt

import click

from qworker.backend.scan_source import ScanError, ScanOptions
from qworker.cli.configured import did_you_mean
from qworker.cli.fsq_statuses import EXIT_TEMPORARY, EXIT_USAGE, FsqStatusCommand
from qworker.cli.options import exit_code_options, item_limit_options
from qworker.cli.output import echo, print_error
from qworker.errors import QworkerError, UsageError
from qworker.names import check_existing_queue
from qworker.settings import setting
from qworker.tools.scan import open_source, scan

__all__ = ["ProgramCommand", "command"]


class ProgramCommand(FsqStatusCommand):
    """A command with the exit statuses of fsq, which ends with the arguments of another program.

    Its own options can be before URL, before QUEUE and before PROGRAM. All arguments after PROGRAM belong to PROGRAM.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options of the command, but not those of the program."""
        flags: list[str] = []
        places: list[str] = []
        rest = args
        configured = setting("url")
        while len(places) < 2 and rest:
            given, rest = self._flags(ctx, rest)
            flags += given
            if not places and configured and not (rest and ":" in rest[0]):
                places.append(configured)
            elif rest:
                places.append(rest.pop(0))
        given, rest = self._flags(ctx, rest)
        return super().parse_args(ctx, [*flags, *given, "--", *places, *rest])

    def _flags(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Return the options at the beginning, with their values, and the rest."""
        short, long = "h", ["help"]
        for option in (param for param in self.params if isinstance(param, click.Option)):
            for name in option.opts:
                if name.startswith("--"):
                    long.append(name[2:] + ("" if option.is_flag else "="))
                else:
                    short += name[1:] + ("" if option.is_flag else ":")
        try:
            found, rest = getopt.getopt(args, short, long)
        except getopt.GetoptError as error:
            meant = did_you_mean(error.opt, (name.rstrip("=") for name in long))
            raise click.UsageError(f"{error}{f': {meant}' if meant else ''}", ctx) from error
        flags: list[str] = []
        for name, value in found:
            takes = not (
                name in {"-h", "--help"}
                or any(name in p.opts and isinstance(p, click.Option) and p.is_flag for p in self.params)
            )
            flags += [name, value] if takes else [name]
        return flags, rest


@click.command("scan", cls=ProgramCommand)
@click.argument("url")
@click.argument("queue")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGUMENT]...")
@click.option("-v", "--verbose", is_flag=True, help="Print each message that is worked on, and each success.")
@click.option(
    "-e", "--env", "env", is_flag=True, help="Describe the message to PROGRAM in FSQ_ITEM_* variables (the default)."
)
@click.option("-E", "--no-env", "no_env", is_flag=True, help="Do not set the FSQ_ITEM_* variables.")
@click.option("-n", "--no-open", is_flag=True, help="Do not give PROGRAM the body on standard input.")
@click.option("-i", "--ignore-down", is_flag=True, help="Scan a paused queue too (fsq: only).")
@click.option(
    "-k",
    "--empty-ok",
    is_flag=True,
    help="Without PROGRAM, run the arguments of the message as the program. Use it with caution.",
)
@click.option("-D", "--no-done", is_flag=True, help="Leave each message in the queue, unchanged.")
@click.option("-l", "--lock", is_flag=True, help="Lock each message while PROGRAM runs (the default).")
@click.option(
    "-L", "--no-lock", is_flag=True, help="Do not lock messages (fsq: only). No other program may scan the queue then."
)
@item_limit_options
@click.option(
    "-r",
    "--max-rate",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Maximum number of programs started per second. 0: no limit.",
)
@exit_code_options
@click.option("-a", "--all-hosts", is_flag=True, help="Scan the sub-queue of every host (fsq: only).")
@click.option(
    "-A",
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Scan the sub-queue of this host; repeatable (fsq: only).",
)
def command(
    url: str,
    queue: str,
    program: tuple[str, ...],
    verbose: bool,
    env: bool,
    no_env: bool,
    no_open: bool,
    ignore_down: bool,
    empty_ok: bool,
    no_done: bool,
    lock: bool,
    no_lock: bool,
    ttl: float | None,
    max_tries: int | None,
    max_rate: int,
    success_code: int | None,
    fail_tmp_code: int | None,
    fail_perm_code: int | None,
    all_hosts: bool,
    hosts: tuple[str, ...],
) -> int:
    r"""Run a program for each ready message.

    PROGRAM runs once for each message of QUEUE that is ready now, in order, one at a time. It gets its ARGUMENTs and
    then those of the message, the body on standard input, and FSQ_ITEM_ID, FSQ_ITEM_TRIES and others in its
    environment. Its exit status decides: 0 acks the message, 111 retries it later, 100 and every other status fails it.
    If a signal kills the program, the message fails and the scan ends.

    Options can be before URL, before QUEUE and before PROGRAM. All arguments after PROGRAM belong to PROGRAM.

    \b
    Example:
      qworker scan fsq:///var/fsq thumbs convert-to-thumbnail
      qworker scan -v -m 5 file://./spool inbox sh -c 'cat >> all.txt'

    \b
    Exit status:
      0    the scan is complete, even if messages have failed
      100  wrong usage
      111  the queue is paused or does not exist, the backend cannot be reached, or a signal killed the program
    """
    del env
    options = ScanOptions(
        verbose=verbose,
        env=not no_env,
        open=not no_open,
        ignore_down=ignore_down,
        empty_ok=empty_ok,
        done=not no_done,
        lock=False if no_lock else (True if lock else None),
        ttl=ttl,
        max_tries=max_tries,
        rate=max_rate,
        success=success_code,
        fail_tmp=fail_tmp_code,
        fail_perm=fail_perm_code,
        all_hosts=all_hosts,
        hosts=hosts,
    )
    try:
        return _scan(url, queue, program, options)
    except UsageError as error:
        print_error(error)
        return EXIT_USAGE
    except (ScanError, QworkerError) as error:
        print_error(error)
        return EXIT_TEMPORARY


def _scan(url: str, queue: str, program: tuple[str, ...], options: ScanOptions) -> int:
    if not program and not options.empty_ok:
        raise UsageError("scan needs a PROGRAM to run, or --empty-ok")
    source = open_source(url, check_existing_queue(queue), options)
    try:
        return scan(source, program, options, lambda text: echo(text, err=True))
    finally:
        source.close()
