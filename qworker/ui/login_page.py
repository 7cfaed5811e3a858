"""The login: its page, and whose session a request belongs to."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qsl, urlencode

import structlog
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from qworker.asgi.interface import read_body
from qworker.ui.access import SESSION_S, Access, Login
from qworker.ui.fragments import FRAGMENT
from qworker.ui.paths import root_of
from qworker.ui.rendering import Renderer

__all__ = ["LoginPage"]

# Bytes of the form.
_MOST_FORM = 4096


class LoginPage:
    """The login of a dashboard.

    Args:
        login: Checks links, tokens and sessions.
        renderer: Renders the page.
        has_page: Returns whether a path is that of a page here, so that a link cannot lead elsewhere.
        on_link: Called with the path and query of a login link when a user without a session opens the page.
    """

    def __init__(
        self,
        login: Login,
        renderer: Renderer,
        has_page: Callable[[str], bool],
        on_link: Callable[[str], None] | None,
    ) -> None:
        self._login = login
        self._renderer = renderer
        self._has_page = has_page
        self._on_link = on_link
        self._log = structlog.get_logger("qworker.ui")

    def access(self, request: Request) -> Access | None:
        """Return what the user of a request may do. None: the user is not logged in."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._login.use_token(request.scope, token.strip())
        cookie = self.cookie(request)
        return None if cookie is None else self._login.use_session(cookie)

    def cookie(self, request: Request) -> str | None:
        """Return the cookie of a request's session."""
        return request.cookies.get(_cookie_name(request))

    def refuse(self, request: Request) -> Response:
        """Answer a request that needs a login."""
        if request.method not in {"GET", "HEAD"} or FRAGMENT in request.headers:
            return Response("log in first", HTTPStatus.UNAUTHORIZED)
        path = get_route_path(request.scope)
        query = request.url.query
        wanted = f"{path}?{query}" if query else path
        asked = "" if wanted == "/" else f"?{urlencode({'next': wanted})}"
        return RedirectResponse(f"{root_of(request.scope)}/login{asked}", HTTPStatus.SEE_OTHER)

    async def show(self, request: Request) -> Response:
        """Show the page, or log in by what it was opened or sent with."""
        wanted, link = request.query_params.get("next", ""), request.query_params.get("t")
        problem = None
        if request.method == "POST":
            form = dict(parse_qsl((await read_body(request.scope, request.receive, _MOST_FORM)).decode("latin-1")))
            wanted = form.get("next", "")
            access = self._login.use_token(request.scope, form.get("token", "").strip())
            if access is not None:
                return self._logged_in(request, access, wanted)
            problem = "That token is wrong, or there were too many wrong ones: wait a second and try again."
        elif link is not None and request.method == "GET":
            access = self._login.use_link(link)
            if access is not None:
                return self._logged_in(request, access, wanted)
            problem = "This link was used before, or is older than 5 minutes."
        self._announce_link(request, wanted)
        status = HTTPStatus.OK if problem is None else HTTPStatus.FORBIDDEN
        content = {"problem": problem, "wanted": wanted, "has_tokens": self._login.has_tokens}
        return self._renderer.page(request, "login.html", content, status=status)

    def _announce_link(self, request: Request, wanted: str) -> None:
        link = None if self._on_link is None else self._login.next_link()
        if link is not None and self._on_link is not None:
            asked = {"t": link, **({"next": wanted} if self._has_page(wanted) else {})}
            self._on_link(f"{root_of(request.scope)}/login?{urlencode(asked)}")

    def _logged_in(self, request: Request, access: Access, wanted: str) -> Response:
        root = root_of(request.scope)
        target = f"{root}{wanted}" if self._has_page(wanted) else f"{root}/"
        response = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        response.set_cookie(
            _cookie_name(request),
            self._login.new_session(access),
            max_age=SESSION_S,
            path=root or "/",
            secure=request.scope["scheme"] == "https",
            httponly=True,
            samesite="lax",
        )
        self._log.info("ui_login", user=access.name, role=access.role)
        return response

    async def log_out(self, request: Request) -> Response:
        """End the session of the browser."""
        root = root_of(request.scope)
        response = RedirectResponse(f"{root}/login", HTTPStatus.SEE_OTHER)
        response.delete_cookie(_cookie_name(request), path=root or "/")
        return response


def _cookie_name(request: Request) -> str:
    """Return the name of the cookie. Browsers send the cookies of one port to all ports of a host."""
    server = request.scope.get("server")
    prefix = "__Secure-" if request.scope["scheme"] == "https" else ""
    return f"{prefix}qworker_ui_{server[1] if server and server[1] else 0}"
