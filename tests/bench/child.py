"""Run one function of a figure, and print what it returns: `child.py MODULE FUNCTION JSON`."""

from __future__ import annotations

import gc
import importlib
import json
import sys


def main() -> None:
    """See the module."""
    module, function, parameters = sys.argv[1:]
    found = getattr(importlib.import_module(module), function)
    gc.collect()
    result = found(json.loads(parameters))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
