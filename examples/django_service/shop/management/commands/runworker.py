"""`manage.py runworker`: run `qworker run` for the tasks of the shop."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand

from qworker.cli.main import main


class Command(BaseCommand):
    """Run the tasks of the shop. Set further options of `qworker run` as QWORKER_<OPTION>."""

    help = __doc__

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that users type most."""
        parser.add_argument("-w", "--workers", default="1", help="processes")
        parser.add_argument("-c", "--concurrency", default="10", help="messages at once, in each process")
        parser.add_argument("--burst", action="store_true", help="end when nothing is left to do")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the worker until a signal ends it."""
        burst = ["--burst"] if options["burst"] else []
        arguments = ["run", "shop.tasks:tasks", "-w", options["workers"], "-c", options["concurrency"], *burst]
        raise SystemExit(main(arguments))
