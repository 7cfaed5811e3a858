"""Segment logs on the disk: the format of the topics of the `sq:` backend, and of the history.

format.py   segments and records, bit for bit
state.py    the state file: the write position, and the positions of the channels
log.py      appending, starting new segments, reading, recovery
"""
