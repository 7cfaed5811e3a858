"""The standard streams as they may really be: closed, full, or in an encoding that has not every character."""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import TextIO, cast

import click

__all__ = ["ERROR_STREAM", "flush_all", "flush_output", "is_of_output", "is_terminal", "prepare", "silence_stdout"]


def prepare() -> None:
    """Make standard input, output and error usable: a descriptor that is closed is opened on /dev/null.

    First of all: what is opened next would get the number of the closed one, and be written to as if it were a terminal.
    A character that the encoding does not have is replaced, and is no error.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        # Worker processes and handlers' programs get them too.
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # What the interpreter found closed is None.
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
    """Write what standard output holds.

    Raises:
        OSError: it cannot be written.
    """
    # A handler may have closed it.
    if not sys.stdout.closed:
        sys.stdout.flush()


def flush_all() -> None:
    """Write what both streams hold, as the interpreter's end would; what cannot be written is dropped, and changes no exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            _silence(stream)


def silence_stdout() -> None:
    """Let everything that is written to standard output from now on go nowhere: it cannot be written."""
    _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def is_of_output(error: OSError) -> bool:
    """Whether an error is that of writing to standard output, which `click.echo` and `flush_output` do."""
    return traceback.extract_tb(error.__traceback__)[-1].filename in {click.utils.__file__, __file__}


class _ErrorStream:
    """Standard error for what must go on without it: a line that cannot be written is lost, and harms nothing."""

    def write(self, text: str) -> None:
        """Write, if that is possible."""
        try:
            if sys.stderr is not None:
                sys.stderr.write(text)
        except (OSError, ValueError):
            # There is no other place to report that a report is lost.
            pass

    def flush(self) -> None:
        """Flush, if that is possible."""
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except (OSError, ValueError):
            # As above.
            pass


def is_terminal() -> bool:
    """Whether people read standard error."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        # It is closed.
        return False


ERROR_STREAM = cast("TextIO", _ErrorStream())
