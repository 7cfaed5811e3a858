"""The schedules that the code of an app defines, with the decorators `@tasks.cron` and `@tasks.every`."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any

from qworker.backend.registry import backend_class
from qworker.envelope import Envelope, open_envelope
from qworker.errors import NotSupported, UsageError
from qworker.message import Draft
from qworker.schedules.records import Definition
from qworker.schedules.schedule import Schedule, check_key, check_name, definition_of, naming_schedule
from qworker.task import Call, Task
from qworker.url import BackendURL
from qworker.validation import shown

__all__ = ["CodeSchedule", "check_deviations", "check_scheme", "supports_schedules"]

# The schemes that have all of it. The drivers of these need not be imported with the app.
_NATIVE = frozenset({"memory", "file", "redis", "rediss", "unix", "redis+sentinel", "redis+cluster"})
_SURPLUS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CodeSchedule:
    """One schedule of a decorator, checked.

    Args:
        task: The decorated object, which must be a task.
        decorator: The decorator as the user types it.
        name: The name of the schedule. None: the task's name.
        args: The arguments of the calls.
        options: The other fields of `Schedule` by name.

    Raises:
        UsageError: A value is not valid. The text names the schedule.
    """

    def __init__(
        self, task: Any, decorator: str, name: str | None, args: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        if not isinstance(task, Task):
            raise UsageError(f"{decorator} belongs above @tasks.task: it takes a task (got {shown(task)})")
        self._task: Task[..., Any] = task
        self._options = options
        self.name = check_name(task.name if name is None else name)
        with naming_schedule(self.name):
            self._args = _checked_args(self._task, args)
            body = self._task.encoder.encode(self._args, {}, {})
            schedule = Schedule(Call(task.queue, Draft(body=body)), **options)
            check_key(schedule, task.options.unique, has_key=task.options.unique is not None)

    def rename(self, name: str) -> None:
        """Change the name, because another app includes that of the task, which may also change the queue."""
        self.name = name
        vars(self).pop("definition", None)

    @property
    def queue(self) -> str:
        """The queue of its calls."""
        return self._task.queue

    @cached_property
    def definition(self) -> Definition:
        """Its stored form. The call gets the headers that the process has when it is first read."""
        return definition_of(self.name, Schedule(self._task.call(*self._args), **self._options), in_code=True)


def _checked_args(task: Task[..., Any], args: Any) -> tuple[Any, ...]:
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"args must be a tuple (got {shown(args)})")
    given: tuple[Any, ...] = tuple(args)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    signature = task.signature.shown()
    try:
        bound = signature.bind_partial(*given).arguments
    except TypeError:
        bound = {}
    else:
        for name, parameter in signature.parameters.items():
            if name not in bound and parameter.default is parameter.empty and parameter.kind not in _SURPLUS:
                raise UsageError(f"parameter {name!r} has no value: give it a default or use args=")
    opened = open_envelope(task.encoder.encode(given, {}, {}))
    assert isinstance(opened, Envelope)
    # Also checks that the arguments become what the annotations say.
    task.signature.convert(opened.args, opened.kwargs)
    return given


def check_scheme(url: str) -> None:
    """Check that the backend of a URL supports schedules, without opening it.

    Raises:
        NotSupported: It does not.
    """
    scheme = BackendURL.parse(url).scheme
    if scheme not in _NATIVE:
        check_deviations(scheme, backend_class(scheme).deviations)


def supports_schedules(deviations: Container[str]) -> bool:
    """Return whether a backend with these deviations supports schedules."""
    return not any(rule in deviations for rule in ("cells", "hold", "given_ids"))


def check_deviations(scheme: str, deviations: Container[str]) -> None:
    """Check that a backend with these deviations supports schedules.

    Raises:
        NotSupported: It does not.
    """
    if not supports_schedules(deviations):
        raise NotSupported(f"{scheme}: does not support schedules: use file: or redis:")
