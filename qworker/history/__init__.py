"""What happened to messages: one event per transition, in an append-only log beside the queue."""

from qworker.history.event import KINDS, Event, Kind

__all__ = ["KINDS", "Event", "Kind"]
