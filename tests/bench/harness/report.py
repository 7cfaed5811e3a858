"""Figures: what was asked, what was measured, and whether it is met; as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["Figure", "as_json", "as_table", "machine", "median", "number", "percentile", "spread", "table"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number."""

    # The name that `--only` takes, and what exactly was measured.
    figure: str
    what: str
    measured: float
    unit: str
    # None: told for information, nothing was asked.
    asked: float | None = None
    # Whether `asked` is the most that is allowed, rather than the least.
    at_most: bool = True
    note: str = ""
    # What the rounds gave, of which `measured` is the median.
    rounds: Sequence[float] = field(default_factory=list)

    @property
    def met(self) -> bool | None:
        """None where nothing was asked."""
        if self.asked is None:
            return None
        return self.measured <= self.asked if self.at_most else self.measured >= self.asked


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all (0 to 1) do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, int(-(-share * len(ordered) // 1)) - 1))]


def spread(values: Sequence[float]) -> str:
    """The least and the most, for a note."""
    return f"{number(min(values))} to {number(max(values))}" if len(values) > 1 else "one round"


def as_table(figures: Sequence[Figure]) -> str:
    """A table that is also Markdown."""
    rows = [("figure", "what", "asked", "measured", "met", "note")]
    rows += [
        (
            one.figure,
            one.what,
            "" if one.asked is None else f"{'<=' if one.at_most else '>='} {number(one.asked)} {one.unit}".rstrip(),
            f"{number(one.measured)} {one.unit}".rstrip(),
            {True: "yes", False: "NO", None: ""}[one.met],
            one.note,
        )
        for one in figures
    ]
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first of them the headings, as a table that is also Markdown."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def as_json(figures: Sequence[Figure], *, quick: bool, disk: str) -> str:
    """Everything, with the machine that it is true of."""
    document: Mapping[str, Any] = {
        "machine": machine(),
        "disk": disk,
        "quick": quick,
        "figures": [{**asdict(one), "met": one.met} for one in figures],
    }
    return json.dumps(document, indent=1)


def machine() -> dict[str, Any]:
    """What decides the numbers, besides the code."""
    try:
        loop = f"uvloop {version('uvloop')}"
    except PackageNotFoundError:
        loop = "asyncio"
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return {
        "processors": os.cpu_count(),
        "processor": model,
        "load": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "loop": loop,
    }


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []


def number(value: float) -> str:
    """A value with three significant digits, or with thousands set apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
