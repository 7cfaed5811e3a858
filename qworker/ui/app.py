"""The dashboard as an ASGI application: its routes, its checks, and its headers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Hashable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Match, Route

from qworker.app import Tasks
from qworker.asgi.access import page_refusal
from qworker.asgi.interface import (
    ASGIApp,
    BodyTooLarge,
    Disconnected,
    Headers,
    Receive,
    Scope,
    Send,
    respond,
)
from qworker.errors import QworkerError, UsageError
from qworker.ui.access import Access, Login, Secrets
from qworker.ui.actions import Actions
from qworker.ui.api import API, ENDPOINTS, answer_request, describe_api, json_response
from qworker.ui.api.schemas import Error
from qworker.ui.assets import ASSET_PATH, serve_asset
from qworker.ui.confirm import Confirmed
from qworker.ui.fragments import FRAGMENT, Fragments
from qworker.ui.guard import Guard, wants_json
from qworker.ui.login_page import LoginPage
from qworker.ui.page_error import PageError, status_of_error
from qworker.ui.pages import PAGES, Page
from qworker.ui.pages.source import Source
from qworker.ui.paths import root_of
from qworker.ui.rendering import Renderer
from qworker.ui.tickets import Signer
from qworker.ui.watch import Watch

__all__ = ["Authorize", "Dashboard", "below"]

Authorize = Callable[[Request], Access | Awaitable[Access | None] | None]

# The path for probes, which need no login.
_HEALTH = "/healthz"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS: Headers = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_NO_STORE = (b"cache-control", b"no-store")


class Dashboard:
    """The application.

    It can be served on its own or mounted in another application, below any path. It needs no lifespan.

    Args:
        watch: The source of all numbers.
        login: The login. None: `authorize` decides.
        authorize: Returns what the user of a request may do. None as its result: status 404.
        hosts: Names that are served besides those of this machine. None: all.
        on_link: Called with the path and query of a login link when a user without a session opens the login page.
        tasks: The app, which can say more about a message, and checks the arguments of edited calls.
        read_only: Whether nothing can be changed.

    Raises:
        UsageError: A secret in the environment is not valid.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        login: Login | None = None,
        authorize: Authorize | None = None,
        hosts: Collection[str] | None = None,
        on_link: Callable[[str], None] | None = None,
        tasks: Tasks | None = None,
        read_only: bool = False,
    ) -> None:
        if (login is None) == (authorize is None):
            raise UsageError("a dashboard needs either a login or authorize=")
        self.watch = watch
        self._source = Source(watch, watch.clock, tasks)
        self._authorize = authorize
        self._hosts = hosts
        signer = Signer(Secrets.from_environment().signing if login is None else login.key)
        guard = Guard(watch, signer, self._session, has_app=tasks is not None, read_only=read_only)
        self._guard = guard
        self._renderer = Renderer(watch.clock, login is not None, guard.content, guard.form_token)
        self._fragments = Fragments(watch.clock)
        actions = Actions(self._source, guard, signer, self._renderer, self._has_page)
        self._confirmed = Confirmed(self._source, guard, signer, self._renderer)
        pages = [Route(page.path, partial(self._show, page)) for page in PAGES]
        api = [Route(f"{API}{one.path}", partial(answer_request, self._source, one)) for one in ENDPOINTS]
        api.append(Route(f"{API}/openapi.json", describe_api))
        self._inner = [*pages, *api, *actions.routes, *self._confirmed.routes]
        routes = [*self._inner, Route(ASSET_PATH, serve_asset)]
        self._login_page = None
        if login is not None:
            self._login_page = LoginPage(login, self._renderer, self._has_page, on_link)
            routes.append(Route("/login", self._login_page.show, methods=["GET", "POST"]))
            routes.append(Route("/logout", self._login_page.log_out, methods=["POST"]))
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._respond(scope, receive, _with_headers(send))

    async def aclose(self) -> None:
        """End sampling, and actions after their batches. Idempotent: the next request starts sampling again."""
        await self._confirmed.aclose()
        await self.watch.aclose()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._login_page is not None and get_route_path(scope) == _HEALTH:
            # A probe has no login, and names the address of this machine.
            await PlainTextResponse("ok\n")(scope, receive, send)
            return
        refusal = page_refusal(scope, self._hosts)
        if refusal is not None:
            await respond(send, *refusal)
            return
        root = root_of(scope)
        if get_route_path(scope) == "":
            # Links of the page would lead beside it.
            await RedirectResponse(f"{root}/", 308)(scope, receive, send)
            return
        try:
            response = await self._checked(Request(scope, receive))
        except (BodyTooLarge, Disconnected):
            response = Response(status_code=413)
        await response(scope, receive, send)

    async def _checked(self, request: Request) -> Response:
        """Answer a request, if its user may see the page."""
        route, found = self._match(request.scope)
        access = await self._access(request)
        if access is None and (route is None or route in self._inner):
            return self._refuse(request)
        if route is None:
            return self._error(request, access, HTTPStatus.NOT_FOUND, "there is no such page")
        if request.method not in (route.methods or ()):
            text = f"this path does not take {request.method}"
            return self._error(request, access, HTTPStatus.METHOD_NOT_ALLOWED, text)
        request.scope.update(found)
        request.state.access = access
        endpoint = cast("Callable[[Request], Awaitable[Response]]", route.endpoint)
        try:
            return await endpoint(request)
        except (PageError, QworkerError, OSError) as error:
            return self._error(request, access, status_of_error(error), str(error))

    def _match(self, scope: Scope) -> tuple[Route | None, dict[str, Any]]:
        """Return the route of a request, or one of its path that does not take its method. None: there is neither."""
        other: tuple[Route | None, dict[str, Any]] = None, {}
        for route in self._routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                return route, dict(found)
            if match is Match.PARTIAL:
                other = route, dict(found)
        return other

    # -- who it is -----------------------------------------------------------------------------------------------------

    async def _access(self, request: Request) -> Access | None:
        if self._login_page is not None:
            return self._login_page.access(request)
        assert self._authorize is not None
        found = self._authorize(request)
        return await found if inspect.isawaitable(found) else found

    def _session(self, request: Request) -> str:
        """Return what identifies the session of a request: its cookie, or the user that `authorize` returned."""
        cookie = None if self._login_page is None else self._login_page.cookie(request)
        return f"user {request.state.access.name}" if cookie is None else cookie

    def _refuse(self, request: Request) -> Response:
        if self._login_page is not None and _is_of_api(request.scope):
            return json_response(Error("send the header Authorization: Bearer TOKEN"), HTTPStatus.UNAUTHORIZED)
        if self._login_page is not None:
            return self._login_page.refuse(request)
        return Response("Not Found", HTTPStatus.NOT_FOUND)

    def _has_page(self, wanted: str) -> bool:
        path = wanted.partition("?")[0]
        scope = {"type": "http", "method": "GET", "path": path, "root_path": ""}
        return (
            wanted.isascii()
            and wanted.isprintable()
            and any(route.matches(scope)[0] is Match.FULL for route in self._inner)
        )

    # -- pages ---------------------------------------------------------------------------------------------------------

    async def _show(self, page: Page, request: Request) -> Response:
        is_fragment = FRAGMENT in request.headers
        # Of now: what is read before a change must not be kept for those who look after it.
        key = self._key(request)
        if is_fragment and (kept := self._fragments.get(key)) is not None:
            return kept.response(request, self._guard.form_token(request))
        content = await page.content(self._source, request)
        if isinstance(content, Response):
            return content
        # The last numbers are shown, but not as those of now.
        is_stale = page.is_of_queue and content["seen"].problem is not None
        status = HTTPStatus.SERVICE_UNAVAILABLE if is_stale else HTTPStatus.OK
        is_live = content.pop("is_live", page.is_live)
        if not is_fragment:
            return self._renderer.page(request, page.template, content, status=status, is_live=is_live)
        fragment = self._renderer.fragment(request, page.template, content, status=status, is_live=is_live)
        self._fragments.keep(key, fragment)
        return fragment.response(request, self._guard.form_token(request))

    def _key(self, request: Request) -> Hashable:
        """Return all that a fragment depends on, besides the time and what is read for its page alone."""
        query, role, seen = request.scope["query_string"], request.state.access.role, self.watch.seen
        path, root = get_route_path(request.scope), root_of(request.scope)
        return path, query, root, role, self.watch.looks.changes, seen.sampled_at, seen.problem

    def _error(self, request: Request, access: Access | None, status: HTTPStatus, text: str) -> Response:
        if _is_of_api(request.scope) or wants_json(request):
            return json_response(Error(text), status)
        request.state.access = access
        return self._renderer.page(request, "error.html", {"status": status, "text": text}, status=status)


def _is_of_api(scope: Scope) -> bool:
    return get_route_path(scope).startswith(f"{API}/")


def _with_headers(send: Send) -> Send:
    """Return a function that sends a response with the headers of every page."""

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", []))
            has_rule = any(name.lower() == b"cache-control" for name, _ in given)
            message = {**message, "headers": [*given, *_HEADERS, *([] if has_rule else [_NO_STORE])]}
        await send(message)

    return sent


async def _lifespan(receive: Receive, send: Send) -> None:
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})


def below(app: ASGIApp, root_path: str) -> ASGIApp:
    """Return an application that is served below a path, whether or not a proxy has cut it off."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": root_path}, receive, send)

    return served
