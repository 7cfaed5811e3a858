"""One attempt with hooks and injected parameters: hooks outside, then providers, then the handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from functools import partial
from types import GeneratorType
from typing import Any

from qworker.attempt.hooks import Attempt, Hook, hooks_around
from qworker.attempt.injection import Provider, resolve
from qworker.attempt.providers import AsyncValues, SyncValues, WorkerProviders, manager_of
from qworker.context import Context
from qworker.definition.callables import Kind, not_run_error
from qworker.definition.provided import Provided

__all__ = ["AttemptRunner"]


class AttemptRunner:
    """Runs the attempts of one handler that has hooks or injected parameters.

    Args:
        function: The handler.
        name: Its name.
        kind: Where it runs.
        takes_context: Whether it takes the context.
        hooks: The hooks of the app and of the handler.
        provided: The injected parameters, by name.

    Attributes:
        hooks: The hooks that run around it, the outermost first.

    Raises:
        UsageError: A hook or a provider does not fit the handler.
    """

    __slots__ = ("_function", "_kind", "_providers", "_takes_context", "hooks")

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        kind: Kind,
        takes_context: bool,
        *,
        hooks: Iterable[Hook] = (),
        provided: Mapping[str, Provided],
    ) -> None:
        self._function = function
        self._kind: Kind = kind
        self._takes_context = takes_context
        self._providers: tuple[tuple[str, Provider], ...] = resolve(provided, name, kind)
        self.hooks = hooks_around(hooks, name, kind)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to run around the handler."""
        return bool(self.hooks or self._providers)

    async def run(self, context: Context, args: list[Any], kwargs: dict[str, Any], shared: WorkerProviders) -> Any:
        """Run an `async def` handler once, and return its value as the hooks leave it."""
        attempt = Attempt(context, self._kind, args, kwargs)
        try:
            return await self._around(0, attempt, shared)
        finally:
            # Its traceback refers to this frame: no garbage is left for the collector.
            attempt.error = None

    def run_sync(self, context: Context, args: list[Any], kwargs: dict[str, Any], shared: WorkerProviders) -> Any:
        """Run a plain function once, and return its value as the hooks leave it."""
        attempt = Attempt(context, self._kind, args, kwargs)
        try:
            return self._around_sync(0, attempt, shared)
        finally:
            attempt.error = None

    # -- hooks -------------------------------------------------------------------------------------------------------

    async def _around(self, number: int, attempt: Attempt, shared: WorkerProviders) -> Any:
        try:
            if number == len(self.hooks):
                value = await self._call(attempt, shared)
            else:
                go: Callable[[], Awaitable[object]] = partial(self._around, number + 1, attempt, shared)
                value = await self.hooks[number].around(attempt, go)
        except BaseException as error:
            attempt.result, attempt.error = None, error
            raise
        attempt.result, attempt.error = value, None
        return value

    def _around_sync(self, number: int, attempt: Attempt, shared: WorkerProviders) -> Any:
        if number == len(self.hooks):
            return self._call_sync(attempt, shared)
        with _as_manager(self.hooks[number].around_sync(attempt)):
            try:
                attempt.result = self._around_sync(number + 1, attempt, shared)
            except BaseException as error:
                attempt.result, attempt.error = None, error
                raise
            attempt.error = None
        return attempt.result

    # -- providers and the handler -----------------------------------------------------------------------------------

    def _arguments(self, attempt: Attempt) -> list[Any]:
        return [attempt.context, *attempt.args] if self._takes_context else attempt.args

    async def _call(self, attempt: Attempt, shared: WorkerProviders) -> Any:
        if not self._providers:
            return _ran(await self._function(*self._arguments(attempt), **attempt.kwargs))
        failed: BaseException | None = None
        value: Any = None
        try:
            async with AsyncExitStack() as stack:
                try:
                    values = AsyncValues(shared, attempt.context, stack)
                    given = {name: await values.get(provider) for name, provider in self._providers}
                    value = _ran(await self._function(*self._arguments(attempt), **attempt.kwargs, **given))
                except BaseException as error:
                    failed = error
                    raise
            if failed is not None:
                # A provider has swallowed it.
                raise failed
            return value
        finally:
            failed = None

    def _call_sync(self, attempt: Attempt, shared: WorkerProviders) -> Any:
        if not self._providers:
            return _ran(self._function(*self._arguments(attempt), **attempt.kwargs))
        failed: BaseException | None = None
        value: Any = None
        try:
            with ExitStack() as stack:
                try:
                    values = SyncValues(shared, attempt.context, stack)
                    given = {name: values.get(provider) for name, provider in self._providers}
                    value = _ran(self._function(*self._arguments(attempt), **attempt.kwargs, **given))
                except BaseException as error:
                    failed = error
                    raise
            if failed is not None:
                # A provider has swallowed it.
                raise failed
            return value
        finally:
            failed = None


def _ran(value: Any) -> Any:
    problem = None if value is None else not_run_error(value)
    if problem is not None:
        raise problem
    return value


def _as_manager(made: Any) -> AbstractContextManager[object]:
    if not isinstance(made, GeneratorType):
        manager: AbstractContextManager[object] = made
        return manager
    return manager_of(made)
