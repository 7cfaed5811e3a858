"""`qworker stats` of a queue whose cells cannot be read: its messages are counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from click.testing import CliRunner

from qworker.backend.registry import open_backend
from qworker.cli.stats import command
from qworker.message import Draft


async def publish(url: str) -> None:
    backend = open_backend(url)
    await backend.publish("q", [Draft(body=b"x")])
    await backend.aclose()


def test_stats_shows_the_messages_of_a_queue_whose_cells_cannot_be_read(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool?sync=off"
    asyncio.run(publish(url))
    (tmp_path / "spool" / "q" / "cells").write_text("of another program")
    shown = CliRunner().invoke(command, [url, "q"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[1].split()[:2] == ["q", "1"]
    assert shown.stderr.startswith("queue q: what it also keeps cannot be read: ")
