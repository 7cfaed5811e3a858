"""The delays of retries: what a task's `retry=` can be, and the rule for one exception.

A delay is a pure function of the number of failures and a random number. Full jitter (a uniform draw below the
exponential maximum) spreads simultaneous failures best. See "Exponential Backoff And Jitter", M. Brooker, AWS
Architecture Blog, 2015.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import msgspec

from qworker.duration import Seconds
from qworker.errors import UsageError
from qworker.failure_text import RemoteFailure
from qworker.validation import check_flag, check_seconds, seconds_of, shown

__all__ = [
    "DEFAULT_BACKOFF",
    "MOST_DELAY",
    "Backoff",
    "Delays",
    "Errors",
    "NoRetry",
    "Retries",
    "RetryOption",
    "RetryPolicy",
    "class_name",
    "class_names",
]

# Seconds: ten years. Every backend can store a time that is this far away.
MOST_DELAY = 10 * 365 * 86400.0


@runtime_checkable
class RetryPolicy(Protocol):
    """The delays of retries. Write your own class with this method to use it as `retry=`."""

    def delay(self, tries: int, draw: float, /) -> float:
        """Return the delay in seconds after failure number `tries` (the first is 1).

        Args:
            tries: The number of failed attempts.
            draw: A uniform random number from [0, 1).
        """
        ...


class Backoff(msgspec.Struct, frozen=True):
    """Delays that grow with each failure.

    Attributes:
        initial: The longest delay after the first failure, in seconds (or a timedelta).
        multiplier: The factor by which the longest delay grows with each failure, at least 1.
        maximum: The longest delay after any failure, in seconds (or a timedelta).
        minimum: The shortest delay, in seconds (or a timedelta).
        jitter: Whether a delay is a random number between 0 and the longest delay. False: it is the longest delay.

    Raises:
        UsageError: A field is not a number or is out of range.
    """

    initial: Seconds = 1.0
    multiplier: float = 2.0
    maximum: Seconds = 300.0
    minimum: Seconds = 0.0
    jitter: bool = True

    def __post_init__(self) -> None:
        for name, least, most in (
            ("initial", 0.0, MOST_DELAY),
            ("multiplier", 1.0, 1000.0),
            ("maximum", 0.0, MOST_DELAY),
            ("minimum", 0.0, MOST_DELAY),
        ):
            value: Any = getattr(self, name)
            number = seconds_of(value)
            if not least <= number <= most:
                raise UsageError(
                    f"Backoff: {name} must be a number from {least:.0f} to {most:.0f} (got {shown(value)})"
                )
            msgspec.structs.force_setattr(self, name, number)
        check_flag("Backoff: jitter", self.jitter)
        least, most = self._limits()
        if least > most:
            raise UsageError(f"Backoff: minimum must not exceed maximum (got {least:g} and {most:g})")

    def _limits(self) -> tuple[float, float]:
        # The fields are numbers now.
        return cast("float", self.minimum), cast("float", self.maximum)

    def max_delay(self, tries: int) -> float:
        """Return the longest delay in seconds after failure number `tries`. The first failure is 1."""
        exponent = max(tries, 1) - 1
        least, most = self._limits()
        # 2.0 ** 1024 overflows. Every maximum is reached before that.
        return max(least, min(most, cast("float", self.initial) * self.multiplier ** min(exponent, 60)))

    def delay(self, tries: int, draw: float) -> float:
        """Return the delay in seconds after failure number `tries`, for a uniform `draw` from [0, 1)."""
        longest = self.max_delay(tries)
        return max(self._limits()[0], longest * draw) if self.jitter else longest


class Delays:
    """Given delays, in order. The last one repeats.

    Args:
        delays: Seconds after the first failure, the second one, and so on, or timedeltas.

    Raises:
        UsageError: There is none, or one is not a number of seconds or is out of range.
    """

    __slots__ = ("seconds",)

    def __init__(self, *delays: Seconds) -> None:
        if not delays:
            raise UsageError("Delays needs at least one delay, such as Delays(5, 10, 20)")
        self.seconds: tuple[float, ...] = tuple(_check_delay(delay) for delay in delays)

    def __repr__(self) -> str:
        return f"Delays({', '.join(f'{delay:g}' for delay in self.seconds)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Delays) and other.seconds == self.seconds

    def __hash__(self) -> int:
        return hash(self.seconds)

    def delay(self, tries: int, draw: float) -> float:
        """Return the delay in seconds after failure number `tries`."""
        return self.seconds[min(max(tries, 1), len(self.seconds)) - 1]


def _check_delay(delay: Any) -> float:
    seconds = seconds_of(delay)
    if seconds < 0:
        raise UsageError(f"retry delays must not be negative (got {shown(delay)})")
    return check_seconds("retry delays", delay, most=MOST_DELAY)


class _NoRetry:
    """The policy of errors that no retry can fix."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NoRetry"

    def delay(self, tries: int, draw: float) -> float:
        """Return no delay. Workers do not ask for it."""
        return 0.0


# The message fails at the first error.
NoRetry: RetryPolicy = _NoRetry()
DEFAULT_BACKOFF = Backoff()

# What `retry=` takes for one exception class, and for all.
_Policy: TypeAlias = RetryPolicy | Seconds
RetryOption: TypeAlias = _Policy | Mapping[type[BaseException], _Policy]
# What `retry_on=` and `fail_on=` take.
Errors: TypeAlias = type[BaseException] | Sequence[type[BaseException]]


class Retries(msgspec.Struct, frozen=True):
    """The policies of a task by exception. `Retries.of` creates it.

    Attributes:
        usual: The policy of exceptions without their own one, and of `Retry` without a delay.
        others: The policy of exceptions without their own one, if it is another one.
        by_class: The policies of exception classes and their subclasses.
        by_name: The same by the names of the classes, for errors of other processes.
    """

    usual: RetryPolicy = DEFAULT_BACKOFF
    others: RetryPolicy | None = None
    by_class: Mapping[type[BaseException], RetryPolicy] = {}
    by_name: Mapping[str, RetryPolicy] = {}

    @staticmethod
    def of(retry: Any, retry_on: Any = (), fail_on: Any = ()) -> Retries:
        """Return the policies of a task's options.

        Args:
            retry: A policy, a time, or a mapping of exception classes to these.
            retry_on: Exception classes. If there are any, other exceptions fail the message at once.
            fail_on: Exception classes that fail the message at once.

        Raises:
            UsageError: An option is not valid, or they contradict each other.
        """
        on, off = _check_classes("retry_on", retry_on), _check_classes("fail_on", fail_on)
        if isinstance(retry, Mapping):
            if on or off:
                name = "NoRetry" if off else "a policy"
                kind = (off or on)[0].__name__
                raise UsageError(f"retry= is a mapping: write {kind}: {name} into it")
            given = cast("Mapping[object, object]", retry)
            return _by_class(DEFAULT_BACKOFF, None, {_check_class("retry", k): _policy(v) for k, v in given.items()})
        both = next((kind for kind in on if kind in off), None)
        if both is not None:
            raise UsageError(f"{both.__name__} is in retry_on and in fail_on: leave it out of one")
        usual = _policy(retry)
        return _by_class(usual, NoRetry if on else None, dict.fromkeys(on, usual) | dict.fromkeys(off, NoRetry))

    def __str__(self) -> str:
        """Return the policies for people: the usual one, and those of exception classes."""
        others = [] if self.others is None else [f"others: {self.others}"]
        own = [f"{kind.__name__}: {policy}" for kind, policy in self.by_class.items() if policy is not self.usual]
        if self.others is not None:
            names = " or ".join(kind.__name__ for kind, policy in self.by_class.items() if policy is self.usual)
            return "; ".join([f"{self.usual} after {names}", *own, *others])
        return "; ".join([str(self.usual), *own])

    def policy_for(self, error: BaseException | None) -> RetryPolicy:
        """Return the policy of an error: that of the most derived class that has one. `NoRetry`: do not retry."""
        if error is None or not self.by_class:
            return self.usual
        other = self.usual if self.others is None else self.others
        if isinstance(error, RemoteFailure) and error.classes:
            return next((self.by_name[name] for name in error.classes if name in self.by_name), other)
        return next((self.by_class[kind] for kind in type(error).__mro__ if kind in self.by_class), other)


def _by_class(
    usual: RetryPolicy, others: RetryPolicy | None, by_class: Mapping[type[BaseException], RetryPolicy]
) -> Retries:
    return Retries(usual, others, by_class, {class_name(kind): policy for kind, policy in by_class.items()})


def _policy(given: Any) -> RetryPolicy:
    if isinstance(given, type):
        raise UsageError(f"retry must be a policy, not its class: write {given.__name__}(...)")
    if isinstance(given, (timedelta, int, float)) and not isinstance(given, bool):
        return Delays(given)
    if not callable(getattr(given, "delay", None)):
        raise UsageError(
            "retry must be a policy such as Backoff(initial=5), a number of seconds, or a mapping of exception classes"
            f" to these (got {shown(given)})"
        )
    return cast("RetryPolicy", given)


def _check_classes(name: str, given: Any) -> tuple[type[BaseException], ...]:
    if isinstance(given, type):
        given = (given,)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UsageError(f"{name} must have exception classes (got {shown(given)})")
    kinds = cast("Sequence[object]", given)
    return tuple(_check_class(name, kind) for kind in kinds)


def _check_class(name: str, given: Any) -> type[BaseException]:
    if inspect.isclass(given) and issubclass(given, BaseException):
        return given
    raise UsageError(f"{name} must have exception classes (got {shown(given)})")


def class_name(kind: type) -> str:
    """Return the name of a class by which another process knows it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def class_names(error: BaseException) -> list[str]:
    """Return the names of an error's class and its bases, the most derived first, for `Retries.policy_for`."""
    return [class_name(kind) for kind in type(error).__mro__]
