"""Writes docs/protocols.md from what the installed backends declare: `python -m tests.support.protocols_page`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from qworker.backend import Backend
from qworker.backend.registry import GROUP, backend_class
from qworker.testing.rules import RULES
from qworker_mq.standard_server import StandardServerBackend

__all__ = ["DOCS", "PAGE", "written"]

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "protocols.md"

# A page for a scheme that has none under protocols/.
_PAGES = {"file": "file-format.md", "redis": "redis.md", "memory": "howto/testing.md", "mq+http": "protocols/mq.md"}
_BEGINNING = """\
# Protocols

<!-- Written by `python -m tests.support.protocols_page` from what the backends declare; a test holds it to that. -->

Every backend does what [the contract](howto/backend.md) says. A dialect, which other programs share live, does so as far as its protocol
has a place for it, and declares the rest: each deviation is a rule of the contract, and the contract's suite proves that the backend
deviates in just that way.

[`qworker move`](cli.md#qworker-move) works between all of them. `memory:`, `file:`, `redis:` and `sq:` keep ids; the others give ids of their own
form. [Fields and arguments](envelope.md#parcels) survive a move to a protocol that has no place for them.

"""


def written() -> str:
    """The page."""
    backends = _backends()
    return _BEGINNING + "\n".join(
        [*_table(backends), "", *[line for name in backends for line in _section(name, backends[name])]]
    )


def _backends() -> dict[str, Mapping[str, str]]:
    """What each kind of backend declares, by its schemes; dialects last."""
    schemes: dict[type[Backend], list[str]] = {}
    for point in entry_points(group=GROUP):
        # Only what this distribution brings: the page is about nothing else.
        if point.dist is not None and point.dist.name == "qworker-tasks":
            schemes.setdefault(backend_class(point.name), []).append(point.name)
    first = ("memory", "file", "redis")
    found = {min(names, key=lambda name: (name not in _PAGES, len(name))): k.deviations for k, names in schemes.items()}
    ordered = [*first, *sorted(name for name in found if name not in first)]
    backends = {f"`{name}:`": found[name] for name in ordered if name in found}
    backends["`mq+http:`, `?standard_only=1`"] = StandardServerBackend.deviations
    return backends


def _table(backends: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line for each rule that somebody deviates from; empty cells are as the contract says."""
    rules = [name for name in RULES if any(name in declared for declared in backends.values())]
    shown = {name: declared for name, declared in backends.items() if declared}
    head = ["rule", "the contract", *[_linked(name) for name in shown]]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for rule in rules:
        asked = RULES[rule].partition(";")[0]
        cells = [f"`{rule}`", asked, *["no" if rule in declared else "" for declared in shown.values()]]
        lines.append("| " + " | ".join(cells) + " |")
    plain = ", ".join(_linked(name) for name, declared in backends.items() if not declared)
    return ["Where it says no, the protocol deviates.", "", *lines, "", f"No deviations: {plain}."]


def _section(name: str, declared: Mapping[str, str]) -> list[str]:
    if not declared:
        return []
    lines = [f"## {name}", "", "| rule | because | shows as |", "|---|---|---|"]
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
