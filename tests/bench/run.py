#!/usr/bin/env python3
"""The bench: every figure of docs/explanation/benchmarks.md, measured on this machine, as a table and as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from against import against
from figures import COUNTED, FIGURES, SPARK_FIGURES, measure
from harness import Bench, Figure
from harness.codes import CannotCompare
from harness.disk import measuring_disk
from harness.report import as_json, as_table, machine

# Of each code, with --against.
_ROUNDS = 9


def main() -> int:
    """Measure; 0 if every figure that was asked for is met, 1 if not (never with --quick or --own); 2 for a mistake."""
    options = _options()
    if options.against:
        return _against(options)
    figures: list[Figure] = []
    with measuring_disk(options.directory) as (folder, disk):
        print("machine: " + ", ".join(f"{name} {value}" for name, value in machine().items()))
        print(f"disk: {disk}", flush=True)
        bench = Bench(folder, quick=options.quick, own=options.own)
        for name in options.only or (SPARK_FIGURES if options.spark else FIGURES):
            began = time.monotonic()
            print(f"{name} ...", end=" ", flush=True)
            found = measure(name, bench)
            figures += found
            print(f"{time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{as_table(figures)}\n")
    if options.json:
        options.json.write_text(as_json(figures, quick=options.quick, disk=disk) + "\n")
    if options.quick:
        print("--quick: everything runs, and the figures mean nothing")
        return 0
    return 0 if options.own or all(one.met is not False for one in figures) else 1


def _against(options: argparse.Namespace) -> int:
    names = options.only or (SPARK_FIGURES if options.spark else [name for name in FIGURES if name not in COUNTED])
    try:
        return against(
            options.against,
            names,
            rounds=options.rounds or (2 if options.quick else _ROUNDS),
            quick=options.quick,
            directory=options.directory,
            json_file=options.json,
            this_bench=options.this_bench,
        )
    except CannotCompare as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 2


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=(*FIGURES, *SPARK_FIGURES),
        metavar="NAME",
        help=f"measure this one; repeatable: {', '.join((*FIGURES, *SPARK_FIGURES))}",
    )
    parser.add_argument("--spark", action="store_true", help="measure the pipeline's figures instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, with the rounds, to FILE")
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that everything runs")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="measure in DIR, and make no disk image")
    parser.add_argument(
        "--own", action="store_true", help="one round of qworker's own side, without its peers; nothing is judged"
    )
    parser.add_argument(
        "--against",
        metavar="COMMIT",
        help="measure the code of COMMIT and this tree's in turns, by --own of each; fail where this tree's is slower",
    )
    parser.add_argument("--rounds", type=_count, metavar="N", help=f"of each code, with --against; default {_ROUNDS}")
    parser.add_argument(
        "--this-bench",
        action="store_true",
        help="drive both codes by this tree's bench, for numbers that the old one does not have",
    )
    options = parser.parse_args()
    if (options.rounds or options.this_bench) and not options.against:
        parser.error("--rounds and --this-bench need --against COMMIT")
    if options.own and options.against:
        parser.error("--own and --against exclude each other: --against is made of rounds of --own")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1 (got {text})")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
