"""Reminders: each user has a schedule, in the time zone of the user."""

from __future__ import annotations

import sys
from collections.abc import Callable

from qworker import Context, Tasks

tasks = Tasks("file://./spool/reminders")


@tasks.task
def remind(ctx: Context, user: str, text: str) -> None:
    """Remind a user. `ctx.tick` is the moment in the time zone of the user."""
    print(f"{ctx.tick:%Y-%m-%d %H:%M %Z} {user}: {text}", flush=True)


def add(user: str, time: str, zone: str, text: str) -> None:
    """Remind a user every day. The schedule replaces the earlier one of the user."""
    hour, minute = map(int, time.split(":"))
    tasks.schedules.put_sync(user, remind.call(user, text), cron=f"{minute} {hour} * * *", tz=zone)


def remove(user: str) -> None:
    """Remind a user no more."""
    tasks.schedules.remove_sync(user)


def show() -> None:
    """Print the next reminder of each user."""
    for schedule in tasks.schedules.list_sync():
        print(f"{schedule.name}: {schedule.next}")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    commands: dict[str, Callable[..., None]] = {"add": add, "remove": remove, "show": show}
    commands[command](*arguments)
