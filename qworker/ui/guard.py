"""Which requests may change something: of a user with the role, from a form of the user's session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qworker.asgi.access import is_bearer
from qworker.asgi.interface import read_body
from qworker.backend import Backend
from qworker.backend.offers import OffersDue
from qworker.errors import UsageError
from qworker.failures.edit import RULES as EDIT_RULES
from qworker.ui.access import Access, Role
from qworker.ui.audit import Action
from qworker.ui.pages.source import Forbidden
from qworker.ui.tickets import Signer
from qworker.ui.watch import Watch

__all__ = ["Guard", "wants_json"]

# Bytes of a form.
_MOST_FORM = 1 << 20


class _Need(NamedTuple):
    """What an action needs: a role, and a store that keeps some rules of the contract."""

    role: Role
    rules: frozenset[str]


def _need(role: Role, *rules: str) -> _Need:
    return _Need(role, frozenset(rules))


_OF_SCHEDULES = _need("operator", "cells", "hold", "given_ids")
_NEEDS: dict[Action, _Need] = {
    "pause": _need("operator", "pause"),
    "resume": _need("operator", "pause"),
    "pause schedule": _OF_SCHEDULES,
    "resume schedule": _OF_SCHEDULES,
    "run schedule": _OF_SCHEDULES,
    "run now": _need("operator"),
    "cancel": _need("operator", "cancel", "cells"),
    "requeue": _need("operator", "requeue"),
    "requeue many": _need("operator", "requeue"),
    "edit": _need("admin", *EDIT_RULES),
    "remove": _need("admin", "remove"),
    "remove many": _need("admin", "remove"),
    "purge": _need("admin", "remove_by_state"),
}


class Guard:
    """Checks each request of an action.

    Args:
        watch: What knows the store.
        signer: What signs the tokens of forms.
        session: Returns what identifies the session of a request.
        has_app: Whether the app is known, which checks the arguments of edited calls.
        read_only: Whether nothing can be changed.
    """

    def __init__(
        self, watch: Watch, signer: Signer, session: Callable[[Request], str], *, has_app: bool, read_only: bool
    ) -> None:
        self._watch = watch
        self._signer = signer
        self._session = session
        self._needs = dict(_NEEDS)
        if not has_app:
            del self._needs["edit"]
        self._read_only = read_only

    def content(self, request: Request) -> dict[str, Any]:
        """Return what each page shows to its user: the possible actions, and a notice."""
        access: Access | None = request.state.access
        if access is None:
            return {"can": frozenset[Action](), "notice": None}
        return {
            "can": self._allowed(access),
            "notice": self._signer.read_notice(request.query_params.get("notice", "")),
        }

    def form_token(self, request: Request) -> str:
        """Return the token of the forms of a session. It is empty for a user who has none."""
        return "" if request.state.access is None else self._signer.form_token(self._session(request))

    def _allowed(self, access: Access) -> frozenset[Action]:
        """Return what a user can do with the store, as far as it is known."""
        seen = self._watch.seen
        if self._read_only or not seen.is_writable:
            return frozenset()
        return frozenset(
            action
            for action, need in self._needs.items()
            if access.has_role(need.role)
            and need.rules.isdisjoint(seen.deviations)
            and (action != "run now" or seen.has_due)
        )

    def route(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        action: Action | None = None,
        *,
        methods: Sequence[str] = ("POST",),
        has_token: bool = True,
    ) -> Route:
        """Return the route of an action. Its requests have `request.state.form`.

        Args:
            path: The path.
            endpoint: The function that answers.
            action: The action. None: the endpoint knows it, and checks what it needs. An operator can do some.
            methods: The methods.
            has_token: Whether its forms have the token of the session. Otherwise the endpoint checks the ticket.
        """

        async def checked(request: Request) -> Response:
            await self._check(request, action, has_token)
            return await endpoint(request)

        return Route(path, checked, methods=list(methods))

    async def _check(self, request: Request, action: Action | None, has_token: bool) -> None:
        if self._read_only:
            raise Forbidden("this dashboard is read-only")
        if action is None:
            _check_role(request.state.access, "operator")
        else:
            self.check(request.state.access, await self._watch.backend(), action)
        request.state.form = await _read_form(request) if request.method == "POST" else {}
        if request.method == "POST" and has_token and not is_bearer(request.scope):
            given = request.state.form.get("token", "")
            if not self._signer.is_form_token(given, self._session(request)):
                raise Forbidden("this form is not valid any more: open the page again")

    def check(self, access: Access, backend: Backend, action: Action) -> None:
        """Check that a user may do this, and that the store can.

        Raises:
            Forbidden: The user may not.
            UsageError: The store cannot.
        """
        need = _NEEDS[action]
        _check_role(access, need.role)
        missing = sorted(need.rules & backend.deviations.keys())
        if missing:
            raise UsageError(f"this store cannot do this: {backend.deviations[missing[0]]}")
        if action == "run now" and not isinstance(backend, OffersDue):
            raise UsageError("this store cannot make a delayed message due")


def _check_role(access: Access, role: Role) -> None:
    if not access.has_role(role):
        raise Forbidden(f"this needs the role {role}, and yours is {access.role}")


def wants_json(request: Request) -> bool:
    """Return whether the client asks for JSON, as no browser does for a page."""
    return "application/json" in request.headers.get("accept", "")


async def _read_form(request: Request) -> dict[str, str]:
    body = await read_body(request.scope, request.receive, _MOST_FORM)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        try:
            return msgspec.json.decode(body, type=dict[str, str])
        except msgspec.DecodeError as error:
            raise UsageError(f"the body must be a JSON object of texts: {error}") from error
    return dict(parse_qsl(body.decode("latin-1"), keep_blank_values=True))
