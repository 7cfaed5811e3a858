"""Check everything that queues need. Each check really tries it. A backend class adds its own checks by `doctor`."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from qworker import __version__
from qworker.backend import Backend
from qworker.backend.each_queue import find_problem
from qworker.backend.offers import doctor_of
from qworker.backend.registry import backend_class, open_backend, schemes
from qworker.bulk import IncompleteLoad, incomplete_loads
from qworker.errors import BackendUnavailable, MissingExtra, QworkerError
from qworker.kit.directory.missing import is_missing
from qworker.kit.doctor_check import Check, CheckStatus
from qworker.kit.linux import max_inotify_instances
from qworker.kit.store_errors import store_error
from qworker.names import counted
from qworker.url import BackendURL

__all__ = ["run_checks"]

_ENOUGH_FILES = 4096
_ENOUGH_INOTIFY = 64
_PACKAGES = ("anyio", "click", "msgspec", "structlog", "watchfiles", "uvloop", "redis", "hiredis")


async def run_checks(url: str | None) -> list[Check]:
    """Run every check that applies.

    Args:
        url: The backend. None: only the checks that do not depend on one.

    Raises:
        InvalidURL: The URL is not known.
    """
    checks = [_versions(), *_entry_points(), *check_limits()]
    if url is None:
        return checks
    parsed = BackendURL.parse(url)
    own = doctor_of(parsed.scheme)
    checks += await check_reachable(url)
    return checks if own is None else [*checks, *await own.doctor(parsed)]


def _versions() -> Check:
    found = [
        f"Python {platform.python_version()}",
        f"{platform.system()} {platform.release()}",
        f"qworker {__version__}",
    ]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            # Optional packages may be missing. Required ones were imported before this point.
            continue
    health = CheckStatus.OK if sys.platform == "linux" else CheckStatus.WARN
    fix = "" if health is CheckStatus.OK else "qworker is made for Linux: leases and wake-ups are untested elsewhere"
    return Check("versions", health, ", ".join(found), fix)


def _entry_points() -> Iterable[Check]:
    without: dict[str, list[str]] = {}
    for scheme in schemes():
        try:
            found = backend_class(scheme)
        except MissingExtra as error:
            without.setdefault(error.extra, []).append(scheme)
        except QworkerError as error:
            yield Check(f"backend {scheme}", CheckStatus.WARN, str(error))
        else:
            yield Check(f"backend {scheme}", CheckStatus.OK, f"{found.__module__}.{found.__qualname__}")
    if without:
        names = (f"{', '.join(names)} (extra {extra})" for extra, names in without.items())
        yield Check("not installed", CheckStatus.OK, "; ".join(names))


def check_limits() -> Iterable[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    enough = hard == resource.RLIM_INFINITY or hard >= _ENOUGH_FILES
    yield Check(
        "open files",
        CheckStatus.OK if enough else CheckStatus.WARN,
        f"soft limit {soft}, hard limit {ceiling}",
        ""
        if enough
        else f"each lease of a directory queue holds a file open: raise `ulimit -Hn` to {_ENOUGH_FILES} or more",
    )
    yield _inotify_instances()


def _inotify_instances() -> Check:
    name = "inotify instances"
    try:
        most = max_inotify_instances()
    except OSError as error:
        return Check(
            name,
            CheckStatus.WARN,
            f"unknown: {store_error(error, 'check')}",
            "without inotify, foreign writers are noticed by rescans only",
        )
    if most < _ENOUGH_INOTIFY:
        return Check(
            name, CheckStatus.WARN, f"at most {most}", f"sysctl fs.inotify.max_user_instances={_ENOUGH_INOTIFY * 2}"
        )
    return Check(name, CheckStatus.OK, f"at most {most} of each user")


async def check_reachable(url: str) -> list[Check]:
    backend = open_backend(url)
    try:
        missing = is_missing(backend.directory)
        if not missing:
            await backend.open()
        queues = await backend.queues()
        problems = {queue: await find_problem(backend, queue) for queue in queues}
        found = "which does not exist yet" if missing else counted(len(queues), "queue")
        return [
            Check("reachable", CheckStatus.OK, f"{backend.describe()}, {found}"),
            Check("durability", *check_durability(backend.durability)),
            *_unusable(problems),
            *await _bulk_writes(backend, [queue for queue in queues if problems[queue] is None]),
        ]
    except QworkerError as error:
        # Any other error says itself what to do.
        fix = "check that it is running and that its URL is correct" if isinstance(error, BackendUnavailable) else ""
        return [Check("reachable", CheckStatus.BROKEN, str(error), fix)]
    finally:
        await backend.aclose()


def _unusable(problems: Mapping[str, str | None]) -> Iterable[Check]:
    for queue, problem in problems.items():
        if problem is not None:
            yield Check(f"queue {queue}", CheckStatus.BROKEN, problem, "its messages wait until this is repaired")


async def _bulk_writes(backend: Backend, queues: Sequence[str]) -> list[Check]:
    """Report the loads whose remaining messages wait until the load is run again."""
    name = "bulk writes"
    found: list[tuple[str, IncompleteLoad]] = []
    broken: list[Check] = []
    for queue in queues:
        try:
            found += [(queue, load) for load in await incomplete_loads(backend, queue)]
        except QworkerError as error:
            broken.append(Check(name, CheckStatus.BROKEN, str(error), "fix this problem, then run the load again"))
    if not found and not broken:
        return [Check(name, CheckStatus.OK, "all are complete")]
    return broken + [
        Check(
            f"bulk write {load.name}",
            CheckStatus.WARN,
            f"to {queue}: {counted(load.manifest.rows, 'message')}, not all of them published since {_moment(load)}",
            "if no process is running this load, run it again to publish the rest",
        )
        for queue, load in found
    ]


def _moment(load: IncompleteLoad) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(load.manifest.sealed_at))


def check_durability(level: str) -> tuple[CheckStatus, str, str]:
    match level:
        case "disk":
            return CheckStatus.OK, "disk: what was published or settled survives power loss", ""
        case "replicated":
            return CheckStatus.OK, "replicated: other hosts have it too", ""
        case "process":
            return (
                CheckStatus.WARN,
                "process: what was published or settled survives the death of processes, but not a power failure",
                "use a synced directory on a file system with a journal, or Redis with appendfsync always",
            )
        case _:
            return (
                CheckStatus.WARN,
                f"{level}: nothing survives the end of the process",
                "use file: for work that must not be lost",
            )
