"""``kvpool replay``: recorded traffic against a store, every loaded byte verified."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvpool.cli.progress import Progress
from kvpool.replay.engine import Job
from kvpool.replay.report import Report
from kvpool.replay.run import INTERRUPTED, run
from kvpool.replay.trace import Trace

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "replay",
        help="replay recorded traffic against a store",
        description="Replay a trace of requests: engines look up, load, verify every byte that was loaded, fill in the "
        "rest and save it. The exit code is 0 only if the whole trace was replayed and no block was wrong.",
    )
    command.add_argument("trace", metavar="TRACE", help="JSON lines with timestamp and hash_ids, 512 tokens a block")
    command.add_argument("--store", required=True, metavar="URL", help="such as memory:// or file:///var/cache/kv")
    command.add_argument(
        "--engines", type=_count, default=1, metavar="N", help="engines, each a process of its own if more than 1 (1)"
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
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there, as one JSON object")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    trace = Trace.load(arguments.trace, arguments.requests)
    job = Job(trace, arguments.store, arguments.block_bytes, arguments.engines, arguments.speed)
    if arguments.json is not None:
        arguments.json.open("a").close()  # a file that cannot be written is better known before than after
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
        print(f"{name:{width}}  {value}")
    code = _verdict(report)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    return code


def _verdict(report: Report) -> int:
    """What went wrong, for a person, and the exit code."""
    for place in report.wrong_places:
        print(f"kvpool: wrong bytes, {place}", file=sys.stderr)
    if not report.complete:
        where = f"the replay stopped after {report.requests:,} of {len(report.job.trace):,} requests"
        print(f"kvpool: {where}: {report.problem}", file=sys.stderr)
    if report.problem == INTERRUPTED:
        return 130
    return 1 if report.wrong or report.problem or not report.complete else 0


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


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
