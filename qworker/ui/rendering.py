"""Templates: what a page shows becomes HTML, as a whole page or as the part that the script updates."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from qworker.clock import Clock
from qworker.ui.assets import asset_path
from qworker.ui.fragments import Fragment
from qworker.ui.paths import page_of, path_of, root_of
from qworker.ui.text import age, duration, number, rate, show, when, with_code

__all__ = ["Renderer"]

_FILTERS: dict[str, Any] = {
    "age": age,
    "duration": duration,
    "number": number,
    "rate": rate,
    "when": when,
    "with_code": with_code,
}


class Renderer:
    """Renders templates.

    Args:
        clock: The clock.
        has_login: Whether users log in here, and can log out.
        user_content: Returns what each page shows to the user of a request: what the user can do, by name.
        form_token: Returns the token of the forms of the session of a request.
    """

    def __init__(
        self,
        clock: Clock,
        has_login: bool,
        user_content: Callable[[Request], dict[str, Any]],
        form_token: Callable[[Request], str],
    ) -> None:
        self._clock = clock
        self._has_login = has_login
        self._user_content = user_content
        self._form_token = form_token
        # No message can contain it.
        self._token_mark = secrets.token_hex()
        self._templates = Environment(
            loader=PackageLoader("qworker.ui"),
            autoescape=True,
            undefined=StrictUndefined,
            auto_reload=False,
            # Each value passes through it before it is escaped.
            finalize=show,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(_FILTERS)
        # Compiled now, because the first visit would hold up the loop of the application that serves the pages.
        for name in self._templates.list_templates():
            self._templates.get_template(name)

    def page(
        self,
        request: Request,
        template: str,
        content: dict[str, Any],
        *,
        status: HTTPStatus = HTTPStatus.OK,
        is_live: bool = False,
    ) -> Response:
        """Return a page.

        Args:
            request: The request. Its state has the `access` of its user.
            template: The file of the template.
            content: What it shows, by name.
            status: The status of the response.
            is_live: Whether the script updates the page.
        """
        text = self._render(request, template, content, "layout.html", self._form_token(request), is_live=is_live)
        return Response(text, status, media_type="text/html")

    def fragment(
        self, request: Request, template: str, content: dict[str, Any], *, status: HTTPStatus, is_live: bool
    ) -> Fragment:
        """Return the part of a page that the script updates, for all users with the same role."""
        mark = self._token_mark
        text = self._render(request, template, content, "fragment.html", mark, is_live=is_live)
        return Fragment.of(text, mark, status)

    def _render(
        self, request: Request, template: str, content: dict[str, Any], layout: str, token: str, *, is_live: bool
    ) -> str:
        return self._templates.get_template(template).render(
            **content,
            **self._user_content(request),
            now=self._clock.time(),
            token=token,
            layout=layout,
            live=is_live,
            section=template.partition(".")[0],
            path=partial(path_of, request.scope),
            asset=partial(asset_path, request.scope),
            access=request.state.access,
            has_login=self._has_login,
            root=root_of(request.scope),
            here=page_of(request),
        )
