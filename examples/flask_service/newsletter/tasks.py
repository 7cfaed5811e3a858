"""The background tasks of the site. They are plain functions, so they run in threads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from newsletter.mail import count_mails, post
from newsletter.settings import setting
from qworker import Context, Retry, Tasks
from qworker.flask import AppContext

app_context = AppContext()  # Handlers use `current_app`, as views do. The factory sets the app.
tasks = Tasks(hooks=[app_context])  # The factory sets the URL.


@dataclass(frozen=True)
class Report:
    """What became of a newsletter: the mails of the last attempt, and those that earlier attempts had sent."""

    sent: int
    sent_before: int


@tasks.task(result=timedelta(days=1))
def send(ctx: Context, subject: str, text: str, recipients: list[str]) -> Report:
    """Send a newsletter to each recipient. The next attempt of a killed worker skips the mails that are sent."""
    pause = 1 / float(setting("MAILS_PER_SECOND"))
    sent = 0
    for number, recipient in enumerate(recipients, 1):
        if ctx.cancelled():
            raise Retry(f"stopped at mail {number}")
        if post(f"{ctx.message.id}-{number}", recipient, subject, text):
            sent += 1
            time.sleep(pause)  # Mail servers refuse to take more.
        ctx.progress(number, len(recipients), text=recipient)
    return Report(sent=sent, sent_before=len(recipients) - sent)


@tasks.cron("0 7 * * mon-fri", tz="Europe/Berlin", overlap="skip")
@tasks.task
def digest(ctx: Context) -> None:
    """Report to the editor on weekdays at 7: the mails of the last day, and the newsletters that failed."""
    lines = [f"{count_mails(timedelta(days=1))} mails were sent in the last 24 hours."]
    lines += [f"{job.args[0]}: {job.error}" for job in tasks.jobs_sync(task=send, state="failed")]
    post(f"digest-{ctx.message.id}", setting("EDITOR"), "Newsletters", "\n".join(lines))
