"""Write docs/reference/protocols.md from the deviations of the backends: `python -m tests.support.protocols_page`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from qworker.backend import Backend
from qworker.backend.registry import GROUP, backend_class
from qworker.testing.rules import RULES
from qworker_mq.standard_server import StandardServerBackend

__all__ = ["DOCS", "PAGE", "written"]

DOCS = Path(__file__).parents[2] / "docs" / "reference"
PAGE = DOCS / "protocols.md"

# A page for a scheme that has none under protocols/.
_PAGES = {"file": "file-format.md", "redis": "redis.md", "memory": "../howto/testing.md", "mq+http": "protocols/mq.md"}
_BEGINNING = """\
# Protocols

<!-- Written by `python -m tests.support.protocols_page` from the backends' deviations. A test compares. -->

Every backend keeps the rules of [the contract](../howto/backend.md). A dialect shares its queues with other programs,
so its protocol does not support every rule. The dialect declares such a rule as a deviation, and the contract suite
proves it.

[`qworker move`](cli.md#qworker-move) works between all protocols. `memory:`, `file:`, `redis:` and `sq:` keep ids. The
others assign new ids in the form of their protocol. If a protocol has no place for
[fields and argv](envelope.md#parcels), they still survive a move.

"""


def written() -> str:
    """Return the text of the page."""
    backends = _backends()
    return _BEGINNING + "\n".join(
        [*_table(backends), "", *[line for name in backends for line in _section(name, backends[name])]]
    )


def _backends() -> dict[str, Mapping[str, str]]:
    """Return the deviations of each backend, with the dialects last."""
    schemes: dict[type[Backend], list[str]] = {}
    for point in entry_points(group=GROUP):
        # The page is only about the backends of this distribution.
        if point.dist is not None and point.dist.name == "qworker-tasks":
            schemes.setdefault(backend_class(point.name), []).append(point.name)
    first = ("memory", "file", "redis")
    found = {min(names, key=lambda name: (name not in _PAGES, len(name))): k.deviations for k, names in schemes.items()}
    ordered = [*first, *sorted(name for name in found if name not in first)]
    backends = {f"`{name}:`": found[name] for name in ordered if name in found}
    backends["`mq+http:`, `?standard_only=1`"] = StandardServerBackend.deviations
    return backends


def _table(backends: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a table with a row for each rule."""
    shown = {name: declared for name, declared in backends.items() if declared}
    head = ["rule", "the contract", *[_linked(name) for name in shown]]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for rule in RULES:
        asked = RULES[rule].partition(";")[0]
        cells = [f"`{rule}`", asked, *["no" if rule in declared else "" for declared in shown.values()]]
        lines.append("| " + " | ".join(cells) + " |")
    plain = ", ".join(_linked(name) for name, declared in backends.items() if not declared)
    return [
        "In the table, *no* means that the protocol deviates from the rule. With an empty cell it keeps the rule.",
        "",
        *lines,
        "",
        f"No deviations: {plain}.",
    ]


def _section(name: str, declared: Mapping[str, str]) -> list[str]:
    if not declared:
        return []
    lines = [f"## {name}", "", "| rule | reason | effect |", "|---|---|---|"]
    for rule, reason in declared.items():
        _, _, otherwise = RULES[rule].partition("otherwise: ")
        lines.append(f"| `{rule}` | {reason} | {otherwise or 'the call raises `NotSupported`'} |")
    return [*lines, ""]


def _linked(name: str) -> str:
    scheme = name.partition(":")[0].strip("`")
    page = f"protocols/{scheme}.md" if (DOCS / "protocols" / f"{scheme}.md").exists() else _PAGES.get(scheme)
    return f"[{name}]({page})" if page else name


if __name__ == "__main__":
    PAGE.write_text(written())
