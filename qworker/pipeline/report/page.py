"""A report as one HTML page that needs nothing else: no script, no file, no network.

Text from messages (names, errors) is escaped, and the page's policy forbids everything except its own style sheet,
which is named by its hash. So the browser would not run a script that was not escaped.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from qworker.pipeline.report import plots
from qworker.pipeline.report.format import (
    failure_rows,
    format_count,
    format_rate,
    format_seconds,
    format_time,
    queue_rows,
    task_rows,
    worker_rows,
)
from qworker.pipeline.report.markup import element, table, text
from qworker.pipeline.report.model import Percentiles, Report, TimeStep

__all__ = ["page"]


def page(report: Report) -> str:
    """Return the complete document."""
    style = files("qworker.pipeline.report").joinpath("page.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    # `meta` does not have an end tag.
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
    ) + element("title", text(f"qworker report: {report.source}"))
    body = element("body", _header(report), _tiles(report), _plots(report), _tables(report))
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{style}</style></head>{body}</html>\n'


def _header(report: Report) -> str:
    period = f"{format_time(report.since)} to {format_time(report.until)}, in steps of {format_seconds(report.step_s)}"
    lines = [f"{report.source}", period, f"made at {format_time(report.made_at)}"]
    return element("header", element("h1", "Queue report"), *(element("p", text(line)) for line in lines))


def _tiles(report: Report) -> str:
    done = sum(queue.done for queue in report.queues)
    tiles = [
        (format_count(sum(queue.enqueued for queue in report.queues)), "enqueued"),
        (format_count(done), "done"),
        (format_count(sum(queue.failed for queue in report.queues)), "failed"),
        (format_count(sum(queue.retried for queue in report.queues)), "retries"),
        (format_count(sum(queue.open for queue in report.queues)), "open at the end"),
        (format_rate(done / report.span_s if report.span_s > 0 else 0.0), "done per second"),
    ]
    return element(
        "ul", *(element("li", element("b", text(value)), text(what)) for value, what in tiles), class_="tiles"
    )


def _plots(report: Report) -> str:
    times = [moment.at for moment in report.moments]
    per_second = [
        plots.Series("enqueued", [moment.enqueued / report.step_s for moment in report.moments]),
        plots.Series("done", [moment.done / report.step_s for moment in report.moments]),
        plots.Series("tried again", [moment.retried / report.step_s for moment in report.moments]),
        plots.Series("failed", [moment.failed / report.step_s for moment in report.moments]),
    ]
    depths = [plots.Series(depth.queue, [float(n) for n in depth.counts]) for depth in report.depths]
    shown = [
        plots.line_chart("Throughput, messages per second", times, per_second, format_rate),
        plots.line_chart("Queue depth, open messages", times, depths, format_count),
        plots.line_chart("Wait before the first run", times, _spread(report, wait=True), format_seconds),
        plots.line_chart("Run time", times, _spread(report, wait=False), format_seconds),
    ]
    runs = [plots.Range(_name(t.queue, t.task), t.run.p50, t.run.p90, t.run.p99) for t in report.tasks[:15] if t.run]
    if runs:
        shown.append(plots.range_chart("Run time by task: median, 90 %, 99 %", runs, format_seconds))
    failures = [plots.Bar(_name(f.task or f.queue, f.error), (f.failed, f.retried)) for f in report.failures[:15]]
    if failures:
        shown.append(
            plots.bar_chart("Failures by task and error", ["failed permanently", "tried again"], failures, format_count)
        )
    return element("div", *shown, class_="plots")


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


def _tables(report: Report) -> str:
    parts: list[str] = []
    for heading, (headings, rows), words in (
        ("Queues", queue_rows(report), 1),
        ("Tasks", task_rows(report), 2),
        ("Failures", failure_rows(report), 3),
        ("Workers", worker_rows(report), 1),
    ):
        if rows:
            parts += [element("h2", text(heading)), table(headings, rows, words=words)]
    moments = [
        [
            format_time(m.at),
            format_count(m.enqueued),
            format_count(m.done),
            format_count(m.failed),
            format_count(m.retried),
        ]
        for m in report.moments
    ]
    steps = table(["step", "enqueued", "done", "failed", "tried again"], moments)
    return "".join(parts) + element("details", element("summary", "Every step of time"), steps)
