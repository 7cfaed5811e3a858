"""Open a backend from a URL.

The entry points in the group `qworker.backends` name the backend class of each URL scheme. qworker's own backends are
registered in the same way as those of other packages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import InvalidURL
from qworker.extras import not_installed
from qworker.url import BackendURL

__all__ = ["GROUP", "backend_class", "open_backend", "schemes"]

GROUP = "qworker.backends"


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def schemes() -> list[str]:
    """Return the URL schemes of all installed backends, sorted."""
    return sorted(_installed())


def backend_class(scheme: str) -> type[Backend]:
    """Return the backend class of a URL scheme.

    Raises:
        InvalidURL: No installed backend serves the scheme, or the registered object is not a backend.
        MissingExtra: The backend's driver is not installed.
    """
    point = _installed().get(scheme)
    if point is None:
        raise InvalidURL(
            f"no backend is installed for '{scheme}:'. Installed: {', '.join(schemes()) or 'none (reinstall qworker)'}"
        )
    try:
        found = point.load()
    except ModuleNotFoundError as error:
        raise not_installed(error, f"{scheme}:") from error
    except (ImportError, AttributeError) as error:
        raise InvalidURL(f"the backend for {scheme}: {point.value} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise InvalidURL(f"the entry point {scheme!r} of {GROUP} is not a qworker.Backend: {point.value}")
    return found


def open_backend(
    url: str,
    *,
    clock: Clock = SYSTEM_CLOCK,
    remote_leases: bool = False,
    credential_provider: Callable[[], Any] | None = None,
) -> Backend:
    """Create the backend of a URL, without touching the store. See `Backend.from_url`.

    Args:
        url: The URL.
        clock: See `Backend.from_url`.
        remote_leases: See `Backend.from_url`.
        credential_provider: See `Tasks`.

    Raises:
        InvalidURL: The URL, its scheme or an option is not known.
        MissingExtra: The backend's driver is not installed.
    """
    parsed = BackendURL.parse(url)
    if credential_provider is not None:
        parsed = msgspec.structs.replace(parsed, credential_provider=credential_provider)
    return backend_class(parsed.scheme).from_url(parsed, clock=clock, remote_leases=remote_leases)
