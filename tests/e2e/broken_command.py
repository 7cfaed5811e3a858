"""A command that another package brings, and that cannot be imported."""

raise RuntimeError("broken")
