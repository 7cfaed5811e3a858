"""A report as one HTML page that needs nothing else: no script, no file, no network.

Text from messages (names, errors) is escaped, and the page's policy forbids everything except its own style sheet,
which is named by its hash. So the browser would not run a script that was not escaped.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qworker import charts as plots
from qworker.pipeline.report.format import (
    failure_rows,
    format_count,
    format_rate,
    format_seconds,
    format_time,
    queue_rows,
    step_rows,
    task_rows,
    worker_rows,
)
from qworker.pipeline.report.model import Percentiles, Report, TimeStep

__all__ = ["render"]


def render(report: Report) -> str:
    """Return the complete document."""
    style = plots.page_style() + files("qworker.pipeline.report").joinpath("templates/report.css").read_text()
    environment = Environment(
        loader=PackageLoader("qworker.pipeline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        # Each value passes through it before it is escaped.
        finalize=plots.format_text,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "format_count": format_count,
        "format_rate": format_rate,
        "format_seconds": format_seconds,
        "format_time": format_time,
    }
    return environment.get_template("page.html").render(
        report=report,
        style=Markup(style),
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        plots=_plots(report),
        # A heading, the table, and the number of its first columns that are texts. The others are numbers.
        tables=[
            ("Queues", queue_rows(report), 1),
            ("Tasks", task_rows(report), 2),
            ("Failures", failure_rows(report), 3),
            ("Workers", worker_rows(report), 1),
        ],
        steps=step_rows(report),
    )


def _plots(report: Report) -> list[Markup]:
    times = [moment.at for moment in report.moments]
    per_second = [
        plots.Series("enqueued", [moment.enqueued / report.step_s for moment in report.moments]),
        plots.Series("done", [moment.done / report.step_s for moment in report.moments]),
        plots.Series("tried again", [moment.retried / report.step_s for moment in report.moments]),
        plots.Series("failed", [moment.failed / report.step_s for moment in report.moments]),
    ]
    depths = [plots.Series(depth.queue, [float(n) for n in depth.counts]) for depth in report.depths]
    waits, runs = _spread(report, wait=True), _spread(report, wait=False)
    shown = [
        plots.line_chart(name, times, series, unit, scale, tooltips=True)
        for name, series, unit, scale in (
            ("Throughput, messages per second", per_second, format_rate, plots.number_scale),
            ("Queue depth, open messages", depths, format_count, plots.count_scale),
            ("Wait before the first run", waits, format_seconds, plots.seconds_scale),
            ("Run time", runs, format_seconds, plots.seconds_scale),
        )
    ]
    ranges = [plots.Range(_name(t.queue, t.task), t.run.p50, t.run.p90, t.run.p99) for t in report.tasks[:15] if t.run]
    if ranges:
        shown.append(plots.range_chart("Run time by task: median, 90 %, 99 %", ranges, format_seconds))
    failures = [plots.Bar(_name(f.task or f.queue, f.error), (f.failed, f.retried)) for f in report.failures[:15]]
    if failures:
        shown.append(
            plots.bar_chart("Failures by task and error", ["failed permanently", "tried again"], failures, format_count)
        )
    return shown


def _spread(report: Report, *, wait: bool) -> list[plots.Series]:
    """Return the median and the high percentiles of each step."""

    def of(moment: TimeStep) -> Percentiles | None:
        return moment.wait if wait else moment.run

    found = [of(moment) for moment in report.moments]
    return [
        plots.Series("median", [one.p50 if one else None for one in found]),
        plots.Series("90 %", [one.p90 if one else None for one in found]),
        plots.Series("99 %", [one.p99 if one else None for one in found]),
    ]


def _name(first: str, second: str | None) -> str:
    return f"{first}: {second}" if second else first
