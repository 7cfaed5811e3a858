"""How a function becomes a task: its parameters, type hints and options, and how to find it again by name."""
