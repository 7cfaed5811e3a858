"""`qworker doctor`: does everything here that queues need work?"""

from __future__ import annotations

import importlib

import click
import msgspec

from qworker.cli.common import URLCommand, json_option, run
from qworker.cli.output import print_json, say
from qworker.doctor import Check, Health, examine
from qworker.settings import file_settings

__all__ = ["command"]

_MARKS = {Health.OK: "ok     ", Health.WARN: "warn   ", Health.BROKEN: "BROKEN "}
_EXIT_BROKEN = 1
# As of every other command that cannot use the store.
_EXIT_UNUSABLE = 3
_UNUSABLE = {"reachable", "writing"}
# Read by `Tasks`, and by none of the options.
_OTHER_SETTINGS = {"url"}


@click.command("doctor", cls=URLCommand)
@click.argument("url", required=False)
@json_option
def command(url: str | None, json: bool) -> int:
    r"""Try what queues need: the backend at URL, limits, versions, installed backends, settings.

    On a directory: rename, link, fsync, flock, inotify, the clock, space, inodes and permissions are really tried. Says which
    durability is in force, and which bulk writes are half published. Exit status 1: something is broken; 3: the store cannot
    be used.

    \b
    Examples:
      qworker doctor
      qworker doctor file://./spool
      qworker doctor redis://localhost/0 --json
    """
    checks = [*run(examine(url)), _settings()]
    if json:
        print_json([msgspec.structs.asdict(check) for check in checks])
    else:
        for check in checks:
            say(f"{_MARKS[check.health]}{check.name}: {check.detail}")
            if check.mend:
                say(f"       {check.mend}")
    broken = {check.name for check in checks if check.health is Health.BROKEN}
    if broken & _UNUSABLE:
        return _EXIT_UNUSABLE
    return _EXIT_BROKEN if broken else 0


def _settings() -> Check:
    """Whether each name in `[tool.qworker]` is an option of some command: a misspelt one would have no effect."""
    from qworker.cli.main import COMMANDS

    options = set(_OTHER_SETTINGS)
    for place in COMMANDS.values():
        module, _, attribute = place.partition(":")
        found: click.Command = getattr(importlib.import_module(module), attribute)
        options |= {param.name for param in found.params if isinstance(param, click.Option) and param.name}
    given = file_settings()
    unknown = sorted(
        name for name, value in given.items() if not isinstance(value, dict) and name.replace("-", "_") not in options
    )
    if unknown:
        return Check("settings", Health.WARN, f"[tool.qworker] has {', '.join(unknown)}", "no option has such a name")
    return Check("settings", Health.OK, f"[tool.qworker] sets {len(given)}" if given else "no [tool.qworker] here")
