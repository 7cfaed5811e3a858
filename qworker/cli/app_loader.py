"""Import the `Tasks` object that the command line names as `app:tasks`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import TypeGuard

import click

from qworker.app import Tasks
from qworker.errors import AppImportError, UsageError
from qworker.streams import ERROR_STREAM

__all__ = ["import_tasks", "load_app"]

# Stores and threads need these modules of the standard library. The modules of an app can have the same names.
_NEEDED = ("grp", "pwd", "queue", "resource")


def load_app(place: str, url: str | None = None) -> Tasks:
    """Import `module:attribute` with the working directory on `sys.path`.

    Args:
        place: The app, such as `app:tasks` or `package.module:object.tasks`.
        url: A backend URL to use instead of the app's own.

    Raises:
        AppImportError: The module or the attribute does not exist, the object is not a `Tasks`, or the import raised.
            The traceback of an exception from inside the module is printed.
    """
    module_name, _, path = place.partition(":")
    if module_name.endswith(".py") or not _is_dotted(module_name) or not _is_dotted(path):
        raise AppImportError(f"{place!r}: {_spelled(module_name, path)}")
    found: object = _import(module_name)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise AppImportError(f"{place!r}: {_has(found)} no {name!r}{_hint(found)}") from None
    if not _is_app(found):
        raise AppImportError(
            f"{place!r} is a {type(found).__name__}, not a qworker.Tasks: name the `Tasks(...)` object"
        )
    found._loaded_from = module_name, path  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if url is not None:
        found.url = url
    return found


def import_tasks(tasks: Tasks) -> None:
    """Import the modules that the app names with `imports=`, in their order.

    Raises:
        AppImportError: One of them does not exist, or its import raised.
    """
    tasks._import_modules(_import)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _is_app(found: object) -> TypeGuard[Tasks]:
    return isinstance(found, Tasks)


def _import(name: str) -> ModuleType:
    for module in _NEEDED:
        importlib.import_module(module)
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = None
    with _first(here):
        return _imported(name, here)


@contextmanager
def _first(folder: str | None) -> Generator[None]:
    """Put a folder first on `sys.path` inside the block, and behind the standard library afterwards.

    While the app is imported, its modules have precedence, whatever their names are. Afterwards the standard library
    has, because a library that imports `queue` late must not get a queue.py from the app's folder.
    """
    if folder is None:
        yield
        return
    if sys.path[0] == folder:
        # `python -m` has put the folder there.
        del sys.path[0]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            library = os.path.dirname(os.__file__)
            places = (library, os.path.join(library, "lib-dynload"))
            last = max((i for i, place in enumerate(sys.path) if place in places), default=-1)
            sys.path.insert(last + 1, folder)


def _imported(name: str, here: str | None) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            looked = (
                "on sys.path, and the working directory was deleted" if here is None else f"in {here} or on sys.path"
            )
            raise AppImportError(f"no module {error.name!r} {looked}: {_other_folder(here)}") from None
        raise _print_user_traceback(name, error) from error
    except UsageError as error:
        raise AppImportError(f"{_place(error)}{error}") from error
    except Exception as error:
        raise _print_user_traceback(name, error) from error


def _print_user_traceback(name: str, error: Exception) -> AppImportError:
    """Print the traceback of an exception from the user's module, beginning with the user's first frame."""
    lines = traceback.TracebackException.from_exception(error)
    while lines.stack and _is_ours(lines.stack[0].filename):
        del lines.stack[0]
    click.echo("".join(lines.format()), file=ERROR_STREAM, nl=False)
    return AppImportError(f"the module {name!r} cannot be imported: see the {type(error).__name__} above")


def _is_ours(filename: str) -> bool:
    return filename in {__file__, importlib.__file__} or filename.startswith("<frozen importlib")


def _place(error: BaseException) -> str:
    """Return `file:line: ` of the last frame outside qworker, where the user's mistake is."""
    package = os.path.dirname(os.path.dirname(__file__)) + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(package) and not _is_ours(frame.filename):
            return f"{frame.filename}:{frame.lineno}: "
    return ""


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _spelled(module: str, attribute: str) -> str:
    """Return advice on how to write a MODULE:ATTRIBUTE that is not valid."""
    attribute = attribute if _is_dotted(attribute) else "tasks"
    if not (module.endswith(".py") or os.sep in module):
        name = module if _is_dotted(module) else "app"
        return f"write MODULE:ATTRIBUTE, such as {name}:{attribute} for `{attribute} = Tasks(...)` in {name}.py"
    folder, _, file = os.path.normpath(module).rpartition(os.sep)
    whole = f"{file.removesuffix('.py')}:{attribute}"
    if not folder:
        return f"write {whole}: the name of a module, not of its file"
    dotted = f"{folder.replace(os.sep, '.')}.{whole}"
    elsewhere = f"run qworker in {folder} with {whole}"
    return f"write {dotted}, or {elsewhere}" if _is_dotted(dotted.partition(":")[0]) else elsewhere


def _other_folder(here: str | None) -> str:
    return "change to the folder that has it" if here is None else "run qworker in the folder that has it"


def _has(found: object) -> str:
    if not isinstance(found, ModuleType):
        return f"{found!r} has"
    return f"the module {found.__name__!r} ({getattr(found, '__file__', None) or 'built in'}) has"


def _namesake(found: object) -> str | None:
    """Return a file or folder of the working directory with the name of a module that was loaded from elsewhere."""
    loaded = getattr(found, "__file__", None) or ""
    if not isinstance(found, ModuleType):
        return None
    name = found.__name__.partition(".")[0]
    paths = [os.path.abspath(path) for path in (f"{name}.py", name) if os.path.exists(path)]
    return next((path for path in paths if not loaded.startswith(path)), None)


def _hint(found: object) -> str:
    namesake = _namesake(found)
    if namesake is not None:
        return f": it is not {namesake}: rename your module, because its name is already used"
    names = (
        sorted(name for name, value in vars(found).items() if isinstance(value, Tasks))
        if hasattr(found, "__dict__")
        else []
    )
    return f"; it has {', '.join(names)}" if names else ': write `tasks = Tasks("file://./spool")` there'
