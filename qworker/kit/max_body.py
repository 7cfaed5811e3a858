"""The URL option `max_body`: the largest body that a backend stores and reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from qworker.errors import InvalidURL, MessageTooLarge, UsageError
from qworker.message import Draft
from qworker.size import format_size, parse_size
from qworker.url import BackendURL

__all__ = [
    "DEFAULT_MAX_BODY",
    "MAX_BODY",
    "check_batches",
    "check_bodies",
    "describe_too_large",
    "max_body",
]

# The name of the option, for `BackendURL.only`.
MAX_BODY = "max_body"
# Bytes.
DEFAULT_MAX_BODY = 64 << 20


def max_body(url: BackendURL, default: int | None = None) -> int | None:
    """Return the largest size of a body in bytes. None: any size.

    Args:
        url: The URL. `?max_body=none` means any size.
        default: The size if the URL does not have the option.

    Raises:
        InvalidURL: The option is not a size.
    """
    text = url.options.get(MAX_BODY)
    if text is None:
        return default
    if text == "none":
        return None
    try:
        return parse_size(text, least=1)
    except UsageError as error:
        raise InvalidURL(f"{url.masked}: max_body: {error}, or none for any size") from None


def check_bodies(drafts: Iterable[Draft], most: int | None) -> None:
    """Check that a store takes the bodies of drafts.

    Args:
        drafts: The drafts to publish.
        most: The largest size in bytes. None: any size.

    Raises:
        MessageTooLarge: A body is larger.
    """
    if most is not None:
        for draft in drafts:
            if len(draft.body) > most:
                raise MessageTooLarge(describe_too_large(len(draft.body), most))


def check_batches(batches: Iterable[Sequence[Draft]], most: int | None) -> Iterator[Sequence[Draft]]:
    """Yield batches of drafts, each after `check_bodies`."""
    for drafts in batches:
        check_bodies(drafts, most)
        yield drafts


def describe_too_large(size: int, most: int) -> str:
    """Return the reason why a body is too large, and what to do."""
    return (
        f"the body has {size} bytes, more than max_body={format_size(most)}:"
        " keep large data elsewhere and pass its path or id, or set a larger ?max_body= in the URL"
    )
