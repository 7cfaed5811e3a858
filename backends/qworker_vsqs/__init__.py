"""`vsqs:`: one directory per queue, states in file names. The options are in `VsqsOptions`."""

from qworker_vsqs.backend import VsqsBackend

__all__ = ["VsqsBackend"]
