"""`qworker doctor`: check that queues can work here."""

from __future__ import annotations

import click
import msgspec

from qworker.backend.registry import open_backend
from qworker.cli.configured import file_defaults, walk
from qworker.cli.options import Unavailable, URLCommand, json_option, run
from qworker.cli.output import echo, print_json
from qworker.errors import UsageError
from qworker.kit.doctor_check import Check, CheckStatus
from qworker.settings import file_settings, settings_path
from qworker.tools.doctor import run_checks

__all__ = ["command"]

_MARKS = {CheckStatus.OK: "ok     ", CheckStatus.WARN: "warn   ", CheckStatus.BROKEN: "BROKEN "}
_EXIT_BROKEN = 1
# Every command that cannot use the store ends with this status.
_EXIT_UNUSABLE = 3
_UNUSABLE = {"reachable", "writing"}


@click.command("doctor", cls=URLCommand)
@click.argument("url", required=False)
@json_option
def command(url: str | None, json: bool) -> int:
    r"""Check that queues can work here.

    Checks limits, versions, installed backends, settings, and the backend at URL. In a directory, it tries rename,
    link, fsync, flock, inotify, the clock, space, inodes and permissions. It reports the durability in force, and loads
    that were interrupted. Exit status: 1 if something is broken, 3 if the store cannot be used.

    \b
    Examples:
      qworker doctor
      qworker doctor file://./spool
      qworker doctor redis://localhost/0 --json
    """
    checks = [*_place(url), *run(run_checks(url)), _settings()]
    if json:
        print_json([msgspec.structs.asdict(check) for check in checks])
    else:
        for check in checks:
            echo(f"{_MARKS[check.health]}{check.name}: {check.detail}")
            if check.fix:
                echo(f"       {check.fix}")
    broken = {check.name for check in checks if check.health is CheckStatus.BROKEN}
    if broken & _UNUSABLE:
        return _EXIT_UNUSABLE
    return _EXIT_BROKEN if broken else 0


def _place(url: str | None) -> list[Check]:
    """Return the full URL of the store, because a relative one depends on the working directory."""
    return [] if url is None else [Check("store", CheckStatus.OK, open_backend(url).describe())]


def _settings() -> Check:
    """Return the check that each name in `[tool.qworker]` is an option of a command and each value is valid."""
    from qworker.cli.main import cli

    try:
        for path, one in walk(cli):
            if not isinstance(one, Unavailable | click.Group):
                file_defaults(one, path)
    except UsageError as error:
        return Check("settings", CheckStatus.BROKEN, str(error))
    given = file_settings()
    return Check(
        "settings", CheckStatus.OK, f"{settings_path()} sets {len(given)}" if given else "no [tool.qworker] here"
    )
