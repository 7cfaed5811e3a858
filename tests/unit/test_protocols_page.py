from __future__ import annotations

import re

import pytest

from qworker.backend.registry import backend_class
from tests.support.protocols_page import DOCS, PAGE, written


def test_the_page_about_protocols_says_what_the_backends_declare() -> None:
    assert PAGE.read_text() == written(), "write it again: .venv/bin/python -m tests.support.protocols_page"


@pytest.mark.parametrize("page", sorted(path.stem for path in (DOCS / "protocols").glob("*.md")))
def test_each_protocols_own_page_has_the_same_deviations(page: str) -> None:
    text = (DOCS / "protocols" / f"{page}.md").read_text()
    _, _, section = text.partition("\n## Deviations\n")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", section.partition("\n## ")[0], re.MULTILINE))
    assert rows == dict(backend_class(page).deviations)
