"""Text for a terminal: no secret of a URL, and nothing that a terminal would obey."""

from __future__ import annotations

import sys

from kvpool._options import redact

__all__ = ["complain", "printable"]


def printable(text: str) -> str:
    """``text`` in one line, with whatever is not printable written as an escape: ESC, line ends, bytes of no text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def complain(message: str) -> None:
    """Tell a person what is wrong, a line for each problem."""
    for line in redact(message).split("\n"):
        print(f"kvpool: {printable(line)}", file=sys.stderr)
