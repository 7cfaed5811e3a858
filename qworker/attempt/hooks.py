"""Hooks: code of an app around its handlers, where they run, and around each call that is enqueued."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from qworker.call import Call
from qworker.context import Context
from qworker.definition.callables import Kind
from qworker.errors import UsageError
from qworker.validation import shown

__all__ = ["Attempt", "Hook", "check_hooks", "hooks_around", "publishing_hooks", "run_publishing"]

_KINDS: frozenset[Kind] = frozenset({"async", "thread", "process"})


class Attempt:
    """One run of a handler for one message, as its hooks see it.

    Attributes:
        context: The context of the attempt, also for a handler that does not take one.
        task: The name of the task or raw handler.
        kind: Where the handler runs: `async` (on the event loop), `thread` or `process`.
        args: The positional arguments, without the context. A hook can change them before the handler runs.
        kwargs: The arguments by name, without injected ones. A hook can change them before the handler runs.
        result: The value of the handler, when it has returned. `around_sync` replaces it by setting it, `around` by
            returning another one.
        error: What the handler or an inner hook raised. None: it has not raised.
    """

    __slots__ = ("args", "context", "error", "kind", "kwargs", "result", "task")

    def __init__(self, context: Context, kind: Kind, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.context = context
        self.task = context.task
        self.kind: Kind = kind
        self.args = args
        self.kwargs = kwargs
        self.result: Any = None
        self.error: BaseException | None = None


class Hook:
    """Code that runs around handlers. Subclass it and define what you need. One object serves all attempts at once.

    Attributes:
        kinds: The kinds of handlers that it is for. It is left out for others.
    """

    kinds: frozenset[Kind] = _KINDS

    async def around(self, attempt: Attempt, go: Callable[[], Awaitable[object]]) -> object:
        """Run around an `async def` handler. `await go()` runs the handler, or the next hook, and returns its value.

        What this method returns is the value, and what it raises is the error: a `Retry` or `Fail` decides.
        """
        return await go()

    def around_sync(self, attempt: Attempt) -> Iterator[None] | AbstractContextManager[object]:
        """Run around a plain function, in its own thread or process.

        It is a generator with one `yield`, at which the handler runs, or it returns a context manager. What the handler
        raises is raised at the `yield`. If it is not raised again, the handler counts as returned.
        """
        return nullcontext()

    def publishing(self, call: Call) -> Call:
        """Return the call to enqueue instead of this one. Runs once for each call, in the thread that enqueues."""
        return call


def check_hooks(hooks: object) -> tuple[Hook, ...]:
    """Return the hooks of an option.

    Raises:
        UsageError: They are not hooks.
    """
    if not isinstance(hooks, (list, tuple)):
        raise UsageError(f"hooks must be a list of hooks (got {shown(hooks)}): write hooks=[...]")
    return tuple(_checked(hook) for hook in cast("list[object]", hooks))


def _checked(hook: Any) -> Hook:
    if isinstance(hook, Hook):
        _check_kinds(hook)
        return hook
    if isinstance(hook, type) and issubclass(hook, Hook):
        raise UsageError(f"hooks takes objects (got the class {hook.__name__}): write {hook.__name__}()")
    raise UsageError(f"a hook must be an object of a subclass of Hook (got {shown(cast('object', hook))})")


def _check_kinds(hook: Hook) -> None:
    kinds = cast("object", hook.kinds)
    if not isinstance(kinds, (frozenset, set)) or not cast("frozenset[object]", kinds) <= _KINDS:
        words = ", ".join(sorted(_KINDS))
        raise UsageError(f"hook {_name(hook)}: kinds must be a set of {words} (got {shown(hook.kinds)})")


def hooks_around(hooks: Iterable[Hook], handler: str, kind: Kind) -> tuple[Hook, ...]:
    """Return the hooks that run around a handler, the outermost first.

    Args:
        hooks: The hooks of the app and of the handler.
        handler: The name of the handler.
        kind: Where it runs.

    Raises:
        UsageError: A hook is for this kind and has no method for it. Without the error it would be left out silently.
    """
    needed, other = ("around", "around_sync") if kind == "async" else ("around_sync", "around")
    found: list[Hook] = []
    for hook in hooks:
        if kind not in hook.kinds:
            continue
        if _defines(hook, needed):
            found.append(hook)
        elif _defines(hook, other):
            what = "an async function" if kind == "async" else "a plain function"
            others = '{"thread", "process"}' if kind == "async" else '{"async"}'
            raise UsageError(
                f"task {handler!r} is {what}, and hook {_name(hook)} has only {other}:"
                f" give it {needed}, or kinds = frozenset({others})"
            )
    return tuple(found)


def publishing_hooks(hooks: Iterable[Hook], kind: Kind) -> tuple[Hook, ...]:
    """Return the hooks that change the calls of a task of this kind."""
    return tuple(hook for hook in hooks if kind in hook.kinds and _defines(hook, "publishing"))


def run_publishing(hooks: Iterable[Hook], call: Call) -> Call:
    """Return a call as hooks have changed it.

    Raises:
        UsageError: A hook returns something else than a call.
    """
    for hook in hooks:
        changed: Any = hook.publishing(call)
        if not isinstance(changed, Call):
            raise UsageError(f"hook {_name(hook)}: publishing must return a Call (got {shown(changed)})")
        call = changed
    return call


def _defines(hook: Hook, method: str) -> bool:
    return getattr(type(hook), method) is not getattr(Hook, method) or method in getattr(hook, "__dict__", {})


def _name(hook: Hook) -> str:
    return type(hook).__name__
