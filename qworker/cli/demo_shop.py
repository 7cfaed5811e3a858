"""The app of `qworker demo --ui`: the background work of a shop. Its handlers only wait, and fail as real ones do."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import timedelta

from qworker import Backoff, Context, Fail, Tasks

__all__ = [
    "charge",
    "deliver",
    "import_file",
    "index",
    "monthly",
    "newsletter",
    "receipt",
    "refund",
    "reminder",
    "resize",
    "tasks",
]

# The kinds of a photo's failures, by its number.
_BROKEN, _EMPTY = 19, 47

tasks = Tasks(unknown_for=0)


@tasks.task(name="mail.receipt", queue="mail")
async def receipt(order: int, to: str) -> None:
    """Send one mail."""
    await asyncio.sleep(0.02 + 0.03 * (order % 5))


@tasks.every(timedelta(days=1), name="mail.reminders", args=("all readers",))
@tasks.task(name="mail.reminder", queue="mail")
async def reminder(to: str) -> None:
    """Send one mail later."""
    await asyncio.sleep(0.05)


@tasks.task(name="newsletter.send", queue="newsletter")
async def newsletter(to: str, issue: int) -> None:
    """Take a fifth of a second of the mail server, which takes one mail at a time."""
    await asyncio.sleep(0.2)


@tasks.task(name="photos.resize", queue="photos")
async def resize(photo: str, number: int, width: int) -> None:
    """Make a photo smaller. Some cannot be read."""
    await asyncio.sleep(0.05 + 0.02 * (number % 11))
    if number % _EMPTY == 0:
        raise Fail(f"{photo}: the file is empty")
    if number % _BROKEN == 0:
        raise OSError(f"{photo}: image file is truncated ({number} bytes not processed)")


@tasks.task(name="payments.charge", queue="payments", max_tries=3, retry=Backoff(initial=5, maximum=20))
async def charge(order: int, amount: str, card_token: str) -> None:
    """Ask a bank, which refuses some cards and some connections."""
    await asyncio.sleep(0.15 + 0.1 * (order % 4))
    if order % 5 == 0:
        raise ConnectionError(f"bank-{order % 3}.example:443: connection refused")
    if order % 7 == 0:
        raise Fail(f"order {order}: the bank has declined the card")


@tasks.task(name="payments.refund", queue="payments", max_tries=1, timeout=2)
async def refund(order: int) -> None:
    """Wait for a bank that does not answer in time."""
    await asyncio.sleep(30)


@tasks.every(timedelta(hours=1), name="reports.hourly", args=("this hour",))
@tasks.task(name="reports.monthly", queue="reports")
async def monthly(context: Context, month: str, pages: int = 60) -> None:
    """Write a long report, and say how far it is."""
    for page in range(pages):
        context.progress(done=page, total=pages, text=f"page {page + 1}")
        await asyncio.sleep(3)


@tasks.every(20, name="search.refresh", args=("changes",))
@tasks.task(name="search.index", queue="catalog")
async def index(product: str) -> None:
    """Put a product into the search index."""
    await asyncio.sleep(0.1)


@tasks.task(name="imports.read", queue="imports", max_tries=2)
async def import_file(file: str) -> None:
    """Read a file. One of them kills its process, as one that needs too much memory does."""
    if file.endswith(".zip"):
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.3)


@tasks.task(name="webhooks.deliver", queue="webhooks")
async def deliver(url: str, event: str) -> None:
    """Send an event to a customer's server. No worker of the demo leases from this queue."""
