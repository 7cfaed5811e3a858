"""`manage.py runworker`: `qworker run` for the shop's tasks."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand

from qworker.cli.main import main


class Command(BaseCommand):
    """Run the shop's tasks. Further options of `qworker run` come from QWORKER_<OPTION>."""

    help = __doc__

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Those that one wants to type."""
        parser.add_argument("-w", "--workers", default="1", help="processes")
        parser.add_argument("-c", "--concurrency", default="10", help="messages at once, in each process")
        parser.add_argument("--burst", action="store_true", help="end when nothing is left to do")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run until a signal ends it."""
        burst = ["--burst"] if options["burst"] else []
        arguments = ["run", "shop.tasks:tasks", "-w", options["workers"], "-c", options["concurrency"], *burst]
        raise SystemExit(main(arguments))
