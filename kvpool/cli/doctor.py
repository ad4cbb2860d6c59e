"""``kvpool doctor``: can this store be used from here, how fast is it, and what should be changed?"""

from __future__ import annotations

import argparse
import math
import re
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from secrets import token_bytes, token_hex
from typing import Literal

import anyio
import numpy as np

from kvpool._options import redact
from kvpool.cli.stores import named_store, quiet
from kvpool.cli.text import printable
from kvpool.errors import KVPoolError
from kvpool.memory import Buffers
from kvpool.registry import parse_url
from kvpool.store import ABSENT, PRESENT, Results, Status, Store, SupportsDiagnosis, SupportsMissing

__all__ = ["add_command"]

_VALUES, _VALUE_BYTES = 16, 64 << 10
_WHAT = f"{_VALUES} values of {_VALUE_BYTES >> 10} KiB"
_CALL_S, _ALL_S = 15.0, 60.0
_QUIET_S = 0.5  # so long what does not end is not worth a line
_PREFIX = "kvpool-doctor/"
_KEY = re.compile(f"{_PREFIX}[0-9a-f]{{32}}: ")  # in a message: no use to anybody


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "doctor",
        help="check that a store can be used, and say what should be changed",
        description="Open a store, put, find, get and delete a few values, and ask it about its set-up. The exit code "
        "is 0 if the store can be used.",
    )
    command.add_argument("store", metavar="URL", help="such as file:///var/cache/kv or redis://localhost")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config, store = named_store(arguments.store)
    examination = _Examination(store)
    _say(printable(str(parse_url(arguments.store))))
    with quiet():  # what a store would warn of when it opens is among its findings
        anyio.run(examination.run, backend=config.event_loop)
    _say("It cannot be used as it is." if examination.failed else "It can be used.")
    return 1 if examination.failed else 0


class _Examination:
    """Prints what is found as it is found."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._opened = ""  #: to be said once the store has answered: one that is away is open, too
        self._failures: list[str] = []

    @property
    def failed(self) -> bool:
        return bool(self._failures)

    async def run(self) -> None:
        with _telling("looked at its place", math.inf):
            missing = self._store.missing() if isinstance(self._store, SupportsMissing) else ""
        begin = time.perf_counter()
        try:
            with anyio.fail_after(_ALL_S):
                async with AsyncExitStack() as stack:
                    with _telling("opened"):
                        await stack.enter_async_context(self._store)
                    self._opened = f"opened in {_ms(begin)}"
                    await self._round_trip()
                    if missing and not self.failed:
                        text = f"{missing}; it has been made just now"
                        self._show("warn", text, "is it the one that the engines use?")
                    if not self._store.capabilities.shared:
                        self._show(
                            "warn", "private to one process: it serves an engine alone, and only until that ends"
                        )
                    if isinstance(self._store, SupportsDiagnosis):
                        with _telling("told of its set-up"):
                            findings = await self._store.diagnose()
                        for finding in findings:
                            if any(finding.text in said for said in self._failures):
                                continue  # a call has met it already
                            self._show(finding.level, finding.text, finding.advice)
                    with _telling("closed"):
                        await stack.aclose()
        except KVPoolError as error:
            self._show("fail", str(error))
        except TimeoutError:
            self._show("fail", f"a call does not end within {_ALL_S:g} s", "see guarded:// in docs/wrappers.md")

    async def _round_trip(self) -> None:
        """Does the store give back what it was given, and nothing else? Nothing is left behind."""
        keys = [f"{_PREFIX}{token_hex(16)}" for _ in range(_VALUES + 1)]  # nothing is put under the last one
        there = False
        try:
            there = await self._put_and_get(keys)
        finally:
            with anyio.move_on_after(_CALL_S, shield=True):
                call = self._store.delete(keys, deadline=_soon())
                if there:
                    await self._judged("deleted them", call, [Status.OK] * _VALUES + [Status.ABSENT])
                else:
                    with _telling("deleted what it may have", _CALL_S):
                        await call

    async def _put_and_get(self, keys: Sequence[str]) -> bool:
        """Whether the values could be put."""
        values = [bytearray(token_bytes(_VALUE_BYTES)) for _ in range(_VALUES)]
        found = [bytearray(_VALUE_BYTES) for _ in keys]
        all_ok = [Status.OK] * _VALUES
        call = self._store.put(keys[:-1], Buffers.of(*values), deadline=_soon())
        if not await self._judged(f"put {_WHAT}", call, all_ok):
            return False
        begin = time.perf_counter()
        with _telling("found them", _CALL_S):
            presence = await self._store.exists(keys, deadline=_soon())
        if presence.tolist() == [PRESENT] * _VALUES + [ABSENT]:
            self._show("ok", f"found them in {_ms(begin)}")
        else:
            self._show("fail", f"a lookup does not find what was put, and only that: {presence.tolist()}")
        call = self._store.get_into(keys, Buffers.of(*found), deadline=_soon())
        if await self._judged("got them", call, [*all_ok, Status.ABSENT]) and found[:-1] != values:
            self._show("fail", "what came back is not what was put", "see checked:// in docs/wrappers.md")
        return True

    async def _judged(self, what: str, call: Awaitable[Results], wanted: Sequence[Status]) -> bool:
        """Show how a call went; whether each key has the status that is ``wanted``."""
        begin = time.perf_counter()
        with _telling(what, _CALL_S):
            results = await call
        if self._opened and not np.isin(results.status, (Status.FAILED, Status.TIMED_OUT)).all():
            self._show("ok", self._opened)
            self._opened = ""
        wrong = [i for i, status in enumerate(wanted) if results.status[i] != status]
        if not wrong:
            self._show("ok", f"{what} in {_ms(begin)}")
            return True
        i = next((i for i in wrong if i in results.errors), wrong[0])
        said = results.errors.get(i) or f"{Status(results.status[i]).name} instead of {wanted[i].name}"
        told = _KEY.sub("", str(said))
        self._show("fail", f"{what}: not so for {len(wrong)} of {len(wanted)} keys: {told}")
        return False

    def _show(self, level: Literal["ok", "warn", "fail"], text: str, advice: str = "") -> None:
        if level == "fail":
            self._failures.append(text)
        _say(f"{level:4}  {printable(redact(text))}")
        if advice:
            _say(f"      {printable(redact(advice))}")


@contextmanager
def _telling(what: str, seconds: float = _ALL_S) -> Iterator[None]:
    """Say what is waited for, and until when, if it is not over at once. By a thread: a store may hold up the loop."""
    left = min(seconds, anyio.current_effective_deadline() - anyio.current_time())
    until = "" if left == math.inf else time.strftime("; given up at %H:%M:%S", time.localtime(time.time() + left))

    def tell() -> None:
        with suppress(OSError):  # nobody reads any more: the next line of the examination's own ends it
            _say(f"wait  not yet {what}{until}")

    timer = threading.Timer(_QUIET_S, tell)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _say(line: str) -> None:
    print(line, flush=True)  # what comes next may take its time, and a pipe keeps what is not flushed


def _soon() -> float:
    return anyio.current_time() + _CALL_S


def _ms(begin: float) -> str:
    ms = (time.perf_counter() - begin) * 1e3
    return f"{ms:.2g} ms" if ms < 10 else f"{ms:.0f} ms"
