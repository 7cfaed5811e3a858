"""Standard streams that are closed, cannot be written, or have an encoding without some characters."""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import TextIO, cast

import click

__all__ = ["ERROR_STREAM", "flush_all", "flush_output", "is_of_output", "is_terminal", "prepare", "silence_stdout"]


def prepare() -> None:
    """Make standard input, output and error usable. Closed descriptors are opened on /dev/null.

    Call it first. Otherwise the next file gets the number of a closed stream, and output is written to it. Characters
    that the encoding does not have are replaced.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        # Worker processes and the programs of handlers inherit them.
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # The interpreter sets a stream to None if it is closed at the start.
    if sys.stdin is None:
        sys.stdin = _nowhere("r")
    if sys.stdout is None:
        sys.stdout = _nowhere("w")
    if sys.stderr is None:
        sys.stderr = _nowhere("w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _nowhere(mode: str) -> TextIO:
    return open(os.devnull, mode, encoding="utf-8")  # type: ignore[return-value]


def flush_output() -> None:
    """Flush standard output.

    Raises:
        OSError: It cannot be written.
    """
    # A handler can have closed it.
    if not sys.stdout.closed:
        sys.stdout.flush()


def flush_all() -> None:
    """Flush both streams, as the interpreter does when it exits.

    If a stream cannot be written, its data is dropped and the exit status does not change.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            _silence(stream)


def silence_stdout() -> None:
    """Discard everything that is written to standard output from now on. Call it if the stream cannot be written."""
    _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def is_of_output(error: OSError) -> bool:
    """Return whether an error comes from writing to standard output, by `click.echo` or `flush_output`."""
    return traceback.extract_tb(error.__traceback__)[-1].filename in {click.utils.__file__, __file__}


class _ErrorStream:
    """Standard error for logs. A line that cannot be written is lost, and the program continues."""

    def write(self, text: str) -> None:
        """Write a text if this is possible."""
        try:
            if sys.stderr is not None:
                sys.stderr.write(text)
        except (OSError, ValueError):
            # There is no other place to report the loss.
            pass

    def flush(self) -> None:
        """Flush the stream if this is possible."""
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except (OSError, ValueError):
            # There is no other place to report the failure.
            pass


def is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        # The stream is closed.
        return False


ERROR_STREAM = cast("TextIO", _ErrorStream())
