"""`sq:///dir[?channel=default&segment_size=16777216&temporary=0&sync=full]`: a segment log with channels."""

from qworker_sq.backend import SqBackend

__all__ = ["SqBackend"]
