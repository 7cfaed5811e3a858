"""The charts of a queue, from the samples that are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from markupsafe import Markup

from qworker.charts import Scale, Series, count_scale, line_chart, number_scale, seconds_scale, sparkline
from qworker.sampling import RingSample
from qworker.sampling.ring import LEVELS, fold
from qworker.ui.text import DASH, duration, rate, when

__all__ = ["Drawings", "charts_of", "spark_of"]

T = TypeVar("T")

# Samples that are one point of a chart, by level. So a chart has at most 168 points, and its table as many rows.
_FOLDED = (3, 2, 2)
# Points of a sparkline: an hour, each point for 2 minutes.
_SPARK_POINTS, _SPARK_STEP = 30, 120.0
# What is kept: a sparkline has half a kilobyte, the charts of a page 50.
_MOST_SPARKS, _MOST_CHARTS = 1000, 20


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


class Drawings:
    """Keeps what was drawn until there is a newer sample. To draw takes longer than all the rest of a page."""

    def __init__(self) -> None:
        self._sparks = _Kept[Markup | None](_MOST_SPARKS)
        self._charts = _Kept[dict[str, Any]](_MOST_CHARTS)

    def spark(self, queue: str, past: Sequence[RingSample], now: float) -> Markup | None:
        """Return what `spark_of` draws."""
        return self._sparks.get(queue, past, now // _SPARK_STEP, partial(spark_of, past, now))

    def charts(self, queue: str, past: Sequence[RingSample], level: int, now: float) -> dict[str, Any]:
        """Return what `charts_of` draws."""
        return self._charts.get((queue, level), past, now // _step_of(level), partial(charts_of, past, level, now))


class _Kept(Generic[T]):
    """The last result for each key, while it was made of the same samples in the same period."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, tuple[Sequence[RingSample], float, T]] = OrderedDict()

    def get(self, key: Hashable, past: Sequence[RingSample], period: float, draw: Callable[[], T]) -> T:
        kept = self._kept.get(key)
        if kept is None or kept[0] is not past or kept[1] != period:
            kept = self._kept[key] = past, period, draw()
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return kept[2]


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
            "rows": Markup().join(
                _row(point.at, [_cell(chart.unit, point.value(line)) for chart, line in lines]) for point in points
            ),
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


def _step_of(level: int) -> float:
    """Return the seconds of one point of a chart."""
    return LEVELS[level].step * _FOLDED[level]


def _points(past: Sequence[RingSample], level: int, now: float) -> list[_Point]:
    """Return the periods from the first sample to now."""
    step = _step_of(level)
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


def _row(at: float, cells: Sequence[str]) -> Markup:
    values = Markup().join(Markup('<td class="number">{}</td>').format(cell) for cell in cells)
    return Markup('<tr><th scope="row">{}</th>{}</tr>').format(when(at), values)


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
