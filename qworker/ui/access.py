"""Who may see the dashboard: a link that logs in once, tokens, and the signed cookie of a session."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from typing import Literal, get_args

import msgspec
from itsdangerous import BadData, URLSafeTimedSerializer

from qworker.asgi.access import check_secret
from qworker.asgi.interface import Scope
from qworker.asgi.throttle import Throttle
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import UsageError
from qworker.kit.network import client_group

__all__ = ["LINK_S", "ROLES", "SESSION_S", "Access", "Login", "Role", "Secrets"]

Role = Literal["viewer", "operator", "admin"]
# Each may do what those before it may.
ROLES: tuple[Role, ...] = get_args(Role)

# Seconds for which a login link and a session are valid.
LINK_S = 300
SESSION_S = 12 * 3600
# Links that were used and are still in their time.
_MOST_USED = 1000


class Access(msgspec.Struct, frozen=True):
    """What one person may do.

    Attributes:
        name: Who it is, for logs.
        role: `viewer` sees everything, but secrets in arguments are masked, and bodies cannot be downloaded.
            `operator` sees all, pauses, requeues, cancels and runs. `admin` also removes, and edits arguments.
    """

    name: str
    role: Role = "viewer"

    @property
    def sees_secrets(self) -> bool:
        """Whether arguments are shown whole."""
        return self.role != "viewer"

    def has_role(self, role: Role) -> bool:
        """Return whether the user may do what a role may."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Secrets(msgspec.Struct, frozen=True):
    """The secrets of the environment.

    Attributes:
        admin: `QWORKER_UI_TOKEN`: who knows it is an admin. None: only links log in.
        viewer: `QWORKER_UI_VIEW_TOKEN`: who knows it is a viewer.
        signing: `QWORKER_UI_SECRET`: signs sessions, so that they are valid in other processes too, and after a
            restart. None: a random one.
    """

    admin: str | None = None
    viewer: str | None = None
    signing: str | None = None

    @classmethod
    def from_environment(cls) -> Secrets:
        """Read the secrets.

        Raises:
            UsageError: One is not valid, or the two tokens are the same.
        """
        found = cls(*[_read(name) for name in ("QWORKER_UI_TOKEN", "QWORKER_UI_VIEW_TOKEN", "QWORKER_UI_SECRET")])
        if found.admin is not None and found.admin == found.viewer:
            raise UsageError("QWORKER_UI_TOKEN and QWORKER_UI_VIEW_TOKEN must differ: a viewer would be an admin")
        return found


def _read(variable: str) -> str | None:
    value = os.environ.get(variable) or None
    check_secret(variable, value)
    return value


class Login:
    """Turns links and tokens into sessions.

    Nothing is stored on the server. A changed secret or token ends all sessions.

    Args:
        known: The secrets.
        clock: The clock of the limit of guesses.

    Attributes:
        key: What signs sessions.
    """

    def __init__(self, known: Secrets, clock: Clock = SYSTEM_CLOCK) -> None:
        self._known = known
        self._throttle = Throttle(clock)
        key = known.signing or secrets.token_hex(32)
        self.key = tokens = f"{key}\0{known.admin or ''}\0{known.viewer or ''}"
        signing = {"digest_method": hashlib.sha256}
        self._sessions = URLSafeTimedSerializer(tokens, salt="qworker-ui-session", signer_kwargs=signing)
        self._links = URLSafeTimedSerializer(tokens, salt="qworker-ui-link", signer_kwargs=signing)
        # Used links, the oldest first.
        self._used: dict[str, None] = {}
        self._clock = clock
        # Monotonic seconds: until then there is a link that was not used.
        self._link_until = float("-inf")

    # -- links ---------------------------------------------------------------------------------------------------------

    def new_link(self) -> str:
        """Return the secret of a link that logs in an admin, once, within `LINK_S`."""
        self._link_until = self._clock.monotonic() + LINK_S
        return str(self._links.dumps(secrets.token_hex(8)))

    def next_link(self) -> str | None:
        """Return the secret of another link, or None while the last one can still be used."""
        return None if self._clock.monotonic() < self._link_until else self.new_link()

    def use_link(self, given: str) -> Access | None:
        """Log in by a link. None: it is not valid, too old, or was used."""
        try:
            nonce = str(self._links.loads(given, max_age=LINK_S))
        except BadData:
            return None
        if nonce in self._used:
            return None
        self._used[nonce] = None
        self._link_until = float("-inf")
        while len(self._used) > _MOST_USED:
            del self._used[next(iter(self._used))]
        return Access("link", "admin")

    # -- tokens --------------------------------------------------------------------------------------------------------

    @property
    def has_tokens(self) -> bool:
        """Whether a token can log in."""
        return self._known.admin is not None or self._known.viewer is not None

    def use_token(self, scope: Scope, given: str) -> Access | None:
        """Log in by a token. None: it is wrong, or its address has guessed too often."""
        client = scope.get("client")
        address, sent = client_group(client[0]) if client else "", given.encode()
        if self._throttle.is_blocked(address, sent):
            return None
        roles: tuple[tuple[str | None, Role], ...] = ((self._known.admin, "admin"), (self._known.viewer, "viewer"))
        for token, role in roles:
            if token is not None and hmac.compare_digest(sent, token.encode()):
                return Access("token", role)
        self._throttle.add(address, sent)
        return None

    # -- sessions ------------------------------------------------------------------------------------------------------

    def new_session(self, access: Access) -> str:
        """Return the value of the cookie."""
        return str(self._sessions.dumps([access.name, access.role]))

    def use_session(self, cookie: str) -> Access | None:
        """Return whose session it is. None: it is not valid, or has ended."""
        try:
            return msgspec.convert(self._sessions.loads(cookie, max_age=SESSION_S), _Session).to_access()
        except (BadData, msgspec.ValidationError):
            return None


class _Session(msgspec.Struct, frozen=True, array_like=True):
    """The content of a session's cookie."""

    name: str
    role: Role

    def to_access(self) -> Access:
        return Access(self.name, self.role)
