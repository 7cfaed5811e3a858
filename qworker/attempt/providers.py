"""The values of providers: opened where a handler runs, closed in reverse order.

A provider cannot change the outcome of its handler by swallowing an error: a failed attempt would be acked.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import Any, cast

from qworker.attempt.injection import Provider
from qworker.context import Context

__all__ = ["AsyncValues", "SyncValues", "WorkerProviders", "manager_of"]

_Key = tuple[Callable[..., Any], str]
_NONE: Any = object()
# Seconds between two looks at a plain provider of the scope `worker` that a thread is opening.
_POLL = 0.005


class SyncValues:
    """The values of one attempt of a plain function. Use it in its thread or process."""

    def __init__(self, shared: WorkerProviders, context: Context, stack: ExitStack) -> None:
        self._shared = shared
        self._context = context
        self._stack = stack
        self._known: dict[_Key, Any] = {}

    def get(self, provider: Provider) -> Any:
        """Return a value. It is opened once for each attempt."""
        if provider.scope == "worker":
            return self._shared.get_sync(provider)
        value = self._known.get(provider.key, _NONE)
        if value is _NONE:
            given: dict[str, Any] = dict.fromkeys(provider.contexts, self._context)
            for name, inner in provider.needs:
                given[name] = self.get(inner)
            value = self._known[provider.key] = _enter_sync(
                self._stack, _check_plain(provider, provider.function(**given))
            )
        return value


class AsyncValues:
    """The values of one attempt of an `async def` handler."""

    def __init__(self, shared: WorkerProviders, context: Context, stack: AsyncExitStack) -> None:
        self._shared = shared
        self._context = context
        self._stack = stack
        self._known: dict[_Key, Any] = {}

    async def get(self, provider: Provider) -> Any:
        """Return a value. It is opened once for each attempt."""
        if provider.scope == "worker":
            return await self._shared.get(provider)
        value = self._known.get(provider.key, _NONE)
        if value is _NONE:
            given: dict[str, Any] = dict.fromkeys(provider.contexts, self._context)
            for name, inner in provider.needs:
                given[name] = await self.get(inner)
            value = self._known[provider.key] = await _enter(self._stack, provider.function(**given))
        return value


class WorkerProviders:
    """The values with the scope `worker` of one process.

    Args:
        on_error: Called with the name of a provider and the error that it raised while it was closed.
    """

    def __init__(self, on_error: Callable[[str, BaseException], None]) -> None:
        self._on_error = on_error
        self._values: dict[_Key, Any] = {}
        # Held while a plain provider is opened, by whichever thread needs it first.
        self._opening = threading.Lock()
        self._held: dict[_Key, _Held] = {}
        # The functions that close values, in the order in which these were opened.
        self._closers: list[tuple[str, Callable[[], Any]]] = []

    def get_sync(self, provider: Provider) -> Any:
        """Return a value for a plain function. The first call opens it."""
        value = self._values.get(provider.key, _NONE)
        if value is not _NONE:
            return value
        given = {name: self.get_sync(inner) for name, inner in provider.needs}
        with self._opening:
            value = self._values.get(provider.key, _NONE)
            return self._keep(provider, _check_plain(provider, _make(provider, given))) if value is _NONE else value

    async def get(self, provider: Provider) -> Any:
        """Return a value for an `async def` handler. The first call opens it."""
        value = self._values.get(provider.key, _NONE)
        if value is not _NONE:
            return value
        if provider.key not in self._held:
            given = {name: await self.get(inner) for name, inner in provider.needs}
            # The event loop must not block while a thread opens a value.
            while not self._opening.acquire(blocking=False):
                await asyncio.sleep(_POLL)
            try:
                self._open(provider, given)
            finally:
                self._opening.release()
        held = self._held.get(provider.key)
        return self._values[provider.key] if held is None else await self._wait_for(provider, held)

    def _open(self, provider: Provider, given: dict[str, Any]) -> None:
        """Open a value, unless that was done in the meantime."""
        if provider.key in self._values or provider.key in self._held:
            return
        made = _make(provider, given)
        if isinstance(made, types.AsyncGeneratorType) or inspect.isawaitable(made):
            held = self._held[provider.key] = _Held(provider.name, made)
            self._closers.append((provider.name, held.close))
        else:
            self._keep(provider, made)

    def _keep(self, provider: Provider, made: Any) -> Any:
        stack = ExitStack()
        value = self._values[provider.key] = _enter_sync(stack, made)
        self._closers.append((provider.name, stack.close))
        return value

    async def _wait_for(self, provider: Provider, held: _Held) -> Any:
        # An attempt that is cancelled leaves the value to the others.
        await asyncio.wait([held.ready])
        if held.ready.exception() is not None and self._held.get(provider.key) is held:
            # The next attempt opens it again.
            del self._held[provider.key]
            self._closers.remove((provider.name, held.close))
        return held.ready.result()

    def close(self) -> None:
        """Close the values of a process without an event loop, the last one first."""
        while self._closers:
            name, closer = self._closers.pop()
            try:
                closer()
            except BaseException as error:  # noqa: BLE001 - the others must be closed too
                self._on_error(name, error)
        self._values.clear()

    async def aclose(self) -> None:
        """Close the values, the last one first."""
        while self._closers:
            name, closer = self._closers.pop()
            try:
                closed = closer()
                if closed is not None:
                    await closed
            except Exception as error:  # noqa: BLE001 - the others must be closed too
                self._on_error(name, error)
        self._values.clear()
        self._held.clear()


class _Held:
    """A value in a task of its own: what is opened in a task, such as a task group, must be closed in the same task."""

    def __init__(self, name: str, made: Any) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Any] = loop.create_future()
        self._end = asyncio.Event()
        self._task = loop.create_task(self._hold(made), name=f"qworker-provider-{name}", context=contextvars.Context())

    async def _hold(self, made: Any) -> None:
        async with AsyncExitStack() as stack:
            try:
                value = await _enter(stack, made)
            except BaseException as error:
                self.ready.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                return
            self.ready.set_result(value)
            await self._end.wait()

    async def close(self) -> None:
        self._end.set()
        if not self.ready.done():
            # No attempt waits for it any more, and its opening may never end.
            self._task.cancel()
            await asyncio.wait([self._task])
            if self.ready.done():
                # It is retrieved, so that it is not reported as forgotten.
                self.ready.exception()
            return
        await self._task


def manager_of(generator: Any) -> AbstractContextManager[Any]:
    """Return a generator that runs already as a context manager."""

    def begun() -> Generator[Any, None, None]:
        return cast("Generator[Any, None, None]", generator)

    return contextmanager(begun)()


def _async_manager_of(generator: Any) -> AbstractAsyncContextManager[Any]:
    def begun() -> AsyncGenerator[Any, None]:
        return cast("AsyncGenerator[Any, None]", generator)

    return asynccontextmanager(begun)()


def _make(provider: Provider, given: dict[str, Any]) -> Any:
    """Call a provider of the scope `worker`. Its context is not that of the message which happens to be the first."""
    return contextvars.Context().run(provider.function, **given)


def _check_plain(provider: Provider, made: Any) -> Any:
    if isinstance(made, types.CoroutineType):
        made.close()
    elif not isinstance(made, types.AsyncGeneratorType):
        return made
    raise TypeError(f"provider {provider.name} is asynchronous, and its handler is a plain function")


def _enter_sync(stack: ExitStack | AsyncExitStack, made: Any) -> Any:
    if isinstance(made, types.GeneratorType):
        return stack.enter_context(manager_of(made))
    return made


async def _enter(stack: AsyncExitStack, made: Any) -> Any:
    if isinstance(made, types.AsyncGeneratorType):
        return await stack.enter_async_context(_async_manager_of(made))
    return await made if inspect.isawaitable(made) else _enter_sync(stack, made)
