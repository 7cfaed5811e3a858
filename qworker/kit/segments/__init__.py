"""Segment logs on the disk: the format that the `sq:` backend's topics have, and the history too.

disk.py     files that nobody's link leads elsewhere
format.py   segments and records, bit for bit
state.py    the state file: the write position, and the channels'
log.py      appending, rolling over, reading, recovery
"""
