"""GuardedStore: puts a deadline, retries and a circuit breaker in front of any store.

**Deadline.** Every call ends soon after its deadline, whatever the inner store does: 50 ms later the inner
call is cancelled, and one that does not even heed that is left behind in a task of this store, its outcome void.

**Memory.** A call that is left behind may go on touching memory, so that memory must not be the caller's. With
``bounce`` (the default) values pass through memory that belongs to the call, for the price of a copy. Without, the
caller's own memory is used, and a get or put returns when the inner call has let go of it, late if need be: right for
callers that keep the memory and leave the call behind themselves, as KVPool does with its staging memory.

**Retries.** Keys that FAILED, or a call that raised, are tried again after a random pause, as long as the deadline
allows. What is late, corrupt or rejected is not; nor is a delete, which would answer otherwise the second time.

**Breaker.** A call has failed when it raised, was late, or answered for none of its keys. While the breaker is open,
every key is FAILED (UNKNOWN) at once; the rules are those of :class:`~kvpool.backends._breaker.Breaker`.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Self

import anyio
import anyio.lowlevel
import numpy as np
from pydantic import BaseModel, Field

from kvpool.backends._aside import Aside
from kvpool.backends._breaker import Breaker
from kvpool.backends._lifecycle import Lifecycle
from kvpool.backends._wrapping import (
    GRACE_S,
    Rows,
    answered,
    check_place,
    copy_rows,
    memory_like,
    merge,
    pass_on_powers,
    pick,
    select,
)
from kvpool.deadlines import move_on_at
from kvpool.errors import ConfigError, LayoutError, StoreClosed, StoreError, UnsupportedError
from kvpool.memory import Buffers
from kvpool.registry import URL, create_store
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Presence, Results, Status, Store, check_batch
from kvpool.trouble import Trouble, reason

__all__ = ["GuardedStore"]

logger = logging.getLogger(__name__)

#: Calls left behind that have not ended yet, at most; with as many, the inner store is not asked.
MAX_LEFT_BEHIND = 32

#: Errors that say something about the caller or the set-up, not about the state of the store.
_NOT_THE_STORE = (StoreClosed, LayoutError, ConfigError, UnsupportedError)
#: Presence as a status, and back.
_STATUS_OF = np.array([Status.ABSENT, Status.OK, Status.FAILED], np.uint8)
_PRESENCE_OF = np.array([{Status.OK: PRESENT, Status.ABSENT: ABSENT}.get(s, UNKNOWN) for s in Status], np.uint8)

#: Asks the inner store for some keys, which are these rows of the batch, until a deadline.
_Ask = Callable[[Sequence[str], Rows, float], Awaitable[Results]]


class _NotAsked(StoreError):
    """The breaker is open."""


class _Options(BaseModel):
    store: str = Field(description="the URL of the store to guard")
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False, description="seconds above 0")
    retries: int = Field(default=2, ge=0, le=10, description="0 to 10")
    backoff_s: float = Field(default=0.02, ge=0, allow_inf_nan=False, description="seconds, 0 or more")
    bounce: bool = Field(default=True, description="true or false")
    failures: int = Field(default=5, ge=1, description="calls in a row, 1 or more")
    ratio: float = Field(default=0.5, gt=0, le=1, description="above 0, up to 1")
    window: int = Field(default=20, ge=1, le=10_000, description="calls, 1 to 10000")
    cooldown_s: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="seconds above 0")
    max_cooldown_s: float = Field(default=30.0, gt=0, allow_inf_nan=False, description="seconds above 0")


_BREAKER = {"failures", "ratio", "window", "cooldown_s", "max_cooldown_s"}


class GuardedStore(Store):
    """Guards ``inner``, which it opens and closes.

    ``timeout_s``: no call takes longer, whatever its deadline. ``retries``: attempts after the first; the pause before
    the n-th of them is random, up to ``backoff_s * 2**(n-1)``. ``breaker``: when to stop asking.
    ``counts``: attempts that were ``late``, ``failed``, ``refused``, or a ``retry``.

    Closing waits for the calls that were left behind. Open and close it in one task.
    """

    scheme: ClassVar[str] = "guarded"

    def __init__(
        self,
        inner: Store,
        *,
        timeout_s: float = 30.0,
        retries: int = 2,
        backoff_s: float = 0.02,
        bounce: bool = True,
        breaker: Breaker | None = None,
    ) -> None:
        self.inner = inner
        self.breaker = breaker or Breaker()
        self.counts: Counter[str] = Counter()
        self._name = f"guarded {type(inner).__name__}"
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._bounce = bounce
        meaning = "it is left alone for a while, its keys are misses"
        self._trouble = Trouble(logger, self._name, meaning, level=logging.INFO)  # the caller hears of each
        self._aside = Aside(GRACE_S)
        self._life = Lifecycle(self._name)
        self._stack = AsyncExitStack()
        self._describe()

    @classmethod
    def from_url(cls, url: URL) -> Self:
        """``guarded://?store=URL``; the other fields of the constructor and those of the breaker are options."""
        check_place(url)
        options = url.options(_Options)
        breaker = Breaker(**options.model_dump(include=_BREAKER))
        return cls(create_store(options.store), breaker=breaker, **options.model_dump(exclude={"store", *_BREAKER}))

    async def __aenter__(self) -> Self:
        self._life.open()
        async with AsyncExitStack() as stack:
            # Undone from the last to the first: the inner store ends its calls, so ours end, then those left behind.
            await stack.enter_async_context(self._aside)
            stack.push_async_callback(self._life.close)
            await stack.enter_async_context(self.inner)
            self._stack = stack.pop_all()
        self._describe()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._life.closed = True
        await self._stack.__aexit__(exc_type, exc, tb)

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        async def ask(keys: Sequence[str], rows: Rows, limit: float) -> Results:
            found = await self.inner.exists(keys, deadline=limit)
            return Results(_STATUS_OF[found], np.zeros(len(found), np.int64))

        results = await self._guard(keys, ask, deadline)
        error = next(iter(results.errors.values()), None)
        if error is not None and not isinstance(error, _NotAsked) and (results.status == Status.FAILED).all():
            # A presence has no room for why nothing is known.
            raise StoreError(reason(error)) from error
        found: Presence = _PRESENCE_OF[results.status]
        return found

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, into)
        memory = memory_like(into) if self._bounce else into

        async def ask(keys: Sequence[str], rows: Rows, limit: float) -> Results:
            return await self.inner.get_into(keys, select(memory, rows), deadline=limit)

        results = await self._guard(keys, ask, deadline, leave=self._bounce)
        if self._bounce:
            await copy_rows(memory, into, np.flatnonzero(results.ok))
        return results

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, source)
        memory = memory_like(source) if self._bounce else source

        async def prepare() -> None:
            if self._bounce:
                await copy_rows(source, memory, np.arange(len(keys)))

        async def ask(keys: Sequence[str], rows: Rows, limit: float) -> Results:
            return await self.inner.put(keys, select(memory, rows), deadline=limit)

        return await self._guard(keys, ask, deadline, leave=self._bounce, prepare=prepare)

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        async def ask(keys: Sequence[str], rows: Rows, limit: float) -> Results:
            return await self.inner.delete(keys, deadline=limit)

        return await self._guard(keys, ask, deadline, retries=0)

    @property
    def left_behind(self) -> int:
        """How many calls of the inner store have been left behind and have not ended yet."""
        return len(self._aside)

    def _describe(self) -> None:
        """What the inner store can do is known for sure once it is open."""
        theirs = self.inner.capabilities
        self.capabilities = replace(theirs, zero_copy=theirs.zero_copy and not self._bounce)
        pass_on_powers(self, self.inner)

    async def _guard(
        self,
        keys: Sequence[str],
        ask: _Ask,
        deadline: float,
        *,
        leave: bool = True,
        retries: int | None = None,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> Results:
        """All attempts at one batch. ``leave``: they may be left behind. ``prepare``: awaited once, if one is made."""
        results = Results.empty(len(keys), Status.TIMED_OUT)
        rows = np.arange(len(keys))
        with self._life.call():
            now = anyio.current_time()
            limit = min(deadline, now + self._timeout_s)
            if not len(keys) or limit <= now:
                await anyio.lowlevel.checkpoint()
                return results
            for attempt in range(1 + (self._retries if retries is None else retries)):
                if attempt and not await self._pause(attempt, limit):
                    break
                now = anyio.current_time()
                full = self.left_behind >= MAX_LEFT_BEHIND
                ticket = None if full else self.breaker.admit(now, limit + GRACE_S)
                if ticket is None:
                    self.counts["refused"] += 1
                    if not attempt:  # else it has said why
                        merge(results, rows, _failed(len(rows), _NotAsked(f"{self._name}: not asked, it kept failing")))
                    break
                answer, good = _failed(len(rows), None), None
                try:
                    if prepare is not None and not attempt:
                        await prepare()
                    answer, good = await self._attempt(pick(keys, rows), rows, ask, limit, leave)
                finally:
                    self._settle(ticket, good, answer)
                merge(results, rows, answer)
                rows = rows[np.equal(answer.status, Status.FAILED)]
                if not len(rows):
                    break
        return results

    async def _attempt(
        self, keys: Sequence[str], rows: Rows, ask: _Ask, limit: float, leave: bool
    ) -> tuple[Results, bool]:
        """The answer, and whether the store is well."""
        try:
            if leave:
                answer = await self._aside.run(lambda: ask(keys, rows, limit), limit + GRACE_S)
            else:
                answer = await self._in_place(ask(keys, rows, limit), limit + GRACE_S)
            if answer is None:
                self.counts["late"] += 1
                return Results.empty(len(keys), Status.TIMED_OUT), False
            if len(answer) != len(keys):
                raise StoreError(f"{self._name}: answered for {len(answer)} of {len(keys)} keys")
        except _NOT_THE_STORE:
            raise
        except Exception as error:
            answer = _failed(len(keys), error)
        good = answered(answer)
        self.counts["failed"] += not good
        return answer, good

    @staticmethod
    async def _in_place(answer: Awaitable[Results], until: float) -> Results | None:
        """In the caller's own task, until it has let go of the caller's memory; None: it was cut off."""
        with move_on_at(until):
            return await answer
        return None

    async def _pause(self, attempt: int, limit: float) -> bool:
        """Before a retry. False: there is no time for it."""
        until = anyio.current_time() + random.uniform(0, self._backoff_s * 2 ** (attempt - 1))
        if until >= limit:
            return False
        await anyio.sleep_until(until)
        self._life.check()
        self.counts["retry"] += 1
        return True

    def _settle(self, ticket: int, good: bool | None, answer: Results) -> None:
        now = anyio.current_time()
        self.breaker.settle(ticket, now, good)
        closed = self.breaker.state(now) == "closed"
        if good is False:
            why = next(map(reason, answer.errors.values()), "no answer in time")
            self._trouble.bad(now, "call", why, announce=not closed)
        elif good and closed and not self._trouble.well:
            self._trouble.good(now, "call")


def _failed(n: int, error: Exception | None) -> Results:
    results = Results.empty(n, Status.FAILED)
    if error is not None:
        results.errors[0] = error
    return results
