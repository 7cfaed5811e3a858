"""The garbage collector of a process that serves or works."""

from __future__ import annotations

import gc

__all__ = ["freeze_loaded_modules"]


def freeze_loaded_modules() -> None:
    """Exclude everything that is in memory now, mostly imported modules, from garbage collection.

    A full pass would check all of it and find nothing to free. It takes tens of milliseconds, in which no handler
    starts, and no request is answered.
    """
    gc.collect()
    gc.freeze()
