"""The ids of messages whose publisher did not choose one: `SEGMENT-OFFSET`, the place of the record."""

from __future__ import annotations

from qworker.kit.segments.format import split

__all__ = ["place_of_id", "position_id"]


def position_id(place: int) -> str:
    """Return the id of a message whose publisher did not choose one."""
    segment, offset = split(place)
    return f"{segment}-{offset}"


def place_of_id(message_id: str) -> int | None:
    """Return the place that `position_id` names; None if the id has another form."""
    segment, dash, offset = message_id.partition("-")
    if not (dash and segment.isascii() and segment.isdigit() and offset.isascii() and offset.isdigit()):
        return None
    if (
        len(segment) > 20
        or len(offset) > 10
        or int(offset) >> 32
        or position_id(int(segment) << 32 | int(offset)) != message_id
    ):
        return None
    return int(segment) << 32 | int(offset)
