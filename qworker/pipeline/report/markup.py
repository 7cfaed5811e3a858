"""HTML and SVG as text. Foreign text can enter only by `text` and by attributes, which escape it."""

from __future__ import annotations

from html import escape

from qworker.names import printable

__all__ = ["element", "table", "text"]


def text(words: str) -> str:
    """Return `words` as the text of an element. It contains no markup, and no control characters except line ends."""
    return "\n".join(escape(printable(line)) for line in words.split("\n"))


def element(name: str, *content: str, **attributes: str | float) -> str:
    """Return one element.

    Args:
        name: Its name, which must not be foreign text.
        content: Markup that these functions have made.
        attributes: The attributes, which are escaped. `class_` is `class`, and `aria_label` is `aria-label`. Numbers
            are shortened.
    """
    pairs = "".join(f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"' for key, value in attributes.items())
    return f"<{name}{pairs}>{''.join(content)}</{name}>"


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return escape(printable(value))
    return f"{value:.2f}".rstrip("0").rstrip(".")


def table(headings: list[str], rows: list[list[str]], *, words: int = 1) -> str:
    """Return a table of plain texts. The first `words` columns are texts, and the others are numbers."""
    head = element("tr", *(element("th", text(cell), class_=_column(i, words)) for i, cell in enumerate(headings)))
    body = [
        element("tr", *(element("td", text(cell), class_=_column(i, words)) for i, cell in enumerate(row)))
        for row in rows
    ]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="wide")


def _column(i: int, words: int) -> str:
    return "word" if i < words else "number"
