"""Hooks of mkdocs.

The examples and pages of the root are part of the site, and pages link to them by their place. For programs that read
the site, each page is there as Markdown too, and `llms.txt` lists them.
"""

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


def on_post_build(config: MkDocsConfig) -> None:
    """Write each page of `docs/` as Markdown, and their list."""
    site, docs = Path(config.site_dir), Path(config.docs_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for path in sorted(docs.rglob("*.md")):
        name = path.relative_to(docs)
        text = path.read_text()
        (site / name).write_text(text)
        lines.append(f"- [{text.partition(chr(10))[0].removeprefix('# ')}]({name})")
    (site / "llms.txt").write_text("\n".join([*lines, ""]))
