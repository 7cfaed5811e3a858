"""Mail, written to files. A real site uses `smtplib` here.

Then a mail is sent twice if the worker dies after the server has taken it, and before this is recorded. No order of the
two steps avoids it: the other order loses a mail.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from email.message import EmailMessage
from pathlib import Path

from newsletter.settings import setting


def post(key: str, recipient: str, subject: str, text: str) -> bool:
    """Send a mail, unless one with this key was sent before. Return whether it was sent now."""
    path = _directory() / f"{key}.eml"
    if path.exists():
        return False
    mail = EmailMessage()
    mail["To"], mail["Subject"] = recipient, subject
    mail.set_content(text)
    # The rename makes the write atomic: a killed worker leaves no half of a mail.
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(mail.as_bytes())
    unfinished.rename(path)
    return True


def count_mails(age: timedelta) -> int:
    """Return how many mails were sent in the last time."""
    since = time.time() - age.total_seconds()
    return sum(path.stat().st_mtime >= since for path in _directory().glob("*.eml"))


def _directory() -> Path:
    directory = Path(setting("MAIL_DIRECTORY"))
    directory.mkdir(parents=True, exist_ok=True)
    return directory
