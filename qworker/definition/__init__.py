"""The definition of tasks: the parameters, type hints, options and names of their functions."""
