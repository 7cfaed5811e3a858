"""`vsqs:///dir[?time_unit=us|ms&max_messages=N&publish_timeout=DURATION&sync=full|off]`: one directory per queue, states in file names."""

from qworker_vsqs.backend import VsqsBackend

__all__ = ["VsqsBackend"]
