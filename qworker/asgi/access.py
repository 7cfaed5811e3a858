"""Which requests a listener answers: those with its token, or without one those of programs on this machine."""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from qworker.asgi.interface import Headers, Scope, get_header
from qworker.asgi.throttle import Throttle
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import UsageError
from qworker.kit.network import client_group, is_loopback

__all__ = [
    "TOKEN",
    "Access",
    "Refusal",
    "check_secret",
    "check_token",
    "is_bearer",
    "page_refusal",
    "read_token",
    "require_token_if_public",
]

TOKEN = "QWORKER_HTTP_TOKEN"
_TOKEN_OF_0_1 = "QWORKER_TOKEN"

Refusal = tuple[int, Headers, bytes]

_TEXT = (b"content-type", b"text/plain; charset=utf-8")
_READS = frozenset({"GET", "HEAD"})
_FOREIGN_SITES = frozenset({b"cross-site", b"same-site"})
# What a web page can send to another origin without its permission, and a request without a type.
_FORMS = frozenset({b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"})


def _refusal(status: HTTPStatus, text: str, *headers: tuple[bytes, bytes]) -> Refusal:
    return status.value, [*headers, _TEXT], f"{text}\n".encode()


_FOREIGN_PAGE = _refusal(
    HTTPStatus.FORBIDDEN, f"without {TOKEN} no web page is served: set it at the server, and send it"
)
_FOREIGN_HOST = _refusal(
    HTTPStatus.FORBIDDEN,
    f"without {TOKEN} the host must be localhost, 127.0.0.1 or [::1]: set it at the server, and send it",
)
_FOREIGN_NAME = _refusal(
    HTTPStatus.MISDIRECTED_REQUEST,
    "this host name is not served: use localhost or 127.0.0.1, or allow the name at the server",
)
_FOREIGN_FORM = _refusal(
    HTTPStatus.FORBIDDEN, "a page of another site cannot change anything here: use a page of this one"
)
_FORM = _refusal(
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    f"without {TOKEN} a form is not a request: send the header Content-Type: application/json",
)
_GUESSES = _refusal(
    HTTPStatus.TOO_MANY_REQUESTS,
    "too many wrong tokens from this address: check the token, and try again later",
    (b"retry-after", b"1"),
)


class Access:
    """The check of all requests to one listener.

    Args:
        token: The token that clients must send, as a bearer token or as the password of Basic. None: no token.
        challenge: The value of `WWW-Authenticate` in refusals.
        public: Whether programs on other machines are served without a token.
        forms: Whether a request without a token can have the content type of a form, or none.
        clock: The clock that measures the time between wrong tokens.
    """

    def __init__(
        self,
        token: str | None,
        *,
        challenge: str = "Bearer",
        public: bool = False,
        forms: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._token = None if token is None else token.encode()
        self._public = public
        self._forms = forms
        self._throttle = Throttle(clock)
        self._no_token = _refusal(
            HTTPStatus.UNAUTHORIZED,
            f"send the header Authorization: Bearer TOKEN, with the server's {TOKEN}",
            (b"www-authenticate", challenge.encode()),
        )

    def refusal(self, scope: Scope) -> Refusal | None:
        """Return the response for a client that is not authorized, or None for one that is."""
        if self._token is not None:
            return self._refusal_of_token(scope, self._token)
        # Without a token, programs are authorized, but web pages in a browser are not.
        if _is_foreign_page(scope):
            return _FOREIGN_PAGE
        if not self._is_served(scope):
            return _FOREIGN_HOST
        return None if self._forms or _content_type(scope) not in _FORMS else _FORM

    def _refusal_of_token(self, scope: Scope, token: bytes) -> Refusal | None:
        header = get_header(scope, b"authorization")
        if header is None:
            return self._no_token
        client = scope.get("client")
        address = client_group(client[0]) if client else ""
        kind, given = _credentials(header)
        if self._throttle.is_blocked(address, given):
            return _GUESSES
        if not hmac.compare_digest(given, token):
            self._throttle.add(address, given)
            return self._no_token
        # A browser sends a password that it knows with the requests of any page.
        return _FOREIGN_PAGE if kind == b"basic" and _is_foreign_page(scope) else None

    def _is_served(self, scope: Scope) -> bool:
        """Return whether the host is this machine: a web page can give its own name the address of this machine."""
        server = scope.get("server")
        if self._public and server is not None and not is_loopback(server[0]):
            return True
        host = get_header(scope, b"host")
        return host is None or is_loopback(_host_name(host))


def page_refusal(scope: Scope, hosts: Collection[str] | None) -> Refusal | None:
    """Return the response to a browser that was sent here by a foreign page, or None for any other client.

    A page of another site can open a page here, but cannot read it. So only its changes are refused. A browser names
    the page's site in a header that no page can set. A client with a bearer token is not such a page.

    Args:
        scope: The request.
        hosts: The names that are served besides those of this machine. None: all, because another check is in front.
    """
    host = get_header(scope, b"host")
    if hosts is not None and host is not None:
        name = _host_name(host)
        if not is_loopback(name) and name not in hosts:
            return _FOREIGN_NAME
    is_own = scope["method"] in _READS or is_bearer(scope) or _is_same_origin(scope, host)
    return None if is_own else _FOREIGN_FORM


def is_bearer(scope: Scope) -> bool:
    """Return whether a request has a bearer token. A page cannot send one to another site without its permission."""
    return (get_header(scope, b"authorization") or b"").partition(b" ")[0].lower() == b"bearer"


def _is_same_origin(scope: Scope, host: bytes | None) -> bool:
    # A browser sends it only to https and to this machine. Otherwise it sends the origin.
    site = get_header(scope, b"sec-fetch-site")
    if site is not None:
        return site in {b"same-origin", b"none"}
    origin = get_header(scope, b"origin")
    return origin is not None and host is not None and urlsplit(origin.lower()).netloc == host.lower()


def _host_name(host: bytes) -> str:
    """Return the name in `name`, `name:80`, `[::1]` or `[::1]:80`."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text if text.count(":") > 1 else text.partition(":")[0]


def _is_foreign_page(scope: Scope) -> bool:
    return get_header(scope, b"origin") is not None or get_header(scope, b"sec-fetch-site") in _FOREIGN_SITES


def _content_type(scope: Scope) -> bytes:
    return (get_header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()


def _credentials(header: bytes) -> tuple[bytes, bytes]:
    """Return the scheme in lower case, and the token."""
    scheme, _, value = header.partition(b" ")
    kind, given = scheme.lower(), value.strip()
    if kind == b"basic":
        try:
            return kind, base64.b64decode(given, validate=True).partition(b":")[2]
        except ValueError:
            return kind, b""
    return kind, given if kind == b"bearer" else b""


def read_token() -> str | None:
    """Return the token of `QWORKER_HTTP_TOKEN`, or None if the variable is not set.

    Raises:
        UsageError: The variable is empty, or not a valid token. Or it has its name of 0.1: without this error, the
            server would ask no client for the token.
    """
    token = os.environ.get(TOKEN)
    if token is None and _TOKEN_OF_0_1 in os.environ:
        raise UsageError(f"{_TOKEN_OF_0_1} is now {TOKEN}: rename the variable")
    if token == "":
        raise UsageError(f"{TOKEN} is empty: set a token or unset the variable")
    check_token(token)
    return token


def check_token(token: str | None) -> None:
    """Check that a token can be sent and is long enough.

    Raises:
        UsageError: It is not.
    """
    check_secret(TOKEN, token)


def check_secret(variable: str, value: str | None) -> None:
    """Check that the secret in an environment variable can be sent and is long enough.

    Raises:
        UsageError: It is not.
    """
    if value is not None and (len(value) < 8 or not value.isascii() or not value.isprintable()):
        raise UsageError(f"{variable} must have at least 8 printable ASCII characters")


def require_token_if_public(host: str, token: str | None, *, or_else: str = "listen on 127.0.0.1") -> None:
    """Refuse to listen beyond this machine without a token.

    Args:
        host: The address to listen on.
        token: The token.
        or_else: What the user can do in place of a token.

    Raises:
        UsageError: `host` is not a loopback address, and there is no token.
    """
    if token is None and not is_loopback(host):
        raise UsageError(f"listening on {host} requires a token: set {TOKEN}, or {or_else}")
