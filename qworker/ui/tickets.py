"""What the dashboard signs: tickets of confirmed actions, the token of its forms, and notices.

Nothing of them is stored on the server.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import lru_cache
from typing import Literal

import msgspec
from itsdangerous import BadData, URLSafeSerializer, URLSafeTimedSerializer

from qworker.failures.message_filter import MessageFilter
from qworker.message import State

__all__ = ["NOTICE_S", "TICKET_S", "Notice", "Signer", "Ticket", "TicketAction"]

# Seconds for which a ticket can be used, and for which a notice is shown.
TICKET_S = 600
NOTICE_S = 60
# Sessions whose form tokens are kept.
_SESSIONS = 1000

TicketAction = Literal["requeue many", "remove many", "remove", "purge"]


class Ticket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An action on messages, as its user has confirmed it.

    Attributes:
        user: Who has confirmed it. No other user can use it.
        action: What is done.
        store: The URL of the store, without a password.
        queue: The queue.
        at: Unix seconds at which the messages were counted. Its filter says until when they have failed.
        count: Number of messages then.
        matching: The filter of `requeue many` and `remove many`.
        id: The message of `remove`.
        state: The state of `purge`.
        nonce: Identifies the ticket.
    """

    user: str
    action: TicketAction
    store: str
    queue: str
    at: float
    count: int
    matching: MessageFilter = MessageFilter()
    id: str = ""
    state: State = State.FAILED
    nonce: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))


class Notice(msgspec.Struct, frozen=True):
    """The result of an action, for the page after it.

    Attributes:
        text: What was done.
        good: Whether anything was.
        link: A path of the dashboard, in parts. None: there is none.
    """

    text: str
    good: bool = True
    link: tuple[str, ...] = ()


class Signer:
    """Signs with one secret. A text of one kind is not valid as one of another kind.

    Args:
        key: The secret. None: a random one, so what was signed is not valid in other processes.
    """

    def __init__(self, key: str | None) -> None:
        key = key or secrets.token_hex(32)
        sha256 = {"digest_method": hashlib.sha256}
        self._tickets = URLSafeTimedSerializer(key, salt="qworker-ui-ticket", signer_kwargs=sha256)
        self._forms = URLSafeSerializer(key, salt="qworker-ui-form", signer_kwargs=sha256)
        self._notices = URLSafeTimedSerializer(key, salt="qworker-ui-notice", signer_kwargs=sha256)
        # Each fragment that a script fetches has the token, and a session has only one.
        self._form_tokens = lru_cache(_SESSIONS)(self._sign_session)

    def form_token(self, session: str) -> str:
        """Return the token of the forms of one session."""
        return self._form_tokens(session)

    def _sign_session(self, session: str) -> str:
        return str(self._forms.dumps(_digest(session)))

    def is_form_token(self, given: str, session: str) -> bool:
        """Return whether a token is that of a session."""
        try:
            return bool(self._forms.loads(given) == _digest(session))
        except BadData:
            return False

    def sign_ticket(self, ticket: Ticket) -> str:
        """Return a ticket as text."""
        return str(self._tickets.dumps(msgspec.to_builtins(ticket)))

    def read_ticket(self, given: str) -> Ticket | None:
        """Return the ticket of a text. None: it is not valid, or too old."""
        try:
            return msgspec.convert(self._tickets.loads(given, max_age=TICKET_S), Ticket)
        except (BadData, msgspec.ValidationError):
            return None

    def sign_notice(self, notice: Notice) -> str:
        """Return a notice as text, for a URL."""
        return str(self._notices.dumps(msgspec.to_builtins(notice)))

    def read_notice(self, given: str) -> Notice | None:
        """Return the notice of a text. None: it is not valid, or too old."""
        try:
            return msgspec.convert(self._notices.loads(given, max_age=NOTICE_S), Notice)
        except (BadData, msgspec.ValidationError):
            return None


def _digest(session: str) -> str:
    return hashlib.sha256(session.encode(errors="surrogateescape")).hexdigest()
