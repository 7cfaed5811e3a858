"""Charts as HTML and SVG text: lines over time, sparklines, ranges and bars. Pages show them without a script.

They contain no script and no style, only classes that `page.css` knows. A chart is as wide as its place, so the
positions in it are per cent, and its labels have the same size everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from qworker.names import printable

__all__ = [
    "Bar",
    "Range",
    "Series",
    "bar_chart",
    "count_scale",
    "format_text",
    "line_chart",
    "number_scale",
    "page_style",
    "range_chart",
    "seconds_scale",
    "sparkline",
]

Unit = Callable[[float], str]
# Returns the values of a scale from 0 to at least the given one.
Scale = Callable[[float], Sequence[float]]
_Point = tuple[float, float]

# The size of the plane of lines, which is stretched.
_WIDTH, _HEIGHT = 1000.0, 100.0
_SPARK_WIDTH, _SPARK_HEIGHT = 75, 20
# The number of colours of a page.
COLOURS = 8
# Lines whose areas can be told apart.
_MOST_AREAS = 3
# The largest part of a scale that a line fills: one at the upper edge looks cut off.
_FULL = 0.96
# The ends of scales, with the number of their parts, times a power of ten.
_ENDS = ((1.0, 2), (1.2, 3), (1.5, 3), (2.0, 2), (3.0, 3), (4.0, 4), (6.0, 3), (8.0, 4), (10.0, 2), (12.0, 3))
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
# Seconds between two labels of a time axis, and how many there can be.
_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 14, 28, 91, 182, 364)),
)
_MOST_LABELS = 6


class Series(NamedTuple):
    """A line: one value for each time, or None if there is no value."""

    name: str
    values: Sequence[float | None]


class Range(NamedTuple):
    """A row of a range chart: from `low` through `middle` to `high`."""

    label: str
    low: float
    middle: float
    high: float


class Bar(NamedTuple):
    """A row of a bar chart: parts that add up, in the order of the chart's names."""

    label: str
    parts: Sequence[float]


def page_style() -> str:
    """Return the style sheet of all pages that show charts."""
    return files("qworker").joinpath("page.css").read_text()


def line_chart(
    name: str, times: Sequence[float], series: Sequence[Series], unit: Unit, scale: Scale, *, tooltips: bool = False
) -> Markup:
    """Draw lines over time, with a scale, and a legend with the last values.

    Args:
        name: What it shows.
        times: Unix seconds, in their order.
        series: The lines.
        unit: Makes a text of a value.
        scale: The function that makes the scale.
        tooltips: Whether each time has its values as a tooltip, for pages without a script.
    """
    ticks = scale(max((v for one in series for v in one.values if v is not None), default=0.0) / _FULL)
    xs = _positions(times)
    lines: list[Markup] = []
    for i, one in enumerate(series):
        runs = _runs(
            (x, None if v is None else _HEIGHT * (1 - v / ticks[-1])) for x, v in zip(xs, one.values, strict=True)
        )
        colour = f"c{i % COLOURS}"
        if len(series) <= _MOST_AREAS and i == 0:
            lines.append(_element("path", d=_area(runs, _HEIGHT), class_=f"area {colour}"))
        lines.append(_element("path", d=_line(runs), class_=f"line {colour}"))
    plane = _element("svg", *lines, viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}", preserveAspectRatio="none", class_="plane")
    parts = [_grid(ticks, unit), _time_axis(times), plane, _tooltips(times, series, unit) if tooltips else ""]
    label = ". ".join([name, *(_spoken(one, unit) for one in series)])
    legend = [(one.name, _last(one.values, unit)) for one in series]
    return _figure(name, legend, _element("svg", *parts, class_="lines", role="img", aria_label=label))


def sparkline(name: str, values: Sequence[float | None]) -> Markup:
    """Draw one small area from 0 to somewhat above its largest value, without a scale."""
    top = max((value for value in values if value is not None), default=0.0) / _FULL or 1.0
    # The sides and the floor are outside of what is shown, so that only the upper edge has a line.
    step = (_SPARK_WIDTH + 4) / max(1, len(values) - 1)
    runs = _runs(
        (i * step - 2, None if v is None else (_SPARK_HEIGHT - 1) * (1 - v / top)) for i, v in enumerate(values)
    )
    area = _element("path", d=_area(runs, _SPARK_HEIGHT + 2, digits=0))
    return _element(
        "svg", area, viewBox=f"0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}", class_="spark", role="img", aria_label=name
    )


def range_chart(name: str, rows: Sequence[Range], unit: Unit) -> Markup:
    """Draw a bar from low to high and a dot at the middle in each row, on a logarithmic scale."""
    values = [v for row in rows for v in (row.low, row.middle, row.high) if v > 0]
    low = math.floor(math.log10(min(values))) if values else -3
    high = max(low + 1, math.ceil(math.log10(max(values)))) if values else 0

    def x(value: float) -> str:
        place = math.log10(max(value, 10.0**low)) - low
        return f"{100 * min(1.0, place / (high - low)):.2f}%"

    shown: list[tuple[str, Markup, str]] = []
    for row in rows:
        line = _element("line", x1=x(row.low), x2=x(row.high), y1="50%", y2="50%", class_="range c0")
        dot = _element("circle", cx=x(row.middle), cy="50%", r=5, class_="dot c0")
        words = " · ".join(unit(value) for value in (row.low, row.middle, row.high))
        shown.append((row.label, line + dot, words))
    return _figure(name, [], _rows(name, shown))


def bar_chart(name: str, parts_of: Sequence[str], rows: Sequence[Bar], unit: Unit) -> Markup:
    """Draw the parts of each row next to one another, on a scale from 0."""
    top = max((sum(row.parts) for row in rows), default=0.0) or 1.0
    shown: list[tuple[str, Markup, str]] = []
    for row in rows:
        x, bars = 0.0, Markup()
        for i, value in enumerate(row.parts):
            length = 100 * value / top
            bars += _element("rect", x=f"{x:.2f}%", width=f"{length:.2f}%", height="100%", class_=f"bar c{i % COLOURS}")
            x += length
        shown.append((row.label, bars, " · ".join(unit(value) for value in row.parts)))
    return _figure(name, [(part, "") for part in parts_of], _rows(name, shown))


def format_text(value: object) -> str:
    """Return a value as text without control characters except line ends. Markup is returned unchanged."""
    if isinstance(value, Markup):
        return value
    # Nearly all values are plain.
    if isinstance(value, str) and value.isascii() and value.isprintable():
        return value
    return "\n".join(printable(line) for line in str(value).split("\n"))


# -- scales ------------------------------------------------------------------------------------------------------------


def number_scale(most: float) -> list[float]:
    """Return a scale in round numbers."""
    return _scale(most, is_whole=False)


def count_scale(most: float) -> list[float]:
    """Return a scale in whole numbers."""
    return _scale(max(most, 1.5), is_whole=True)


def seconds_scale(most: float) -> list[float]:
    """Return a scale in round numbers of seconds, minutes, hours or days."""
    unit = next((one for one in (_DAY, _HOUR, _MINUTE) if most >= 1.5 * one), 1)
    return [unit * value for value in _scale(most / unit, is_whole=unit > 1)]


def _scale(most: float, *, is_whole: bool) -> list[float]:
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most))
    ends = ((end * power, parts) for end, parts in _ENDS)
    top, parts = next(
        (top, parts)
        for top, parts in ends
        if top >= most * (1 - 1e-9) and (not is_whole or math.isclose(top / parts % 1, 0, abs_tol=1e-9))
    )
    return [top * i / parts for i in range(parts + 1)]


# -- the pieces --------------------------------------------------------------------------------------------------------


def _element(name: str, *content: str, **attributes: str | float) -> Markup:
    """Return one element.

    Args:
        name: Its name, which must not be foreign text.
        content: Text, which is escaped, and markup.
        attributes: The attributes, which are text too. `class_` is `class`, and `aria_label` is `aria-label`. Numbers
            are shortened.
    """
    pairs = Markup().join(
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"),
            format_text(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip("."),
        )
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, pairs, Markup().join(map(format_text, content)))


def _figure(name: str, legend: Sequence[tuple[str, str]], chart: Markup) -> Markup:
    keys = [
        _element("li", _element("span", class_=f"key c{i % COLOURS}"), f"{word} ", _element("b", value))
        for i, (word, value) in enumerate(legend)
    ]
    return _element(
        "figure", _element("figcaption", name), _element("ul", *keys, class_="legend") if keys else "", chart
    )


def _rows(name: str, rows: Sequence[tuple[str, Markup, str]]) -> Markup:
    """Return a table with a label, a picture and the numbers in each row."""
    lines = [
        _element(
            "tr",
            _element("th", label, scope="row"),
            _element("td", _element("svg", shapes, class_="row", aria_hidden="true")),
            _element("td", words),
        )
        for label, shapes, words in rows
    ]
    return _element("table", _element("caption", name, class_="hidden"), _element("tbody", *lines), class_="bars")


def _positions(times: Sequence[float]) -> list[float]:
    """Return the position of each time, from the left edge to the right one."""
    span = times[-1] - times[0] if times else 0.0
    return [_WIDTH * (at - times[0]) / (span or 1.0) for at in times]


def _runs(points: Iterable[tuple[float, float | None]]) -> list[list[_Point]]:
    """Split points at those without a value."""
    groups = groupby(points, key=lambda point: point[1] is not None)
    return [[(x, y) for x, y in run if y is not None] for has_value, run in groups if has_value]


def _line(runs: Sequence[Sequence[_Point]]) -> str:
    """Draw a line that is interrupted where there is no value. A single value is a dot."""
    return "".join(f"M{_pairs(run)}" + ("h.01" if len(run) == 1 else "") for run in runs)


def _area(runs: Sequence[Sequence[_Point]], floor: float, digits: int = 1) -> str:
    """Draw what is below a line."""
    return "".join(
        f"M{run[0][0]:.{digits}f} {floor:g} {_pairs(run, digits)} {run[-1][0]:.{digits}f} {floor:g}Z" for run in runs
    )


def _pairs(points: Sequence[_Point], digits: int = 1) -> str:
    return " ".join(f"{x:.{digits}f} {y:.{digits}f}" for x, y in points)


def _grid(ticks: Sequence[float], unit: Unit) -> Markup:
    parts: list[Markup] = []
    for value in ticks:
        y = f"{100 * (1 - value / ticks[-1]):.2f}%"
        parts.append(_element("line", x2="100%", y1=y, y2=y, class_="grid"))
        label = re.sub(r"\.0(?!\d)", "", unit(value)) if value else "0"
        parts.append(_element("text", label, x=-8, y=y, dy=4, class_="end"))
    return Markup().join(parts)


def _time_axis(times: Sequence[float]) -> Markup:
    """Draw labels at round times. A script can show them in another zone."""
    if len(times) < 2:
        return Markup()
    first, span = times[0], times[-1] - times[0]
    step = next((step for step in _STEPS if span / step < _MOST_LABELS), _STEPS[-1])
    shown = "%H:%M:%S" if step < _MINUTE else "%H:%M" if step < _DAY else "%d %b"
    labels: list[Markup] = []
    at = math.ceil(first / step) * step
    while at <= times[-1]:
        x = f"{100 * (at - first) / span:.2f}%"
        labels.append(_element("text", _moment(at, shown), x=x, y="100%", dy=20, class_="mid", data_at=at))
        at += step
    return Markup().join(labels)


def _moment(at: float, shown: str) -> str:
    return datetime.fromtimestamp(at, UTC).strftime(shown)


def _tooltips(times: Sequence[float], series: Sequence[Series], unit: Unit) -> Markup:
    """Draw an invisible strip for each time that shows its values."""
    width = 100 / max(1, len(times) - 1)
    strips: list[Markup] = []
    for i, at in enumerate(times):
        told = [f"{one.name}: {unit(v)}" for one in series if (v := one.values[i]) is not None]
        words = _element("title", "\n".join([_moment(at, "%Y-%m-%d %H:%M:%S UTC"), *told]))
        x = f"{width * (i - 0.5):.2f}%"
        strips.append(_element("rect", words, x=x, width=f"{width:.2f}%", height="100%", class_="hover"))
    return Markup().join(strips)


def _last(values: Sequence[float | None], unit: Unit) -> str:
    return "" if not values or values[-1] is None else unit(values[-1])


def _spoken(one: Series, unit: Unit) -> str:
    """Return what a person needs to hear of a line."""
    known = [value for value in one.values if value is not None]
    if not known:
        return f"{one.name}: no value"
    return f"{one.name}: now {unit(known[-1])}, least {unit(min(known))}, most {unit(max(known))}"
