"""A browser without JavaScript: it reads the forms of a page and sends them, as a user's click does."""

from __future__ import annotations

from html.parser import HTMLParser

import httpx

__all__ = ["Form", "forms_of", "submit"]

# What a browser says of a form of the same site.
OWN = {"sec-fetch-site": "same-origin"}


class Form:
    """A form: where it leads, how, and the values that it has without the user."""

    def __init__(self, attributes: dict[str, str | None]) -> None:
        self.action = attributes.get("action") or ""
        self.method = attributes.get("method") or "get"
        self.values: dict[str, str] = {}
        self.fields: set[str] = set()


class _Forms(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Form] = []
        self._text: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name")
        if tag == "form":
            self.found.append(Form(given))
        elif tag in {"input", "textarea"} and name and self.found:
            self.found[-1].fields.add(name)
            if given.get("type") == "hidden":
                self.found[-1].values[name] = given.get("value") or ""
            if tag == "textarea":
                self._text = name
                self.found[-1].values[name] = ""

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self.found[-1].values[self._text] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            self._text = None


def forms_of(page: httpx.Response) -> dict[str, Form]:
    """Return the forms of a page that change something, by the path to which they lead."""
    parser = _Forms()
    parser.feed(page.text)
    return {form.action: form for form in parser.found if form.method == "post"}


async def submit(client: httpx.AsyncClient, page: httpx.Response, action: str, **fields: str) -> httpx.Response:
    """Send a form of a page, and follow to the page after it."""
    form = forms_of(page)[action]
    assert fields.keys() <= form.fields, form.fields
    sent = await client.post(action, data={**form.values, **fields}, headers=OWN)
    return await client.get(sent.headers["location"]) if sent.status_code == 303 else sent
