"""Apps of tests."""

from __future__ import annotations

import asyncio

from qworker import Tasks

__all__ = ["close_app"]


async def close_app(app: Tasks) -> None:
    """Close the backends of an app, also that of the background loop, before their server ends."""
    await app.aclose()
    await asyncio.to_thread(lambda: app._run_sync(app.aclose()))
