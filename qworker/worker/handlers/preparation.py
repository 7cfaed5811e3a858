"""What the processes of handlers do before they import the app, if the program of this worker does more than that."""

from __future__ import annotations

__all__ = ["preparation", "prepare_with"]

_function: str | None = None


def prepare_with(function: str) -> None:
    """Let each process of handlers call a function before it imports anything of the app.

    Args:
        function: Its module, a colon and its name. It takes no arguments.
    """
    global _function  # noqa: PLW0603 - it belongs to the program, as its configuration of logging does
    _function = function


def preparation() -> str | None:
    """Return the function of `prepare_with`."""
    return _function
