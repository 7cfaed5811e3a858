"""Hooks of mkdocs.

The examples and pages of the root are part of the site, and pages link to them by their place. For programs that read
the site, each page is there as Markdown too, and `llms.txt` lists them. A page that would fetch something from
elsewhere fails the build.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_KINDS = {".md", ".py", ".sh", ".yaml", ".yml", ".service", ""}
_PAGES = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
_MADE = {"__pycache__", "spool", "archive"}
_FETCHED = re.compile(
    r'<(?:script|img|iframe|link rel="(?:stylesheet|icon|preconnect)")[^>]*(?:src|href)="(?:https?:)?//'
)
# Each page as Markdown, by its place.
_markdown: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> None:
    """Take the address of the site from pyproject.toml, and let readers choose a version if several are built."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    config.site_url = project.get("urls", {}).get("Documentation")
    if os.environ.get("DOCS_VERSIONS"):
        config.extra["version"] = {"provider": "mike"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the examples and the pages of the root."""
    for name in _PAGES:
        files.append(File.generated(config, name, abs_src_path=str(_ROOT / name)))
    for path in sorted((_ROOT / "examples").rglob("*")):
        if path.is_file() and path.suffix in _KINDS and not _MADE & set(path.parts):
            files.append(File.generated(config, path.relative_to(_ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links lead into the site: there the examples and the pages of the root lie beside the others."""
    place = page.file.src_uri
    if place in _PAGES:
        markdown = markdown.replace("](docs/", "](")
    up = "../" * place.count("/")
    for target in ("examples/", *_PAGES):
        markdown = markdown.replace(f"](../{up}{target}", f"]({up}{target}")
    _markdown[place] = re.sub(r"^::: ([\w.]+)$", lambda found: "\n".join(_described(found[1])), markdown, flags=re.M)
    return markdown


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Name the page's Markdown for programs, and refuse what a browser would fetch from elsewhere."""
    fetched = _FETCHED.search(output)
    if fetched is not None:
        raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {fetched[0]}")
    name = page.file.src_uri.rpartition("/")[2]
    return output.replace("</head>", f'<link rel="alternate" type="text/markdown" href="{name}"></head>', 1)


def on_post_build(config: MkDocsConfig) -> None:
    """Write each page as Markdown, and their list."""
    site = Path(config.site_dir)
    for place, text in _markdown.items():
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        (site / place).write_text(text)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", *_listed(config.nav)]
    (site / "llms.txt").write_text("\n".join([*lines, ""]))


def _listed(nav: Any, section: str = "Pages") -> Iterator[str]:
    """Yield the lines of `llms.txt` for a part of the navigation: its pages, and then its sections."""
    entries = [next(iter(entry.items())) for entry in nav]
    pages = [(title, place) for title, place in entries if isinstance(place, str)]
    if pages:
        yield from ("", f"## {section}", "")
    for title, place in pages:
        goal = re.search(r"^\*\*Goal[:.]\*\* (.+?)\n\n", _markdown[place], re.MULTILINE | re.DOTALL)
        more = "" if goal is None else ": " + re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(goal[1].split()))
        yield f"- [{title}]({place}){more}"
    for title, places in entries:
        if not isinstance(places, str):
            yield from _listed(places, title)


@cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("qworker", search_paths=[str(_ROOT), str(_ROOT / "backends")])


def _described(path: str) -> Iterator[str]:
    """Yield the signatures and docstrings of a public name and its members, for the Markdown of a page."""
    found = _package()[path.removeprefix("qworker.")]
    own = [member for name, member in found.members.items() if not name.startswith("_") and not member.is_imported]
    for one in (found, *own):
        if one.has_docstring:
            yield from (f"### `{_signature(one)}`", "", one.docstring.value if one.docstring else "", "")


def _signature(one: griffe.Object | griffe.Alias) -> str:
    if not one.is_function:
        return one.name
    shown = []
    for parameter in one.parameters:
        annotation = "" if parameter.annotation is None else f": {parameter.annotation}"
        default = "" if parameter.default is None else f" = {parameter.default}"
        shown.append(f"{parameter.name}{annotation}{default}")
    return f"{one.name}({', '.join(shown)}) -> {one.returns}"
