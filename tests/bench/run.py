#!/usr/bin/env python3
"""The bench: every figure that docs/benchmarks.md names, measured on this machine, as a table and as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from figures import FIGURES, SPARK_FIGURES, measure
from harness import Bench, Figure
from harness.disk import measuring_disk
from harness.report import as_json, as_table, machine


def main() -> int:
    """Measure; 0 if every figure that was asked for is met, 1 if not (never with --quick)."""
    options = _options()
    figures: list[Figure] = []
    with measuring_disk(options.directory) as (folder, disk):
        print("machine: " + ", ".join(f"{name} {value}" for name, value in machine().items()))
        print(f"disk: {disk}", flush=True)
        bench = Bench(folder, quick=options.quick)
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
    return 0 if all(one.met is not False for one in figures) else 1


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
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
