"""What modules export: checked for a whole package, where everything that it needs is installed."""

from __future__ import annotations

import importlib
import pkgutil

__all__ = ["check_exports"]


def check_exports(package: str, *, leave_out: frozenset[str] = frozenset()) -> int:
    """Import each module under a package, check that the names in its `__all__` exist, and return their number."""
    checked = 0
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, prefix=f"{package}."):
        if module.name in leave_out or module.name.endswith("__main__"):
            continue
        loaded = importlib.import_module(module.name)
        for name in getattr(loaded, "__all__", ()):
            assert hasattr(loaded, name), f"{module.name}.__all__ has {name!r}, which does not exist"
        checked += 1 + (check_exports(module.name, leave_out=leave_out) if module.ispkg else 0)
    return checked
