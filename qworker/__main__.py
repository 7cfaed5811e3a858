"""The entry point of `python -m qworker`."""

from __future__ import annotations

import sys

from qworker.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
