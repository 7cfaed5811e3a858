"""Hooks of mkdocs: the examples and pages of the root are part of the site, and pages link to them by their place."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_KINDS = {".md", ".py", ".sh", ".yaml", ".yml", ".service", ""}
_PAGES = ["CHANGELOG.md", "SECURITY.md"]
_MADE = {"__pycache__", "spool", "archive"}


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
    if page.file.src_uri in _PAGES:
        return markdown.replace("](docs/", "](")
    up = "../" * page.file.src_uri.count("/")
    for target in ("examples/", *_PAGES):
        markdown = markdown.replace(f"](../{up}{target}", f"]({up}{target}")
    return markdown
