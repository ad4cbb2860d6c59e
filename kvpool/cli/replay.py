"""``kvpool replay``: recorded traffic against a store, every loaded byte verified."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvpool.cli.progress import Progress
from kvpool.cli.stores import named_store
from kvpool.cli.text import complain, printable
from kvpool.errors import ConfigError, KVPoolError
from kvpool.replay.engine import Job
from kvpool.replay.report import Report
from kvpool.replay.run import INTERRUPTED, run
from kvpool.replay.trace import Trace

__all__ = ["add_command"]

_COUNT_DIGITS = 18  # so much fits 64 bits


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "replay",
        help="replay recorded traffic against a store",
        description="Replay a trace of requests: engines look up, load, verify every byte that was loaded, fill in the "
        "rest and save it. The exit code is 0 only if the whole trace was replayed and no block was wrong.",
    )
    command.add_argument(
        "trace", metavar="TRACE", help="JSON lines with timestamp and hash_ids, 512 tokens a block; - is stdin"
    )
    command.add_argument("--store", required=True, metavar="URL", help="such as memory:// or file:///var/cache/kv")
    command.add_argument(
        "--engines",
        type=_count,
        default=1,
        metavar="N",
        help="engines, each a process of its own if more than 1; at most one a request (1)",
    )
    command.add_argument(
        "--block-bytes", type=_bytes, default=1024, metavar="B", help="size of a block, such as 64KiB (1KiB)"
    )
    command.add_argument("--requests", type=_count, metavar="N", help="only the first N requests")
    command.add_argument(
        "--speed",
        type=_speed,
        metavar="X",
        help="let requests arrive X times as fast as recorded, even if earlier ones are not done; without it an engine "
        "takes one after another, as fast as it can",
    )
    command.add_argument("--json", metavar="FILE", help="write the result there, as one JSON object")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    path = "/dev/stdin" if arguments.trace == "-" else arguments.trace
    trace = Trace.load(path, arguments.requests)
    engines = min(arguments.engines, len(trace))
    named_store(arguments.store)
    job = Job(trace, arguments.store, arguments.block_bytes, engines, arguments.speed)
    result = None if arguments.json is None else _Result(arguments.json, path)
    bar = Progress(sys.stderr, len(trace))

    def show(report: Report) -> None:
        bar.update(
            report.requests,
            f"{report.requests:,} requests  hit rate {report.hit_rate:.2%}  wrong {report.wrong}",
        )

    try:
        report = run(job, show)
    finally:
        bar.clear()
    rows = report.rows()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {printable(value)}")
    code = _verdict(report)
    if result is not None:
        result.write(json.dumps(report.as_dict(), indent=2) + "\n")
    return code


class _Result:
    """The file of ``--json``, there as a whole or not at all; until it is written, an older one stays as it is.

    Raises ConfigError if it is the trace, KVPoolError if it cannot be written: better known before than after.
    """

    def __init__(self, path: str, trace: str) -> None:
        self._name = path
        self._path = os.path.realpath(path)
        with self._errors():
            found = os.stat(path) if os.path.exists(path) else None
            if found is not None and os.path.samestat(found, os.stat(trace)):
                raise ConfigError(f"--json {path}: that is the trace, which would be lost; take another file")
            # What is written to by others as well, or is no file, cannot be replaced.
            self._in_place = found is not None and (
                not stat.S_ISREG(found.st_mode) or any(os.path.samestat(found, open_) for open_ in _standard_streams())
            )
            if self._in_place:
                os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
            else:
                with self._beside():
                    pass

    def write(self, text: str) -> None:
        with self._errors():
            if self._in_place:
                sys.stdout.flush()
                with open(self._name, "a") as file:
                    file.write(text)
                return
            with self._beside() as temporary:
                with open(temporary, "w") as file:
                    file.write(text)
                if os.path.exists(self._path):
                    shutil.copymode(self._path, temporary)
                os.replace(temporary, self._path)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[str]:
        """A new, empty file in the folder of the file, which does not outlive this."""
        path = os.path.join(os.path.dirname(self._path), f".kvpool-{secrets.token_hex(8)}.tmp")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise KVPoolError(f"--json {self._name}: {error.strerror or error}") from error


def _standard_streams() -> Iterator[os.stat_result]:
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed
            yield os.fstat(number)


def _verdict(report: Report) -> int:
    """What went wrong, for a person, and the exit code."""
    for place in report.wrong_places:
        complain(f"wrong bytes, {place}")
    if not report.complete:
        where = f"the replay stopped after {report.requests:,} of {len(report.job.trace):,} requests"
        complain(f"{where}: {report.problem}")
    if report.problem == INTERRUPTED:
        return 130
    return 1 if report.wrong or report.problem or not report.complete else 0


def _count(text: str) -> int:
    digits = text.lstrip("0")
    if not digits.isascii() or not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    if len(digits) > _COUNT_DIGITS:
        raise argparse.ArgumentTypeError(f"{digits[:_COUNT_DIGITS]}... is too large a number")
    return int(digits)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return speed


def _bytes(text: str) -> int:
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0, such as 1024 or 64KiB")
    return size
