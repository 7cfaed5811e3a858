"""A crawler: each page of a site is one message, and its id is the visited set."""

from __future__ import annotations

import hashlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlsplit

from qworker import Call, Context, Fail, Tasks

PAGES = Path("pages")

tasks = Tasks("file://./spool/crawler")


@tasks.task(max_tries=3, timeout=30)
def visit(ctx: Context, url: str) -> None:
    """Fetch a page, and enqueue the pages of the same site that it links to."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            text = response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        if error.code < 500:
            raise Fail(f"{url}: status {error.code}") from error
        raise  # The next try may succeed.
    links = find_links(url, text)
    PAGES.mkdir(exist_ok=True)
    (PAGES / f"{ctx.message.id}.json").write_text(json.dumps({"url": url, "links": links}))
    tasks.enqueue_many_sync(visits(links))


def visits(urls: Iterable[str]) -> list[Call]:
    """Return the calls for pages. The id of a page is reserved for a day, so each page is visited once a day.

    A call with a reserved id stores nothing. So no process keeps a set of visited pages, and none can lose it.
    """
    day = timedelta(days=1)
    return [visit.using(id=hashlib.sha256(url.encode()).hexdigest(), hold=day).call(url) for url in urls]


def find_links(url: str, text: str) -> list[str]:
    """Return the addresses that a page links to, if they are on its site."""
    parser = _Links()
    parser.feed(text)
    found: set[str] = set()
    for link in parser.links:
        with suppress(ValueError):  # It is not an address.
            found.add(urldefrag(urljoin(url, link)).url)
    return sorted(link for link in found if urlsplit(link)[:2] == urlsplit(url)[:2])


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if (tag, name) == ("a", "href") and value]


if __name__ == "__main__":
    tasks.enqueue_many_sync(visits(sys.argv[1:]))
