"""Users and passwords that change while a program runs: a callable gives the current ones for each new connection."""

from __future__ import annotations

import asyncio
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from redis.credentials import CredentialProvider

from qworker.errors import BackendError, InvalidURL
from qworker.url import BackendURL

__all__ = ["credential_provider"]

_WHAT = "a callable that returns the password or (user, password)"


class _CallableProvider(CredentialProvider):
    """The result of a callable, as redis-py wants it."""

    def __init__(self, source: Callable[[], Any]) -> None:
        self._source = source

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        return _checked(self._source())

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        if inspect.iscoroutinefunction(self._source) or inspect.iscoroutinefunction(type(self._source).__call__):
            return _checked(await self._source())
        # It may ask a server or read a file.
        return _checked(await asyncio.to_thread(self._source))


def _checked(found: object) -> tuple[str] | tuple[str, str]:
    match found:
        case str(password) | (str(password),):
            return (password,)
        case (str(user), str(password)):
            return (user, password)
        case _:
            kind = type(found).__name__
            raise BackendError(f"the credential_provider must return the password or (user, password) (got {kind})")


def credential_provider(url: BackendURL) -> CredentialProvider | None:
    """Return redis-py's provider for the callable of an app, or for the import path in a URL. None: there is neither.

    Raises:
        InvalidURL: The path cannot be imported, or is not a provider.
    """
    found: Any = url.credential_provider
    path = url.options.get("credential_provider")
    if path is not None:
        if found is not None:
            raise InvalidURL(f"{url.masked}: the app has a credential_provider too: keep one")
        found = _imported(url, path)
    if found is None:
        return None
    made: Any = found() if inspect.isclass(found) and issubclass(found, CredentialProvider) else found
    if isinstance(made, CredentialProvider):
        if type(made).get_credentials_async is not CredentialProvider.get_credentials_async:
            return made
        # redis-py would call it on the event loop, with a warning for each connection.
        made = made.get_credentials
    if not callable(made):
        raise InvalidURL(f"{url.masked}: the credential_provider must be {_WHAT} (got {type(made).__name__})")
    return _CallableProvider(made)


def _imported(url: BackendURL, path: str) -> Any:
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise InvalidURL(f"{url.masked}: credential_provider must be the import path of {_WHAT}: package.module:name")
    # As for `qworker run app:tasks`, modules in the working directory can be imported.
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidURL(f"{url.masked}: the credential_provider cannot be imported: {error}") from error
