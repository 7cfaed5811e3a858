"""Write docs/reference/errors.md from the errors that the code raises: `python -m tests.support.errors_page`."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from qworker import errors
from tests.support.reference import ROOT, sources

__all__ = ["PAGE", "written"]

PAGE = ROOT / "docs" / "reference" / "errors.md"
_BEGINNING = """\
# Errors

<!-- Written by `python -m tests.support.errors_page` from the code. A test compares. -->

These are the texts of all errors that qworker raises, by their class. `...` stands for a name, a value or another
error. Each text says what is wrong and what to do. [Look up the
error](../howto/troubleshooting.md#5-look-up-the-error) has more about each class. A command prints the text in one
line, with the class in brackets at its end, unless it is `UsageError`. It ends with status 2 for a `UsageError` and its
subclasses, and with status 3 if the store cannot be used.
"""
# A text with fewer letters is a part that other texts are put into.
_LEAST = 12


def written() -> str:
    """The page."""
    parts = [_BEGINNING]
    used: Counter[str] = Counter()
    for name, texts in sorted(_texts().items()):
        page = f"../howto/troubleshooting.md#{name.lower()}"
        first = (getattr(errors, name).__doc__ or "").split("\n")[0]
        rows = [f'| <a id="{_anchor(text, used)}"></a>`{text}` | {_area(module)} |' for text, module in texts]
        parts.append("\n".join([f"## {name}", "", f"{first} [What to do]({page})", "", *_HEAD, *rows, ""]))
    return "\n".join(parts)


_HEAD = ["| text | raised by |", "|---|---|"]


@cache
def _texts() -> dict[str, list[tuple[str, str]]]:
    """The texts of each class, each with the module that raises it first."""
    found: dict[str, dict[str, str]] = {name: {} for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    for path in sources():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        code = path.read_text()
        if ".testing" in module or not any(f"{name}(" in code for name in found):
            continue
        for name, text in _raised(ast.parse(code)):
            if name in found and sum(map(str.isalpha, text)) >= _LEAST:
                found[name].setdefault(text, module)
    return {name: sorted(texts.items(), key=lambda one: _key(one[0])) for name, texts in found.items() if texts}


def _raised(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the class and the text of each error that a module creates."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and call.args]
            own = [call for call in calls if ast.unparse(call.func).endswith(".__init__")]
            yield from ((node.name, _line(call.args[-1], constants)) for call in own)
        elif isinstance(node, ast.Call) and node.args:
            yield ast.unparse(node.func).rpartition(".")[2], _line(node.args[0], constants)


def _line(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """The text of an argument in one line of a table."""
    text = " ".join(_text(node, constants).replace("`", "'").replace("|", r"\|").split())
    return re.sub(r"(\.\.\.)+", "...", text)


def _text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """The text of an argument, in which `...` stands for what is not known before."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], {})
    return "..."


def _key(text: str) -> str:
    """The text without what is not known, for sorting."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def _anchor(text: str, used: Counter[str]) -> str:
    slug = "-".join(_key(text).split()[:8])
    used[slug] += 1
    return slug if used[slug] == 1 else f"{slug}-{used[slug]}"


def _area(module: str) -> str:
    """The package that raises it."""
    return f"`{'.'.join(module.removeprefix('backends.').split('.')[:2])}`"


if __name__ == "__main__":
    PAGE.write_text(written())
