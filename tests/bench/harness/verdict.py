"""One number of the old and of the new code, from alternating rounds: the ratio, and whether the new one is worse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.report import median, number, table

__all__ = ["LEAST", "Comparison", "as_document", "compared", "comparison_table"]

# The least share of the old code's speed that is not worse.
LEAST = 0.95
_RATIO = "x"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What both codes measured of one thing, a value a round."""

    figure: str
    what: str
    unit: str
    # Whether less is better.
    at_most: bool
    old: Sequence[float]
    new: Sequence[float]

    @property
    def ratio(self) -> float:
        """New relative to old, by their medians; more is better."""
        return self._relative(median(self.new))

    @property
    def spread(self) -> tuple[float, float]:
        """The worst and the best round of the old code, relative to its own median."""
        ratios = [self._relative(value) for value in self.old]
        return min(ratios), max(ratios)

    @property
    def verdict(self) -> str:
        """`ok`, `worse`, or `within the spread`: too low, but the old code had a round that was not better."""
        if self.ratio >= LEAST:
            return "ok"
        found = median(self.new)
        within = found <= max(self.old) if self.at_most else found >= min(self.old)
        return "within the spread" if within else "worse"

    def _relative(self, value: float) -> float:
        base = median(self.old)
        if base > 0 and value > 0:
            return base / value if self.at_most else value / base
        # Nothing was lost, or memory shrank: such numbers have no ratio.
        return 1.0 if (value <= base if self.at_most else value >= base) else 0.0


def compared(
    old: Sequence[Sequence[Mapping[str, Any]]], new: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[list[Comparison], list[str]]:
    """What both codes measured, in the order of the new one; and what only one of them did, a line each.

    Ratios are left out: one of two numbers of the same code falls when its other number gets better. What they are made
    of is there.

    Args:
        old: the figures of each round, as `--json` writes them.
        new: the same of the new code.
    """
    before, after = _by_name(old), _by_name(new)
    found = [
        Comparison(
            figure=one["figure"],
            what=one["what"],
            unit=one["unit"],
            at_most=one["at_most"],
            old=[each["measured"] for each in before[name]],
            new=[each["measured"] for each in rounds],
        )
        for name, rounds in after.items()
        if name in before
        for one in rounds[:1]
    ]
    alone = [f"{figure}: only the new code has {what!r}" for figure, what in after if (figure, what) not in before]
    alone += [f"{figure}: only the old code has {what!r}" for figure, what in before if (figure, what) not in after]
    return found, alone


def _by_name(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for figures in rounds:
        for one in figures:
            if one["unit"] == _RATIO:
                continue
            found.setdefault((one["figure"], one["what"]), []).append(one)
    return found


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """A table that is also Markdown."""
    rows = [("figure", "what", "old", "new", "new / old, more is better", "rounds of the old code", "verdict")]
    rows += [
        (
            one.figure,
            one.what,
            f"{number(median(one.old))} {one.unit}".rstrip(),
            f"{number(median(one.new))} {one.unit}".rstrip(),
            f"{one.ratio:.2f} x",
            "{:.2f} to {:.2f} x".format(*one.spread),
            one.verdict,
        )
        for one in comparisons
    ]
    return table(rows)


def as_document(comparisons: Sequence[Comparison], **about: Any) -> str:
    """Everything as JSON, with the rounds."""
    found = [{**asdict(one), "ratio": one.ratio, "spread": one.spread, "verdict": one.verdict} for one in comparisons]
    return json.dumps({**about, "comparisons": found}, indent=1)
