"""From `app:tasks` on the command line to the `Tasks` object in the user's module."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from types import ModuleType

import click

from qworker.app import Tasks
from qworker.errors import AppImportError, UsageError
from qworker.streams import ERROR_STREAM

__all__ = ["load_app"]


def load_app(place: str, url: str | None = None) -> Tasks:
    """Import `module:attribute` with the working directory on `sys.path`.

    Args:
        place: `app:tasks`, `package.module:object.tasks`.
        url: a backend URL to use instead of the app's own.

    Raises:
        AppImportError: there is no such module or attribute, it is no `Tasks`, or the module raised while it was imported;
            the traceback of an exception inside the module is printed, since its author needs it.
    """
    module_name, colon, path = place.partition(":")
    if not colon or not module_name or not path:
        raise AppImportError(f"{place!r}: write MODULE:ATTRIBUTE, such as app:tasks for `tasks = Tasks(...)` in app.py")
    found: object = _import(module_name)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise AppImportError(f"{place!r}: {_has(found)} no {name!r}{_hint(found)}") from None
    if not isinstance(found, Tasks):
        raise AppImportError(
            f"{place!r} is a {type(found).__name__}, not a qworker.Tasks: name the `Tasks(...)` object"
        )
    if url is not None:
        found.url = url
    return found


def _import(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise AppImportError(f"no module {error.name!r} in {here} or on sys.path{_looks_like_file(name)}") from None
        raise _broken(name, error) from error
    except UsageError as error:
        raise AppImportError(f"{_place(error)}{error}") from error
    except Exception as error:
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> AppImportError:
    """Print an exception from inside the user's module, from their first frame on."""
    lines = traceback.TracebackException.from_exception(error)
    while lines.stack and _is_ours(lines.stack[0].filename):
        del lines.stack[0]
    click.echo("".join(lines.format()), file=ERROR_STREAM, nl=False)
    return AppImportError(f"the module {name!r} cannot be imported: see the {type(error).__name__} above")


def _is_ours(filename: str) -> bool:
    return filename in {__file__, importlib.__file__} or filename.startswith("<frozen importlib")


def _place(error: BaseException) -> str:
    """`file:line: ` of the last frame outside qworker: where the user wrote what we refuse."""
    package = os.path.dirname(os.path.dirname(__file__)) + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(package) and not _is_ours(frame.filename):
            return f"{frame.filename}:{frame.lineno}: "
    return ""


def _looks_like_file(name: str) -> str:
    if name.endswith(".py") or os.sep in name:
        stem = name.removesuffix(".py").strip(f".{os.sep}").replace(os.sep, ".")
        return f": write {stem}:tasks, as for an import"
    return ": run qworker in the folder that has it"


def _has(found: object) -> str:
    return f"the module {found.__name__!r} has" if isinstance(found, ModuleType) else f"{found!r} has"


def _hint(found: object) -> str:
    names = (
        sorted(name for name, value in vars(found).items() if isinstance(value, Tasks))
        if hasattr(found, "__dict__")
        else []
    )
    return f"; it has {', '.join(names)}" if names else ': write `tasks = Tasks("file://./spool")` there'
