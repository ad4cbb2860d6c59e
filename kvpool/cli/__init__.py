"""The command line: ``kvpool``, or ``python -m kvpool``."""
