"""What a worker runs on its event loop: a pool on its store, and a server for lookups. Each opens again if it fails.

A store that is down when the engine starts, or an address that is taken, costs hits and nothing else: the engine
serves, and the pool comes in as soon as it can be opened.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from kvpool.errors import StoreError
from kvpool.pool import KVPool
from kvpool.trouble import Trouble, reason
from kvpool.vllm.health import MAX_PROBE_S, Health

__all__ = ["Service"]

logger = logging.getLogger(__name__)

STORE, SERVER = "the store", "the lookup server"
#: Opening may take this long; then it is given up and tried again.
OPEN_TIMEOUT_S = 30.0
#: Before the second try; twice as long with each failure, up to the other.
RETRY_S, MAX_RETRY_S = 0.25, 30.0


class Service:
    """``open_pool`` makes a new pool for each try. ``serve`` answers lookups while its context lasts, or None.

    ``health`` is told whether the pool opens, and made well again by probes.
    """

    def __init__(
        self,
        open_pool: Callable[[], AbstractAsyncContextManager[KVPool]],
        serve: Callable[[], AbstractAsyncContextManager[None]] | None = None,
        health: Health | None = None,
    ) -> None:
        self._open_pool = open_pool
        self._serve = serve
        self._health = health or Health()
        self._pool: KVPool | None = None
        self._tried = anyio.Event()
        self._failures: dict[str, str] = {}
        self._stop = anyio.Event()
        self._opening: set[anyio.CancelScope] = set()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Service]:
        """The service's life. What is open when it ends is closed in peace, what is being opened is cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep, STORE, self._hold_pool)
            if self._serve is not None:
                tasks.start_soon(self._keep, SERVER, self._serve)
            probing = anyio.CancelScope()
            tasks.start_soon(self._probe, probing)
            yield self
            self._stop.set()
            probing.cancel()
            for scope in self._opening:
                scope.cancel()

    @property
    def is_open(self) -> bool:
        """Whether there is a pool now."""
        return self._pool is not None

    async def pool(self) -> KVPool:
        """The open pool; waits for the first try. Raises StoreError while it is not open after that."""
        try:
            await self._tried.wait()
        except BaseException:  # a job has waited in vain for a store that hangs as it opens
            self._health.failed()
            raise
        if self._pool is None:
            raise StoreError(f"the store is not open: {self._failures.get(STORE, 'it has been closed')}")
        return self._pool

    @asynccontextmanager
    async def _hold_pool(self) -> AsyncIterator[None]:
        async with self._open_pool() as self._pool:
            self._tried.set()
            self._health.answered()
            try:
                yield
            finally:
                self._pool = None

    async def _probe(self, scope: anyio.CancelScope) -> None:
        """While the store is held to be away, ask it whether it answers; what does not open answers by opening."""
        with scope:
            while True:
                await self._health.doubted.wait()
                probes = 0
                while not self._health.serves:
                    await anyio.sleep(self._health.delay(probes))
                    probes += 1
                    if await self._answers():
                        self._health.answered()

    async def _answers(self) -> bool:
        pool = self._pool
        try:
            return (
                pool is not None
                and await pool.answers(deadline=anyio.current_time() + MAX_PROBE_S)
                and pool is self._pool
            )
        except Exception:  # it has just been closed
            return False

    async def _keep(self, what: str, open_it: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Hold it open until the service ends; after a failure open it again."""
        delay = RETRY_S
        trouble = Trouble(logger, f"kvpool: {what}", "it is tried again, and the engine goes on without it")
        while not self._stop.is_set():
            failure = f"it did not open within {OPEN_TIMEOUT_S:g} s"
            with anyio.CancelScope(deadline=anyio.current_time() + OPEN_TIMEOUT_S) as opening:
                self._opening.add(opening)
                try:
                    async with open_it():
                        self._opening.discard(opening)
                        opening.deadline = math.inf
                        if self._failures.pop(what, None):
                            trouble.good(anyio.current_time(), "opening")
                        delay = RETRY_S
                        await self._stop.wait()
                except Exception as error:
                    failure = reason(error)
                finally:
                    self._opening.discard(opening)
            if self._stop.is_set():
                return
            trouble.bad(anyio.current_time(), "opening", failure)
            self._failures[what] = failure
            if what is STORE:
                self._health.failed()
                self._tried.set()
            with anyio.move_on_after(delay):
                await self._stop.wait()
            delay = min(2 * delay, MAX_RETRY_S)
