"""TieredStore: a near store, such as this host's memory, speeds up reads from a shared one.

Only the shared tier says what there is: ``exists`` asks it alone, a put is what it says, and so is a delete. A get
takes what the near tier has, the rest from the shared one, and leaves that in the near tier for the next time. The near
tier gets nothing that is not in the shared tier, so it can hold a value for longer, but never a newer one. That is
enough, because a key names its content: what is stored under it may be gone, but cannot be out of date.

The near tier is never a reason to fail: whatever goes wrong with it, or is not done within ``near_timeout_s``, is taken
from the shared tier, and a breaker leaves it alone while it keeps failing.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Self

import anyio
import numpy as np
from pydantic import BaseModel, Field

from kvpool.backends._breaker import Breaker
from kvpool.backends._wrapping import GRACE_S, Rows, answered, check_place, merge, pass_on_powers, pick, select
from kvpool.deadlines import move_on_at
from kvpool.errors import StoreClosed, StoreError
from kvpool.memory import Buffers
from kvpool.registry import URL, create_store
from kvpool.store import (
    Finding,
    Presence,
    Results,
    Status,
    Store,
    SupportsClear,
    SupportsDiagnosis,
    SupportsMissing,
    check_batch,
)
from kvpool.trouble import Trouble, reason

__all__ = ["TieredStore"]

logger = logging.getLogger(__name__)


class _Options(BaseModel):
    near: str = Field(description="the URL of the store that is asked first")
    shared: str = Field(description="the URL of the store that holds everything")
    near_timeout_s: float = Field(default=0.25, gt=0, allow_inf_nan=False, description="seconds above 0")


class TieredStore(Store):
    """Opens and closes both tiers; has the capabilities and powers of ``shared``.

    ``near_timeout_s``: the near tier gets no longer for its part of a call. ``counts``: keys that came from the near
    tier (``near_hits``) and the shared one (``shared_hits``), and calls of the near tier that failed (``near_failed``).
    """

    scheme: ClassVar[str] = "tiered"

    def __init__(self, near: Store, shared: Store, *, near_timeout_s: float = 0.25) -> None:
        self.near = near
        self.shared = shared
        self.counts: Counter[str] = Counter()
        self._near_timeout_s = near_timeout_s
        self._near_is_open = False
        self._breaker = Breaker()
        self._trouble = Trouble(logger, "near tier", "the shared tier serves alone while it is left alone")
        self._damage = Trouble(logger, "near tier", "such a value is taken from the shared tier", verb="damaged")
        self._removals = 0
        self._describe()

    @classmethod
    def from_url(cls, url: URL) -> Self:
        """``tiered://?near=URL&shared=URL[&near_timeout_s=0.25]``."""
        check_place(url)
        options = url.options(_Options)
        return cls(create_store(options.near), create_store(options.shared), near_timeout_s=options.near_timeout_s)

    async def __aenter__(self) -> Self:
        await self.shared.__aenter__()
        try:
            await self.near.__aenter__()
            self._near_is_open = True
        except BaseException as error:
            if not isinstance(error, StoreError) or isinstance(error, StoreClosed):
                await self.shared.__aexit__(None, None, None)
                raise
            logger.warning("near tier: %s; the shared tier is used alone", error)
        self._describe()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if self._near_is_open:
                self._near_is_open = False
                await self.near.__aexit__(exc_type, exc, tb)
        except StoreError as error:
            logger.warning("near tier: %s", error)
        finally:
            await self.shared.__aexit__(exc_type, exc, tb)

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        return await self.shared.exists(keys, deadline=deadline)

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, into)
        removals = self._removals
        near = await self._ask_near(lambda limit: self.near.get_into(keys, into, deadline=limit), len(keys), deadline)
        results = Results.empty(len(keys)) if near is None else near
        rows = np.flatnonzero(~results.ok)
        self.counts["near_hits"] += len(keys) - len(rows)
        if near is not None and not len(rows):
            return results
        spoilt = rows[results.status[rows] == Status.CORRUPT]
        if len(spoilt):
            why = reason(results.errors.get(int(spoilt[0])))
            self._damage.note(anyio.current_time(), "value", why, len(spoilt))
        got = await self.shared.get_into(pick(keys, rows), select(into, rows), deadline=deadline)
        merge(results, rows, got)
        found = rows[got.ok]
        self.counts["shared_hits"] += len(found)
        await self._forget(pick(keys, spoilt[results.ok[spoilt]]))
        await self._fill(keys, into, found, removals, deadline)
        return results

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, source)
        removals = self._removals
        try:
            results = await self.shared.put(keys, source, deadline=deadline)
        except BaseException:  # what it has stored, if anything, is not known
            await self._forget(keys)
            raise
        # What was just stored was not there before: a value that lies near is older than the shared tier's memory.
        await self._forget(pick(keys, np.flatnonzero(results.ok & (results.nbytes > 0))))
        # What was there before (0 bytes moved) may differ from the source, and comes with the first read.
        await self._fill(keys, source, np.flatnonzero(results.ok & (results.nbytes > 0)), removals, deadline)
        return results

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        try:
            return await self.shared.delete(keys, deadline=deadline)
        finally:
            self._removals += 1
            await self._forget(keys)

    async def _clear(self, prefix: str = "") -> int:
        """Clear both tiers; the number removed from the shared one."""
        assert isinstance(self.shared, SupportsClear)
        assert isinstance(self.near, SupportsClear)
        try:
            return await self.shared.clear(prefix)
        finally:
            self._removals += 1
            try:
                if self._near_is_open:
                    await self.near.clear(prefix)
            except StoreError as error:
                logger.warning("near tier: %s", error)

    async def diagnose(self) -> Sequence[Finding]:
        """What both tiers say about themselves."""
        findings: list[Finding] = []
        for tier, is_open in ((self.shared, True), (self.near, self._near_is_open)):
            if not is_open:
                findings.append(Finding("warn", "the near tier cannot be used; the shared tier is used alone"))
            elif isinstance(tier, SupportsDiagnosis):
                findings.extend(await tier.diagnose())
        return findings

    def missing(self) -> str:
        """What opening either tier would make."""
        tiers = (self.shared, self.near)
        return next((text for tier in tiers if isinstance(tier, SupportsMissing) and (text := tier.missing())), "")

    def _describe(self) -> None:
        """What the tiers can do is known for sure once they are open."""
        near, shared = self.near.capabilities, self.shared.capabilities
        unlimited = near.unlimited or shared.unlimited
        self.capabilities = replace(shared, zero_copy=False, loops=shared.loops & near.loops, unlimited=unlimited)
        pass_on_powers(self, self.shared)
        if isinstance(self, SupportsClear):
            if isinstance(self.near, SupportsClear):
                self.clear = self._clear
            else:
                del self.clear

    async def _fill(self, keys: Sequence[str], source: Buffers, rows: Rows, removals: int, deadline: float) -> None:
        """Leave values in the near tier. ``removals``: how many there had been when they were asked for."""
        keys, source = pick(keys, rows), select(source, rows)
        try:
            await self._ask_near(lambda limit: self.near.put(keys, source, deadline=limit), len(keys), deadline)
        finally:
            if self._removals != removals:  # perhaps of these keys, and too early to find them near
                await self._forget(keys)

    async def _forget(self, keys: Sequence[str]) -> None:
        """Remove from the near tier, even if the caller is cancelled meanwhile; it does not take long."""
        with anyio.CancelScope(shield=True):
            await self._ask_near(lambda limit: self.near.delete(keys, deadline=limit), len(keys), math.inf)

    async def _ask_near(self, call: Callable[[float], Awaitable[Results]], n: int, deadline: float) -> Results | None:
        """The near tier's answer for ``n`` keys; None: it has none."""
        now = anyio.current_time()
        limit = min(deadline, now + self._near_timeout_s)
        if not (self._near_is_open and n and now < limit):
            return None
        ticket = self._breaker.admit(now, limit + GRACE_S)
        if ticket is None:
            return None
        good: bool | None = None
        why = "no answer in time"
        try:
            with move_on_at(limit + GRACE_S):
                answer = await call(limit)
                if len(answer) != n:
                    raise StoreError(f"answered for {len(answer)} of {n} keys")
                good = answered(answer)
                why = next(map(reason, answer.errors.values()), why)
                return answer
            good = False
        except Exception as error:
            good, why = False, reason(error)
        finally:
            self.counts["near_failed"] += good is False
            now = anyio.current_time()
            self._breaker.settle(ticket, now, good)
            closed = self._breaker.state(now) == "closed"
            if good is False:
                self._trouble.bad(now, "call", why, announce=not closed)
            elif good and closed and not self._trouble.well:
                self._trouble.good(now, "call")
        return None
