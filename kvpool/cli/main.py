"""Parses the command line, runs a command, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvpool import __version__
from kvpool._options import redact
from kvpool.cli.text import complain, printable
from kvpool.errors import ConfigError, KVPoolError

__all__ = ["main"]

#: Exit codes: the job was not done, or wrongly; the command line or the configuration is wrong (as argparse has it);
#: interrupted (as shells have it).
FAILED, USAGE, INTERRUPTED = 1, 2, 130

_WHAT = "Share an LLM engine's KV cache through a store."
_TOO_MANY_FILES = "; raise the limit of open files (ulimit -n)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvpool`` with these arguments (those of the process without them); the exit code."""
    _plug_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to fail
    try:
        arguments = _with_commands(_Parser(prog="kvpool", description=_WHAT)).parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except ConfigError as error:
        return _complain(str(error), USAGE)
    except KVPoolError as error:
        return _complain(str(error), FAILED)
    except OSError as error:
        hint = _TOO_MANY_FILES if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        return _complain(f"{error.filename or ''}: {error.strerror or error}{hint}".removeprefix(": "), FAILED)
    except Exception as error:  # a mistake of ours or of somebody's store; no user can use a traceback
        if sys.flags.dev_mode:
            raise
        return _complain(f"{type(error).__name__}: {error} (with python -X dev there is a traceback)", FAILED)


def _plug_streams() -> None:
    """A standard stream that was closed (``>&-``) is /dev/null: nothing else may get its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  for as long as the process lives


def _complain(message: str, code: int) -> int:
    complain(message)
    return code


class _Parser(argparse.ArgumentParser):
    """Shows no secret when a URL stands where none belongs."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(redact(message)))


def _with_commands(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from kvpool.cli import contents, doctor, lend, replay  # slow to import, so only where an interrupt is handled

    parser.add_argument("--version", action="version", version=f"kvpool {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    replay.add_command(commands)
    doctor.add_command(commands)
    contents.add_commands(commands)
    lend.add_command(commands)
    return parser
