"""How the JVMs of tests run."""

from __future__ import annotations

__all__ = ["QUICK_JAVA"]

# What compiles once and runs for a second is not worth the best compiler.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
