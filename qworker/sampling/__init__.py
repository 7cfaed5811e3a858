"""Samples of queues: counts with a budget, rates from the history, and a ring of past samples.

`qworker top`, the health port and other displays ask a `QueueSampler`, and never count themselves.
"""

from qworker.sampling.errors import ErrorCount
from qworker.sampling.ring import RingSample
from qworker.sampling.sampler import QueueSampler
from qworker.sampling.snapshot import Counted, FlowRates, Percentiles, QueueSnapshot, StoreSnapshot, WorkerSeen

__all__ = [
    "Counted",
    "ErrorCount",
    "FlowRates",
    "Percentiles",
    "QueueSampler",
    "QueueSnapshot",
    "RingSample",
    "StoreSnapshot",
    "WorkerSeen",
]
