"""The pages are in plain English (docs/internals/style.md)."""

from __future__ import annotations

import pytest

from tests.support.dialect import EVERYWHERE, ON_PAGES, page_texts, problems_in
from tests.support.pages import ROOT, pages


@pytest.mark.parametrize("page", pages())
def test_a_page_has_no_words_of_a_dialect(page: str) -> None:
    problems = problems_in(page_texts(page, (ROOT / page).read_text()), ON_PAGES)
    assert not problems, "\n".join(problems)


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
    page = 'Not "is no URL", `told` or [this](anew.md):\n\n```text\nlikewise\n```\n\n| rule | why |\n|---|---|\n| `a` | told |\n'
    assert problems_in(page_texts("page.md", page)) == []


def test_a_problem_has_the_line_of_its_paragraph() -> None:
    page = "# Title\n\n```text\ncode\n```\n\nOne\ntwo.\n* three\n  told\n\n| four |\n|---|\n| anew |\n"
    assert [problem.partition(": ")[0] for problem in problems_in(page_texts("page.md", page))] == [
        "page.md:9",
        "page.md:14",
    ]


def test_pages_have_every_rule_of_all_texts() -> None:
    assert EVERYWHERE.items() <= ON_PAGES.items()
