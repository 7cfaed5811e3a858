"""`vsqs:///dir[?unit=us|ms&capacity=N&timeout=SECONDS&sync=full|off]`: one directory per queue, states in file names."""

from qworker_vsqs.backend import VsqsBackend

__all__ = ["VsqsBackend"]
