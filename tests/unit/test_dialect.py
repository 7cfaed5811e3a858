"""Pages and public docstrings are in plain English (docs/contribute/style.md). Errors and help: `test_words.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.dialect import EVERYWHERE, ON_PAGES, page_texts, problems_in
from tests.support.pages import ROOT, pages


@pytest.mark.parametrize("page", pages())
def test_a_page_has_no_words_of_a_dialect(page: str) -> None:
    problems = problems_in(page_texts(page, (ROOT / page).read_text()), ON_PAGES)
    assert not problems, "\n".join(problems)


SOURCES = sorted(path for folder in ("qworker", "backends") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", sorted({path.relative_to(ROOT).parts[:2] for path in SOURCES}), ids="/".join)
def test_public_docstrings_have_no_words_of_a_dialect(folder: tuple[str, str]) -> None:
    texts = [
        text
        for path in SOURCES
        if path.relative_to(ROOT).parts[:2] == folder
        for text in _docstrings(str(path.relative_to(ROOT)), ast.parse(path.read_text()))
    ]
    problems = problems_in(texts)
    assert not problems, "\n".join(problems)


def _docstrings(name: str, node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a module or class and of its public classes, functions and methods."""
    yield name, ast.get_docstring(node) or ""
    for member in node.body:
        if isinstance(member, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith(
            "_"
        ):
            where = f"{name.partition(':')[0]}:{member.lineno}"
            if isinstance(member, ast.ClassDef):
                yield from _docstrings(where, member)
            else:
                yield where, ast.get_docstring(member) or ""


@pytest.mark.parametrize(
    "text",
    [
        "max_tries is at least 1, not 0",
        "a name is no URL",
        "Whoever publishes puts a wake-up there.",
        "to begin anew: mend it",
        "the log tells of each loss",
        "the message is given back",
        "a lock that was let go",
        "Strangers are welcome.",
        "its messages run elsewhere, one try dearer",
        "each is worked\noff by one process",
    ],
)
def test_a_phrase_of_the_dialect_is_found(text: str) -> None:
    assert problems_in([("text", text)])


@pytest.mark.parametrize(
    "text",
    [
        "There is no pickle.",
        "It is no longer stored.",
        "Say *at least once*.",
        "a telltale, a mendicant and a stranger-free queue",
    ],
)
def test_plain_english_is_not_found(text: str) -> None:
    assert problems_in([("text", text)], ON_PAGES) == []


def test_code_and_quotations_of_a_page_are_not_checked() -> None:
    page = (
        'Not "is no URL", `told` or [this](anew.md):\n\n```text\nlikewise\n```\n\n'
        "| rule | why |\n|---|---|\n| `a` | told |\n"
    )
    assert problems_in(page_texts("page.md", page)) == []


def test_a_problem_has_the_line_of_its_paragraph() -> None:
    page = "# Title\n\n```text\ncode\n```\n\nOne\ntwo.\n* three\n  told\n\n| four |\n|---|\n| anew |\n"
    assert [problem.partition(": ")[0] for problem in problems_in(page_texts("page.md", page))] == [
        "page.md:9",
        "page.md:14",
    ]


def test_pages_have_every_rule_of_all_texts() -> None:
    assert EVERYWHERE.items() <= ON_PAGES.items()
