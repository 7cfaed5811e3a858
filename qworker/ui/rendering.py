"""Templates: what a page shows becomes HTML, as a whole page or as the part that the script updates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from qworker.ui.assets import asset_path
from qworker.ui.paths import page_of, path_of, root_of
from qworker.ui.text import duration, number, rate, show, when

__all__ = ["FRAGMENT", "Renderer"]

# The header by which the script asks for the content of a page only.
FRAGMENT = "x-qworker-fragment"


class Renderer:
    """Renders templates.

    Args:
        has_login: Whether users log in here, and can log out.
        user_content: Returns what each page shows to the user of a request: what the user can do, by name.
    """

    def __init__(self, has_login: bool, user_content: Callable[[Request], dict[str, Any]]) -> None:
        self._has_login = has_login
        self._user_content = user_content
        self._templates = Environment(
            loader=PackageLoader("qworker.ui"),
            autoescape=True,
            undefined=StrictUndefined,
            # Each value passes through it before it is escaped.
            finalize=show,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"duration": duration, "number": number, "rate": rate, "when": when}
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
        is_fragment = FRAGMENT in request.headers
        text = self._templates.get_template(template).render(
            **content,
            **self._user_content(request),
            layout="fragment.html" if is_fragment else "layout.html",
            live=is_live,
            section=template.partition(".")[0],
            path=partial(path_of, request.scope),
            asset=partial(asset_path, request.scope),
            access=request.state.access,
            has_login=self._has_login,
            root=root_of(request.scope),
            here=page_of(request),
        )
        if not is_fragment:
            return Response(text, status, media_type="text/html")
        tag = f'"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"etag": tag})
        return Response(text, status, headers={"etag": tag}, media_type="text/html")
