"""The charts of a queue, from the samples that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from qworker.charts import Scale, Series, count_scale, line_chart, number_scale, seconds_scale, sparkline
from qworker.sampling import RingSample
from qworker.sampling.ring import LEVELS, fold
from qworker.ui.text import DASH, duration, rate

__all__ = ["charts_of", "spark_of"]

# Samples that are one point of a chart, by level. So a chart has at most 168 points, and its table as many rows.
_FOLDED = (3, 2, 2)
# Points of a sparkline: an hour, each point for 2 minutes.
_SPARK_POINTS, _SPARK_STEP = 30, 120.0


class _Line(msgspec.Struct, frozen=True):
    """A line of a chart, and a column of the table below the charts."""

    name: str
    # The value of a sample that covers so many seconds.
    value: Callable[[RingSample, float], float | None]


class _Point(msgspec.Struct, frozen=True):
    """A period, of which parts can be missing. Without any sample it is a gap."""

    at: float
    sample: RingSample | None
    seconds: float

    def value(self, line: _Line) -> float | None:
        return None if self.sample is None else line.value(self.sample, self.seconds)


class _Chart(msgspec.Struct, frozen=True):
    name: str
    unit: Callable[[float], str]
    scale: Scale
    lines: Sequence[_Line]


def charts_of(past: Sequence[RingSample], level: int, now: float) -> dict[str, Any]:
    """Draw what was sampled. A period without a sample is a gap.

    Returns:
        The charts, and their numbers as a table, whose columns have the order of the lines.
    """
    if len(past) < 2:
        return {"charts": [], "numbers": None}
    points = _points(past, level, now)
    lines = [(chart, line) for chart in _CHARTS for line in chart.lines]
    return {
        "charts": [_draw(chart, points) for chart in _CHARTS],
        "numbers": {
            "headings": [f"{line.name}{'/s' if chart.unit is rate else ''}" for chart, line in lines],
            "rows": [(point.at, [_cell(chart.unit, point.value(line)) for chart, line in lines]) for point in points],
        },
    }


def spark_of(past: Sequence[RingSample], now: float) -> Markup | None:
    """Draw the waiting messages of the last hour. A point without a sample is a gap."""
    end = now // _SPARK_STEP + 1
    values: list[float | None] = [None] * _SPARK_POINTS
    for sample in past:
        place = int(sample.at // _SPARK_STEP - end + _SPARK_POINTS)
        if 0 <= place < _SPARK_POINTS:
            values[place] = max(values[place] or 0.0, float(sample.ready))
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return sparkline(f"now {known[-1]:,.0f}, most {max(known):,.0f}", values)


def _points(past: Sequence[RingSample], level: int, now: float) -> list[_Point]:
    """Return the periods from the first sample to now."""
    step = LEVELS[level].step * _FOLDED[level]
    found: dict[float, list[RingSample]] = {}
    for sample in past:
        found.setdefault(sample.at // step * step, []).append(sample)
    # The current period may have no sample yet.
    last = max(*found, now // step * step - step)
    times = [min(found) + step * i for i in range(int((last - min(found)) // step) + 1)]
    return [
        _Point(at, fold(found[at], at), LEVELS[level].step * len(found[at])) if at in found else _Point(at, None, 0.0)
        for at in times
    ]


def _draw(chart: _Chart, points: Sequence[_Point]) -> Markup:
    series = [Series(line.name, [point.value(line) for point in points]) for line in chart.lines]
    return line_chart(chart.name, [point.at for point in points], series, chart.unit, chart.scale)


def _cell(unit: Callable[[float], str], value: float | None) -> str:
    return DASH if value is None else unit(value)


_CHARTS: Sequence[_Chart] = (
    _Chart(
        "Messages",
        lambda value: f"{value:,.0f}",
        count_scale,
        [_Line("waiting", lambda one, _: one.ready), _Line("running", lambda one, _: one.leased)],
    ),
    _Chart(
        "Finished per second",
        rate,
        number_scale,
        [
            _Line("done", lambda one, seconds: one.acked / seconds),
            _Line("retried", lambda one, seconds: one.retried / seconds),
            _Line("failed", lambda one, seconds: one.failures / seconds),
        ],
    ),
    _Chart(
        "Wait and run time, p95",
        duration,
        seconds_scale,
        [
            _Line("wait", lambda one, _: None if one.wait is None else one.wait.p95),
            _Line("run", lambda one, _: None if one.run is None else one.run.p95),
        ],
    ),
)
