"""The charts of a queue, from the samples that are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from qworker.charts import Series, line_chart
from qworker.sampling import RingSample
from qworker.sampling.ring import LEVELS
from qworker.ui.text import duration

__all__ = ["charts_of"]

_Value = Callable[[RingSample], float | None]


def charts_of(past: Sequence[RingSample], level: int, now: float) -> list[Markup]:
    """Draw what was sampled. A period without a sample is a gap."""
    if len(past) < 2:
        return []
    step = LEVELS[level].step
    begin, end = past[0].at, LEVELS[level].start(now)
    samples: list[RingSample | None] = [None] * (int((end - begin) // step) + 1)
    for sample in past:
        samples[min(len(samples) - 1, int((sample.at - begin) // step))] = sample
    times = [begin + step * i for i in range(len(samples))]

    def chart(name: str, unit: Callable[[float], str], lines: Mapping[str, _Value]) -> Markup:
        series = [
            Series(word, [None if one is None else value(one) for one in samples]) for word, value in lines.items()
        ]
        return line_chart(name, times, series, unit)

    return [
        chart("Messages", _short, {"waiting": lambda one: one.ready, "running": lambda one: one.leased}),
        chart(
            "Finished per second",
            _short,
            {
                "done": lambda one: one.acked / step,
                "retried": lambda one: one.retried / step,
                "failed": lambda one: one.failures / step,
            },
        ),
        chart(
            "Wait and run time, 95 %",
            duration,
            {
                "wait": lambda one: None if one.wait is None else one.wait.p95,
                "run": lambda one: None if one.run is None else one.run.p95,
            },
        ),
    ]


def _short(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
