"""Hooks of mkdocs: the examples are part of the site, and pages link to them by their place in the repository."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_KINDS = {".md", ".py", ".sh", ".yaml", ".yml", ".service", ""}
_MADE = {"__pycache__", "spool", "archive"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the examples."""
    for path in sorted((_ROOT / "examples").rglob("*")):
        if path.is_file() and path.suffix in _KINDS and not _MADE & set(path.parts):
            files.append(File.generated(config, path.relative_to(_ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links to the examples lead into the site: there they lie beside the pages, and not beside `docs/`."""
    up = "../" * page.file.src_uri.count("/")
    return markdown.replace(f"](../{up}examples/", f"]({up}examples/")
