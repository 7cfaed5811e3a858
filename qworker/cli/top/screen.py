"""The live table on a terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from qworker.cli.output import format_time
from qworker.cli.top.sampler import Row, Sample
from qworker.cli.top.table import COLUMNS, cells, heading, running_line, schedule_line
from qworker.errors import BackendError
from qworker.names import printable

__all__ = ["TopScreen"]

# Samples take at most this share of the time.
_SHARE = 0.1
# The lines of schedules on the screen.
_MOST_SCHEDULES = 8
# The lines of running jobs on the screen.
_MOST_RUNNING = 8


class TopScreen(App[None]):
    """The screen that shows samples until the user quits.

    Args:
        sample: A function that takes a sample.
        first: The first sample.
        interval: Seconds between two samples. If a sample takes long, the screen waits longer.
    """

    CSS = """
    #heading, #status { height: 1; padding: 0 1; }
    #heading { text-style: bold; }
    DataTable { height: 1fr; }
    #below { height: auto; padding: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("space", "pause", "Pause"),
        Binding("r", "look", "Look now"),
        Binding("s", "sort", "Sort"),
    ]
    # The columns to sort by, in turn, each with the key for sorting.
    _ORDERS: ClassVar[list[tuple[str, Callable[[Row], tuple[float, str]]]]] = [
        ("queue", lambda row: (0.0, row.queue)),
        ("ready", lambda row: (-row.ready, row.queue)),
        ("oldest", lambda row: (-(row.oldest_age_s or 0.0), row.queue)),
        ("failed", lambda row: (-row.failed, row.queue)),
    ]

    def __init__(self, sample: Callable[[], Awaitable[Sample]], first: Sample, interval: float) -> None:
        super().__init__()
        self._take_sample = sample
        self._seen = first
        self._interval = interval
        self._paused = False
        self._order = 0
        self._wanted = asyncio.Event()
        self._table: DataTable[Text] = DataTable(cursor_type="row", zebra_stripes=True)

    def compose(self) -> ComposeResult:
        """Yield the widgets of the screen."""
        yield Static(id="heading")
        yield self._table
        yield Static(id="below")
        yield Static(id="status")
        yield Footer()

    def on_mount(self) -> None:
        """Show the first sample, and start sampling."""
        for column in COLUMNS:
            self._table.add_column(column, key=column)
        self._show()
        self.run_worker(self._watch(), exit_on_error=True)

    async def _watch(self) -> None:
        pause = self._interval
        while True:
            try:
                async with asyncio.timeout(pause):
                    await self._wanted.wait()
            except TimeoutError:
                if self._paused:
                    continue
            self._wanted.clear()
            began = time.monotonic()
            try:
                self._seen = await self._take_sample()
            except BackendError as error:
                # The queue that is sampled was deleted.
                self._say(str(error))
            else:
                self._show()
            pause = max(self._interval, (time.monotonic() - began) / _SHARE)

    # -- keys --------------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Pause or resume sampling."""
        self._paused = not self._paused
        self._show()

    def action_look(self) -> None:
        """Sample now."""
        self._wanted.set()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._order = (self._order + 1) % len(self._ORDERS)
        self._show()

    # -- showing -----------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        table, seen = self._table, self._seen
        # The cursor stays on its queue, even if the queue is in another row now.
        current = table.get_row_at(table.cursor_row)[0].plain if table.row_count else ""
        table.clear()
        for row in sorted(seen.rows, key=self._ORDERS[self._order][1]):
            # `Text` prevents that a name in brackets is taken for markup.
            shown = [Text(printable(cell), justify="right" if at else "left") for at, cell in enumerate(cells(row))]
            table.add_row(*shown, key=row.queue)
            if row.queue == current:
                table.move_cursor(row=table.row_count - 1)
        self.query_one("#heading", Static).update(Text(printable(heading(seen))))
        lines = [printable(schedule_line(row)) for row in seen.schedules[:_MOST_SCHEDULES]]
        lines += [printable(running_line(job, seen.at)) for job in seen.running[:_MOST_RUNNING]]
        self.query_one("#below", Static).update(Text("\n".join(lines)))
        said = seen.problem or f"{'paused' if self._paused else 'at'} {format_time(seen.at)}"
        self._say(f"{said}   by {self._ORDERS[self._order][0]}")

    def _say(self, text: str) -> None:
        self.query_one("#status", Static).update(Text(printable(text)))
