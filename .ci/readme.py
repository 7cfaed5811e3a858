"""The README of the package's metadata.

A package index shows it without the files next to it. So its links lead to the documentation site, whose address is
`Documentation` in `[project.urls]` of pyproject.toml. Without an address, they become text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n*")
_PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
_SOURCE = re.compile(r'(src|srcset)="docs/([^"]+)"')
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def readme_of_index(text: str, site: str | None) -> str:
    """Return the README with links that work everywhere.

    Args:
        text: README.md, with links to files of the repository.
        site: The address of the documentation site, or None.
    """
    if site is None:
        return _LINK.sub(r"\2", _IMAGE.sub("", _PICTURE.sub("", text)))

    def absolute(found: re.Match[str]) -> str:
        page = found[3].removeprefix("docs/")
        page = re.sub(r"(^|/)README\.md$", r"\1index.md", page)
        return f"{found[1]}[{found[2]}]({site.rstrip('/')}/{re.sub(r'[.]md$', '.html', page)}{found[4] or ''})"

    return _LINK.sub(absolute, _SOURCE.sub(rf'\1="{site.rstrip("/")}/\2"', text))


class ReadmeHook(MetadataHookInterface):
    """Sets `readme` when a package is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README of the metadata."""
        text = (Path(self.root) / "README.md").read_text()
        site = metadata.get("urls", {}).get("Documentation")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme_of_index(text, site)}
