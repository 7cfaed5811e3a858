"""One module per figure: `measure(bench)` returns what it found; its other functions run in processes of their own."""

from __future__ import annotations

from importlib import import_module

from harness import Bench, Figure

__all__ = ["FIGURES", "SPARK_FIGURES", "measure"]

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
    "peers",
    "depth",
    "held",
    "redis",
    "redis_latency",
    "rfq",
    "sq",
    "vsqs",
    "fsq",
    "mq",
)
# Those of the pipeline, which need a Java.
SPARK_FIGURES = ("spark_read", "spark_load", "spark_archive")


def measure(name: str, bench: Bench) -> list[Figure]:
    """Measure one."""
    found: list[Figure] = import_module(f"figures.{name}").measure(bench)
    return found
