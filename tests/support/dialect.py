"""Words and phrases that texts for users do not use, and a check of named texts for them.

docs/contribute/style.md gives the rules. To check more texts, pass each with a name to `problems_in`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["EVERYWHERE", "ON_PAGES", "page_texts", "problems_in"]

# A pattern of whole words in any case, and what to write instead.
EVERYWHERE = {
    # A role acts, not a person without a name.
    r"somebody|someone|anybody|anyone|nobody|everybody|whoever|whomever": "the worker, the publisher, another process",
    r"strangers?": "other programs, foreign files",
    # Archaic and literary words.
    r"anew": "again",
    r"as it were|of course|simply|whatsoever": "(delete it)",
    r"beside": "next to",
    r"dearer": "more expensive, with one more try",
    r"for ever|for good": "permanently, without a limit",
    r"learnt": "learned",
    r"lest": "so that ... not",
    r"likewise": "also",
    r"mend(s|ed|ing)?": "fix, repair",
    r"nevertheless|nonetheless|all the same": "but, still",
    r"tells?|told": "report, log, show, return",
    r"thrice": "three times",
    r"thus|hence|whence": "so",
    # Only the valid case.
    r"(?<!there )(is|are|was|were) no(?! (longer|older|more)\b)": "is not a valid ...",
    r"at (least|most) .*, not|(?<!there )is at (least|most)": "must be at least N (got M)",
    r"is \d+ to \d+": "must be from N to M (got X)",
    # Phrases of the old dialect.
    r"(?<!there )(is|are) (?-i:none)": "does not exist, is not a ...",
    r"g(ive|ives|ave|iven|iving) (it |them )?back|put(s|ting)? (it |them )?back": "release, return",
    r"hand(s|ed|ing)? (it |them )?on": "pass on, forward",
    r"let go": "release, close",
    r"now and then": "periodically, sometimes",
    r"work(s|ed|ing)? off": "run, finish",
}
# Help, errors and the declarations of the code still have a few of these.
ON_PAGES = {
    **EVERYWHERE,
    r"(?<=, )for (it|its|they|their|he|that|what|there|nothing|only|every|each|no|else)": "because",
    r"a look|look(s|ed|ing)? (at|into|twice|once)": "read, check, list",
    r"at work": "running",
    r"go(es|ing)? on|went on|gone on": "continue",
    r"leave(s)? \w+ alone|left alone": "ignore, do not change",
    r"let(s|ting) go": "release, close",
    r"of (its|their) own": "its own ..., separate",
    r"says? so": "report, log",
    r"stands? (still|there|in)|stood still": "does not run, is",
    r"taken for": "treated as, counted as",
}


def problems_in(texts: Iterable[tuple[str, str]], patterns: Mapping[str, str] = EVERYWHERE) -> list[str]:
    """Return a line for each forbidden phrase in the texts, with the name of the text and what to write instead.

    Args:
        texts: Pairs of a name, such as a file and a line, and a text.
        patterns: The forbidden phrases, and what to write instead of each.
    """
    compiled = [
        (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE), instead)
        for pattern, instead in patterns.items()
    ]
    return [
        f"{name}: {found[0]!r} in {text!r}: write {instead}"
        for name, raw in texts
        for text in [" ".join(raw.split())]
        for pattern, instead in compiled
        for found in pattern.finditer(text)
    ]


# Parts of a page that are not prose, and prose that quotes something else.
_NOT_PROSE = re.compile(
    r"^ *```.*?^ *```$|<!--.*?-->|<figure>.*?<figcaption>|`[^`]*`|(?<=\])\([^)]*\)|\"[^\"]*\"", re.MULTILINE | re.DOTALL
)
# What `tests.support.cli_page` and the tables of deviations copy from the code is checked there.
_FROM_CODE = re.compile(
    r"^## `qworker .*?(?=^<!-- more -->|^## |\Z)|^\| rule \|.*?(?=^(?!\|)|\Z)", re.MULTILINE | re.DOTALL
)


def page_texts(page: str, markdown: str) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs, list items and table rows of a page without code and quotations, each with its place."""
    for excluded in (_FROM_CODE, _NOT_PROSE):
        markdown = excluded.sub(lambda found: "_" + "\n" * found[0].count("\n"), markdown)
    name, lines = "", list[str]()
    for number, line in enumerate([*markdown.splitlines(), ""], 1):
        if lines and re.match(r"\s*([|#]|[*-] |\d+\. |$)", line):
            yield name, "\n".join(lines)
            lines = []
        if line.strip():
            name = name if lines else f"{page}:{number}"
            lines.append(line)
