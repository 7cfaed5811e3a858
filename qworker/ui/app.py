"""The dashboard as an ASGI application: its routes, its checks, and its headers."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable, Collection
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any, cast
from urllib.parse import parse_qsl, quote, urlencode

import structlog
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Match, Route, Router

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
    read_body,
    respond,
)
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import InvalidName, QworkerError, UsageError
from qworker.ui.access import SESSION_S, Access, Login
from qworker.ui.actions import Actions
from qworker.ui.confirm import Confirmed
from qworker.ui.guard import Guard, Refused, wants_json
from qworker.ui.pages import NoSuchPage, Pages, Unreachable
from qworker.ui.paths import page_of, root_of
from qworker.ui.tickets import Signer
from qworker.ui.text import duration, number, rate, show, when
from qworker.ui.watch import Watch

__all__ = ["Authorize", "Dashboard", "below"]

Authorize = Callable[[Request], Access | Awaitable[Access | None] | None]

# Bytes of the form of the login page.
_MOST_FORM = 4096
# The header by which the script asks for the content of a page only.
_FRAGMENT = "x-qworker-fragment"
_STATIC = {
    "ui.css": "text/css; charset=utf-8",
    "ui.js": "text/javascript; charset=utf-8",
    "idiomorph.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
# The pages that the script updates.
_LIVE = frozenset({"overview.html", "queue.html", "message.html", "failures.html", "group.html", "schedules.html"})
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
        signing: What signs the forms. None: a random secret, so a form is valid in this process only.
        read_only: Whether nothing can be changed.
        clock: The clock.
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
        signing: str | None = None,
        read_only: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if (login is None) == (authorize is None):
            raise UsageError("a dashboard needs either a login or authorize=")
        self.watch = watch
        self._login = login
        self._authorize = authorize
        self._hosts = hosts
        self._on_link = on_link
        self._pages = Pages(watch, clock, tasks)
        self._signer = Signer(signing if login is None else login.key)
        self._guard = Guard(watch, self._signer, self._session, has_app=tasks is not None, read_only=read_only)
        actions = Actions(watch, self._guard, self._signer, clock, tasks, self._page, self._is_page)
        self._confirmed = Confirmed(watch, self._guard, self._signer, clock, tasks, self._page)
        self._log = structlog.get_logger("qworker.ui")
        self._templates = _environment()
        self._inner = [
            Route("/", self._overview),
            Route("/q/{queue}", self._queue),
            Route("/m/{queue}/{id}", self._message),
            Route("/m/{queue}/{id}/body", self._body),
            Route("/find", self._find),
            Route("/failures", self._failures),
            Route("/failures/{queue}/{key}", self._group),
            Route("/schedules", self._schedules),
            *actions.routes,
            *self._confirmed.routes,
        ]
        outer = [
            Route("/login", self._login_page, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/static/{digest}/{name}", self._static),
        ]
        self._router = Router([*self._inner, *outer])

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
        route, found = self._match(request)
        access = await self._access(request)
        if access is None and (route is None or route in self._inner):
            return self._refuse(request)
        if route is None:
            return self._error(request, access, HTTPStatus.NOT_FOUND, "there is no such page")
        if request.method not in (route.methods or ()):
            text = "this page is only read" if request.method == "POST" else "this is not a page: a form changes it"
            return self._error(request, access, HTTPStatus.METHOD_NOT_ALLOWED, text)
        request.scope.update(found)
        request.state.access = access
        endpoint = cast("Callable[[Request], Awaitable[Response]]", route.endpoint)
        try:
            return await endpoint(request)
        except NoSuchPage as error:
            return self._error(request, access, HTTPStatus.NOT_FOUND, str(error))
        except Refused as error:
            return self._error(request, access, error.status, str(error))
        except (UsageError, InvalidName) as error:
            return self._error(request, access, HTTPStatus.BAD_REQUEST, str(error))
        except (Unreachable, QworkerError, OSError) as error:
            return self._error(request, access, HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _match(self, request: Request) -> tuple[Route | None, dict[str, Any]]:
        """Return the route of a request. None: there is none. A route with another method is the second choice."""
        second: tuple[Route | None, dict[str, Any]] = None, {}
        for route in cast("list[Route]", self._router.routes):
            match, found = route.matches(request.scope)
            if match is Match.FULL:
                return route, dict(found)
            if match is Match.PARTIAL and second[0] is None:
                second = route, dict(found)
        return second

    # -- who it is -----------------------------------------------------------------------------------------------------

    async def _access(self, request: Request) -> Access | None:
        if self._authorize is not None:
            found = self._authorize(request)
            return await found if inspect.isawaitable(found) else found
        assert self._login is not None
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._login.use_token(request.scope, token.strip())
        cookie = request.cookies.get(_cookie_name(request))
        return None if cookie is None else self._login.use_session(cookie)

    def _session(self, request: Request) -> str:
        """Return what identifies the session of a request: its cookie, or the user that `authorize` returned."""
        access: Access = request.state.access
        cookie = None if self._login is None else request.cookies.get(_cookie_name(request))
        return f"user {access.name}" if cookie is None else cookie

    def _refuse(self, request: Request) -> Response:
        if self._login is None:
            return Response("Not Found", HTTPStatus.NOT_FOUND)
        if request.method not in {"GET", "HEAD"} or _FRAGMENT in request.headers:
            return Response("log in first", HTTPStatus.UNAUTHORIZED)
        path = get_route_path(request.scope)
        query = request.url.query
        wanted = f"{path}?{query}" if query else path
        asked = "" if wanted == "/" else f"?{urlencode({'next': wanted})}"
        return RedirectResponse(f"{root_of(request.scope)}/login{asked}", HTTPStatus.SEE_OTHER)

    async def _login_page(self, request: Request) -> Response:
        if self._login is None:
            return Response("Not Found", HTTPStatus.NOT_FOUND)
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
        return self._page(request, "login.html", content, status=status)

    def _announce_link(self, request: Request, wanted: str) -> None:
        assert self._login is not None
        link = None if self._on_link is None else self._login.next_link()
        if link is not None and self._on_link is not None:
            asked = {"t": link, **({"next": wanted} if self._is_page(wanted) else {})}
            self._on_link(f"{root_of(request.scope)}/login?{urlencode(asked)}")

    def _logged_in(self, request: Request, access: Access, wanted: str) -> Response:
        assert self._login is not None
        root = root_of(request.scope)
        target = f"{root}{wanted}" if self._is_page(wanted) else f"{root}/"
        response = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        response.set_cookie(
            _cookie_name(request),
            self._login.new_session(access),
            max_age=SESSION_S,
            path=root or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="lax",
        )
        self._log.info("ui_login", user=access.name, role=access.role)
        return response

    def _is_page(self, wanted: str) -> bool:
        """Return whether a path is that of a page here, so that a link cannot lead elsewhere."""
        path = wanted.partition("?")[0]
        scope = {"type": "http", "method": "GET", "path": path, "root_path": ""}
        return (
            wanted.isascii()
            and wanted.isprintable()
            and any(route.matches(scope)[0] is Match.FULL for route in self._inner)
        )

    async def _logout(self, request: Request) -> Response:
        root = root_of(request.scope)
        response = RedirectResponse(f"{root}/login", HTTPStatus.SEE_OTHER)
        response.delete_cookie(_cookie_name(request), path=root or "/")
        return response

    # -- pages ---------------------------------------------------------------------------------------------------------

    async def _overview(self, request: Request) -> Response:
        asked = request.query_params
        found = await self._pages.overview(asked.get("name", ""), _page_number(asked.get("page", "0")))
        return self._page(request, "overview.html", found)

    async def _queue(self, request: Request) -> Response:
        asked = request.query_params
        found = await self._pages.queue(
            request.path_params["queue"],
            request.state.access,
            state=asked.get("state", "ready"),
            newest=asked.get("order") == "newest",
            after=asked.get("after") or None,
            span=asked.get("range", "1h"),
        )
        return self._page(request, "queue.html", found)

    async def _message(self, request: Request) -> Response:
        given = request.path_params
        found = await self._pages.message(given["queue"], given["id"], request.state.access)
        return self._page(request, "message.html", found)

    async def _body(self, request: Request) -> Response:
        access: Access = request.state.access
        if not access.sees_secrets:
            return self._error(request, access, HTTPStatus.FORBIDDEN, "a viewer cannot download bodies")
        given = request.path_params
        body = await self._pages.body(given["queue"], given["id"])
        # The browser must not show it: it could be a page.
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(given['id'], safe='')}.bin"}
        return Response(body, headers=headers, media_type="application/octet-stream")

    async def _find(self, request: Request) -> Response:
        found = await self._pages.find(request.query_params.get("id", "").strip())
        if len(found["places"]) == 1 and not found["unknown"]:
            (place,) = found["places"]
            path = quote(f"/m/{place.queue}/{place.stored.message.id}")
            return RedirectResponse(f"{root_of(request.scope)}{path}", HTTPStatus.SEE_OTHER)
        return self._page(request, "find.html", found)

    async def _failures(self, request: Request) -> Response:
        return self._page(request, "failures.html", await self._pages.failures())

    async def _group(self, request: Request) -> Response:
        given = request.path_params
        found = await self._pages.group(given["queue"], given["key"], request.state.access)
        return self._page(request, "group.html", found)

    async def _schedules(self, request: Request) -> Response:
        return self._page(request, "schedules.html", await self._pages.schedules())

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _STATIC or request.path_params["digest"] != _digest(name):
            return Response("Not Found", HTTPStatus.NOT_FOUND)
        headers = {"cache-control": "public, max-age=31536000, immutable"}
        return Response(_asset(name), headers=headers, media_type=_STATIC[name])

    def _error(self, request: Request, access: Access | None, status: HTTPStatus, text: str) -> Response:
        request.state.access = access
        if wants_json(request):
            return JSONResponse({"error": text}, status)
        return self._page(request, "error.html", {"status": status, "text": text}, status=status)

    def _page(
        self, request: Request, template: str, content: dict[str, Any], *, status: HTTPStatus = HTTPStatus.OK
    ) -> Response:
        root = root_of(request.scope)
        is_fragment = _FRAGMENT in request.headers

        def path(*parts: str, **query: str | int | None) -> str:
            given = {name: value for name, value in query.items() if value not in {None, "", 0}}
            joined = "/".join(quote(part, safe="") for part in parts)
            return f"{root}/{joined}?{urlencode(given)}" if given else f"{root}/{joined}"

        def asset(name: str) -> str:
            return f"{root}/static/{_digest(name)}/{name}"

        access: Access | None = request.state.access
        text = self._templates.get_template(template).render(
            **content,
            layout="fragment.html" if is_fragment else "layout.html",
            live=template in _LIVE,
            section=template.partition(".")[0],
            path=path,
            asset=asset,
            access=access,
            can=self._guard.allowed(access),
            token="" if access is None else self._signer.form_token(self._session(request)),
            notice=None if access is None else self._signer.read_notice(request.query_params.get("notice", "")),
            has_login=self._login is not None,
            root=root,
            here=page_of(request),
        )
        if not is_fragment:
            return Response(text, status, media_type="text/html")
        tag = f'"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"etag": tag})
        return Response(text, status, headers={"etag": tag}, media_type="text/html")


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("qworker.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        # Each value passes through it before it is escaped.
        finalize=show,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "number": number, "rate": rate, "when": when}
    return environment


def _cookie_name(request: Request) -> str:
    """Return the name of the cookie. Browsers send the cookies of one port to all ports of a host."""
    server = request.scope.get("server")
    prefix = "__Secure-" if request.url.scheme == "https" else ""
    return f"{prefix}qworker_ui_{server[1] if server and server[1] else 0}"


def _page_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise UsageError("page must be a number from 0")
    return int(text)


@cache
def _asset(name: str) -> bytes:
    return files("qworker.ui").joinpath("static", name).read_bytes()


@cache
def _digest(name: str) -> str:
    return hashlib.blake2b(_asset(name), digest_size=8).hexdigest()


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
