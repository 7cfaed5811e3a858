"""`sq:`: a segment log with channels. The options are in `SqOptions`."""

from qworker_sq.backend import SqBackend

__all__ = ["SqBackend"]
