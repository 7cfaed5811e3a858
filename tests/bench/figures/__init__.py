"""One module per figure: `measure(bench)` returns what it found; its other functions run in processes of their own.

A figure with peers also has `own(bench)`: qworker's side alone, in numbers of its own instead of ratios. Two codes are
compared by the numbers' names (`Figure.what`), and not by ratios: so each ratio stands beside a number of its own.
"""

from __future__ import annotations

from importlib import import_module

from harness import Bench, Figure

__all__ = ["COUNTED", "FIGURES", "SPARK_FIGURES", "measure"]

# In the order of cost: what is quick to tell comes first.
FIGURES = (
    "overhead",
    "publish",
    "latency",
    "idle",
    "health",
    "outage",
    "cycle",
    "metrics",
    "history",
    "scaling",
    "restarts",
    "memory",
    "serve",
    "ui",
    "poison",
    "schedules",
    "cancel",
    "peers",
    "depth",
    "ids",
    "jobs",
    "held",
    "priorities",
    "redis",
    "redis_latency",
    "rfq",
    "sq",
    "vsqs",
    "fsq",
    "mq",
)
# What they ask is a bound that `make bench` checks, and no speed: `--against` compares them only where they are named.
COUNTED = ("health", "outage", "restarts", "memory", "serve", "ui", "poison", "schedules", "cancel")
# Those of the pipeline, which need a Java.
SPARK_FIGURES = ("spark_read", "spark_load", "spark_archive")


def measure(name: str, bench: Bench) -> list[Figure]:
    """Measure one."""
    module = import_module(f"figures.{name}")
    function = getattr(module, "own", module.measure) if bench.own else module.measure
    found: list[Figure] = function(bench)
    return found
