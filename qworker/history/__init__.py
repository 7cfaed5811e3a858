"""The history: one event for each transition of a message, in an append-only log next to the queues."""

from qworker.history.event import KINDS, Event, Kind

__all__ = ["KINDS", "Event", "Kind"]
