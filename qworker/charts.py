"""Charts as SVG text: lines over time, sparklines, ranges and bars. Pages show them without a script.

They contain no script and no style, only classes that the page colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from markupsafe import Markup

from qworker.names import printable

__all__ = [
    "Bar",
    "Range",
    "Series",
    "bar_chart",
    "format_text",
    "line_chart",
    "nice_ceiling",
    "range_chart",
    "sparkline",
]

Unit = Callable[[float], str]

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
_ROW, _LABELS = 26, 220
_SPARK_WIDTH, _SPARK_HEIGHT = 96, 24
# The number of colours of a page.
COLOURS = 8


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


def line_chart(name: str, times: Sequence[float], series: Sequence[Series], unit: Unit) -> Markup:
    """Draw lines over time, with a scale, a legend if there are several, and the values at the pointer."""
    top = nice_ceiling(max((v for one in series for v in one.values if v is not None), default=0.0))
    xs = _positions(times)
    parts = [_grid(top, unit), _time_axis(times, xs)]
    parts += [
        _element("path", d=_path(xs, one.values, top), class_=f"line c{i % COLOURS}") for i, one in enumerate(series)
    ]
    parts.append(_tooltip(times, xs, series, unit))
    chart = _svg(name, _HEIGHT, parts)
    return _figure(name, chart, [one.name for one in series] if len(series) > 1 else [])


def sparkline(name: str, values: Sequence[float | None]) -> Markup:
    """Draw one small line from 0 to its largest value, without a scale."""
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    points: list[str] = []
    pen_down = False
    for i, value in enumerate(values):
        if value is not None:
            x = 1 + (_SPARK_WIDTH - 2) * i / max(1, len(values) - 1)
            y = _SPARK_HEIGHT - 2 - (_SPARK_HEIGHT - 4) * value / top
            points.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}" + ("" if pen_down else "h.01"))
        pen_down = value is not None
    line = _element("path", d="".join(points), class_="line c0")
    return _element(
        "svg", line, viewBox=f"0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}", class_="spark", role="img", aria_label=name
    )


def range_chart(name: str, rows: Sequence[Range], unit: Unit) -> Markup:
    """Draw a bar from low to high and a dot at the middle in each row, on a logarithmic scale."""
    values = [v for row in rows for v in (row.low, row.middle, row.high) if v > 0]
    low = math.floor(math.log10(min(values))) if values else -3
    high = max(low + 1, math.ceil(math.log10(max(values)))) if values else 0
    width = _WIDTH - _LABELS - _RIGHT

    def x(value: float) -> float:
        place = math.log10(max(value, 10.0**low)) - low
        return _LABELS + width * min(1.0, place / (high - low))

    height = _TOP + _ROW * len(rows) + _BOTTOM
    parts = [_vertical_line(x(10.0**power), height, unit(10.0**power)) for power in range(low, high + 1)]
    for i, row in enumerate(rows):
        y = _TOP + _ROW * (i + 0.5)
        shape = _element("line", x1=x(row.low), x2=max(x(row.high), x(row.low) + 1), y1=y, y2=y, class_="range c0")
        dot = _element("circle", cx=x(row.middle), cy=y, r=4, class_="dot c0")
        parts.append(_row(row.label, y, f"{unit(row.low)} · {unit(row.middle)} · {unit(row.high)}", shape + dot))
    return _figure(name, _svg(name, height, parts), [])


def bar_chart(name: str, parts_of: Sequence[str], rows: Sequence[Bar], unit: Unit) -> Markup:
    """Draw the parts of each row next to one another, on a scale from 0."""
    top = nice_ceiling(max((sum(row.parts) for row in rows), default=0.0))
    width = _WIDTH - _LABELS - _RIGHT
    height = _TOP + _ROW * len(rows) + _BOTTOM
    parts = [_vertical_line(_LABELS + width * value / top, height, unit(value)) for value in _ticks(top)]
    for i, row in enumerate(rows):
        y = _TOP + _ROW * (i + 0.5)
        x = float(_LABELS)
        shapes = Markup()
        for j, value in enumerate(row.parts):
            length = width * value / top
            shapes += _element("rect", x=x, y=y - 8, width=length, height=16, class_=f"bar c{j % COLOURS}")
            x += length
        words = ", ".join(f"{unit(value)} {what}" for what, value in zip(parts_of, row.parts, strict=True))
        parts.append(_row(row.label, y, words, shapes))
    return _figure(name, _svg(name, height, parts), parts_of if len(parts_of) > 1 else [])


def format_text(value: object) -> str:
    """Return a value as text without control characters except line ends. Markup is returned unchanged."""
    if isinstance(value, Markup):
        return value
    # Nearly all values are plain.
    if isinstance(value, str) and value.isascii() and value.isprintable():
        return value
    return "\n".join(printable(line) for line in str(value).split("\n"))


def nice_ceiling(value: float) -> float:
    """Return the smallest of 1, 2, 4, 5, 6, 8 or 10 times a power of ten that is not below `value`, or 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def _ticks(top: float) -> list[float]:
    """Return the values of a scale that ends at a `nice_ceiling`: parts of it that are round themselves."""
    lead = round(top / 10.0 ** math.floor(math.log10(top) + 1e-9))
    parts = {6: 3, 2: 4, 4: 4, 8: 4}.get(lead, 5)
    return [top * i / parts for i in range(parts + 1)]


# -- the pieces -------------------------------------------------------------------------------------------------------


def _element(name: str, *content: str, **attributes: str | float) -> Markup:
    """Return one element.

    Args:
        name: Its name, which must not be foreign text.
        content: Text, which is escaped, and markup.
        attributes: The attributes, which are escaped. `class_` is `class`, and `aria_label` is `aria-label`. Numbers
            are shortened.
    """
    pairs = Markup().join(
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"),
            value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip("."),
        )
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, pairs, Markup().join(map(format_text, content)))


def _figure(name: str, chart: Markup, legend: Sequence[str]) -> Markup:
    keys = [_element("li", _element("span", class_=f"key c{i % COLOURS}"), one) for i, one in enumerate(legend)]
    return _element(
        "figure", _element("figcaption", name), _element("ul", *keys, class_="legend") if keys else "", chart
    )


def _svg(name: str, height: float, parts: Sequence[Markup]) -> Markup:
    return _element("svg", *parts, viewBox=f"0 0 {_WIDTH} {height:g}", role="img", aria_label=name)


def _positions(times: Sequence[float]) -> list[float]:
    """Return the position of each time, from the left edge to the right one."""
    width = _WIDTH - _LEFT - _RIGHT
    return [_LEFT + width * i / max(1, len(times) - 1) for i in range(len(times))]


def _y_position(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top


def _path(xs: Sequence[float], values: Sequence[float | None], top: float) -> str:
    """Draw a line that is interrupted where there is no value. A single value is a dot."""
    commands: list[str] = []
    pen_down = False
    for x, value in zip(xs, values, strict=True):
        if value is None:
            pen_down = False
            continue
        commands.append(
            f"{'L' if pen_down else 'M'}{x:.1f} {_y_position(value, top):.1f}" + ("" if pen_down else "h.01")
        )
        pen_down = True
    return "".join(commands)


def _grid(top: float, unit: Unit) -> Markup:
    parts: list[Markup] = []
    for value in _ticks(top):
        y = _y_position(value, top)
        parts.append(_element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        # The lowest label is above the line, because the times are below it.
        parts.append(_element("text", unit(value), x=_LEFT - 6, y=y + (4 if value else -1), class_="end"))
    return Markup().join(parts)


def _vertical_line(x: float, height: float, label: str) -> Markup:
    """Draw a line of a scale below the rows."""
    line = _element("line", x1=x, x2=x, y1=_TOP, y2=height - _BOTTOM, class_="grid")
    return line + _element("text", label, x=x, y=height - _BOTTOM + 16, class_="mid")


def _row(label: str, y: float, words: str, shapes: Markup) -> Markup:
    shown = label if len(label) <= 32 else label[:31] + "…"
    name = _element("text", shown, x=_LABELS - 8, y=y + 4, class_="end")
    return _element("g", _element("title", f"{label}: {words}"), name, shapes)


def _time_axis(times: Sequence[float], xs: Sequence[float]) -> Markup:
    if not times:
        return Markup()
    shown = _time_format(times[-1] - times[0])
    every = max(1, math.ceil(len(times) / 7))
    return Markup().join(
        _element("text", _moment(times[i], shown), x=xs[i], y=_HEIGHT - _BOTTOM + 20, class_="mid")
        for i in range(0, len(times), every)
        if xs[i] < _WIDTH - _RIGHT - 20 or i == 0
    )


def _time_format(span_s: float) -> str:
    if span_s < 600:
        return "%H:%M:%S"
    return "%H:%M" if span_s < 86_400 else "%m-%d %H:%M" if span_s < 14 * 86_400 else "%Y-%m-%d"


def _moment(at: float, shown: str) -> str:
    return datetime.fromtimestamp(at, UTC).strftime(shown)


def _tooltip(times: Sequence[float], xs: Sequence[float], series: Sequence[Series], unit: Unit) -> Markup:
    """Draw an invisible strip for each time that shows its values."""
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(times) - 1)
    strips: list[Markup] = []
    for i, at in enumerate(times):
        told = [f"{one.name}: {unit(v)}" for one in series if (v := one.values[i]) is not None]
        words = _element("title", "\n".join([_moment(at, "%Y-%m-%d %H:%M:%S UTC"), *told]))
        strips.append(
            _element(
                "rect", words, x=xs[i] - step / 2, y=_TOP, width=step, height=_HEIGHT - _TOP - _BOTTOM, class_="hover"
            )
        )
    return Markup().join(strips)
