"""The content of pages that scripts fetch again and again: one rendering serves all viewers of a moment."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qworker.clock import Clock
from qworker.ui.text import without_ages

__all__ = ["FRAGMENT", "Fragment", "Fragments"]

# The header by which the script asks for the content of a page only.
FRAGMENT = "x-qworker-fragment"
# Seconds for which a fragment is kept, as long as there is no newer sample. Scripts ask every 2 s.
_KEPT_S = 2.0
_MOST_KEPT = 50


class Fragment(msgspec.Struct, frozen=True):
    """The content of a page.

    Attributes:
        text: The HTML, with `mark` in the place of the token of a session. Ages are empty, so that the text is the
            same while nothing else changes.
        mark: A random text.
        status: The status of the response.
        digest: Identifies the text.
    """

    text: str
    mark: str
    status: HTTPStatus
    digest: bytes

    @classmethod
    def of(cls, text: str, mark: str, status: HTTPStatus) -> Fragment:
        """Return the fragment with this text."""
        text = without_ages(text)
        return cls(text, mark, status, hashlib.blake2b(text.encode(), digest_size=12).digest())

    def response(self, request: Request, token: str) -> Response:
        """Return the response for one session, which has no body if the script has this content already."""
        tag = f'"{hashlib.blake2b(self.digest + token.encode(), digest_size=12).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"etag": tag})
        text = self.text.replace(self.mark, token)
        return Response(text, self.status, headers={"etag": tag}, media_type="text/html")


class Fragments:
    """Keeps fragments until they are 2 s old.

    Args:
        clock: The clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By what they show. The oldest is the first.
        self._kept: OrderedDict[Hashable, tuple[float, Fragment]] = OrderedDict()

    def get(self, key: Hashable) -> Fragment | None:
        """Return a fragment that is kept."""
        self._forget()
        kept = self._kept.get(key)
        return None if kept is None else kept[1]

    def keep(self, key: Hashable, fragment: Fragment) -> None:
        """Keep a fragment."""
        self._kept.pop(key, None)
        self._kept[key] = self._clock.monotonic() + _KEPT_S, fragment
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)

    def _forget(self) -> None:
        now = self._clock.monotonic()
        while self._kept:
            key, (ends, _) = next(iter(self._kept.items()))
            if ends > now:
                return
            del self._kept[key]
