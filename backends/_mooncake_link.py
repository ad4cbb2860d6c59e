"""The store's way to Mooncake: one client at a time, made when it can be and replaced when it hangs.

``new`` -> ``connecting`` -> ``ready`` -> (``connecting`` -> ``ready``)* -> ``closed``. Native calls are made only in
``ready``, on the client of the moment. One whose call does not come back is left alone for good, with its threads and
the memory that it may still touch, and the next one is made.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import anyio
import anyio.abc

from kvpool.backends._breaker import Breaker
from kvpool.backends._mooncake_client import Connected, close, connect, local_address, placement_advice, put_aside
from kvpool.backends._mooncake_codes import CLIENT_FAILED, TRANSFER_FAIL, Meaning, described, meaning_of
from kvpool.backends._mooncake_owners import Owners
from kvpool.backends._mooncake_threads import NativeCall, NativeThreads
from kvpool.backends._mooncake_url import Settings
from kvpool.deadlines import move_on_at
from kvpool.errors import ConfigError, StoreClosed, StoreError
from kvpool.memory import Region
from kvpool.staging import Lease, Staging
from kvpool.trouble import Trouble, reason

__all__ = ["Client", "Connect", "Link"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Makes a native client: settings, this machine's address.
Connect: TypeAlias = Callable[[Settings, str], Connected]
State = Literal["new", "connecting", "ready", "closed"]

PROBE_THREADS, TRIAL_THREADS = 2, 4
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # between two attempts to connect
CLOSE_S = 2.0  # for calls that were left behind to come back, before a client is given up
DOUBTS = 3  # failed probes in a row of a master that is alive: it is the client that is broken
PLACEMENT_BYTES = 64
FAILING_S, FORGET_S = 20.0, 10.0  # transfers that fail so long, without a pause of so long: the client is broken
MOST_HUNG = 8  # clients given up in one process; each keeps about 20 threads

_hung: list[Client] = []


class Client:
    """One native client and what its calls use. ``arena``: registered memory for values on their way.

    Threads for loads (``transfers``), ``puts``, calls to the master (``probes``) and ``trials`` of single owners, so
    that none of them waits for others that hang. ``owners``: what is known about those that do.
    """

    def __init__(self, connected: Connected, host: str, settings: Settings, name: str) -> None:
        self.native = connected.native
        self.config = connected.config
        self.connected = connected
        self.host = host
        self.arena = Staging(int(settings.options.buffer))
        self.transfers = NativeThreads(settings.options.threads, f"{name} load")
        self.puts = NativeThreads(settings.options.threads, f"{name} put")
        self.probes = NativeThreads(PROBE_THREADS, f"{name} probe")
        self.trials = NativeThreads(TRIAL_THREADS, f"{name} trial")
        self.owners = Owners()
        self._mute_at = -math.inf  # when one of them was last seen to be
        self._threads = self.transfers, self.puts, self.probes, self.trials
        self._spans: dict[tuple[int, int], list[Region]] = {}  # what is registered, and what keeps it alive
        self._covered: set[tuple[int, int]] = set()

    def register(self, regions: Sequence[Region]) -> None:
        """Let the client use this memory; in a thread. Raises StoreError.

        Mooncake takes no span that overlaps another: those that do, as the layers of one allocation, are one for it.
        """
        for span, owners in _merged(region for region in regions if not self.covers(region)):
            if code := self.native.register_buffer(*span):
                raise StoreError(f"{span[1]} bytes of memory could not be registered: {described(code)}")
            self._spans[span] = owners

    def unregister_all(self) -> list[int]:
        codes = [self.native.unregister_buffer(address) for address, _ in self._spans]
        self._spans.clear()
        self._covered.clear()
        return codes

    def covers(self, region: Region) -> bool:
        """Whether all of this memory is registered, by one span."""
        start, nbytes = key = region.address, region.nbytes
        if key in self._covered:
            return True
        found = not nbytes or any(a <= start and start + nbytes <= a + n for a, n in list(self._spans))
        if found:
            self._covered.add(key)
        return found

    @property
    def running(self) -> list[NativeCall[Any]]:
        return [call for threads in self._threads for call in threads.running]

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def oldest(self, now: float) -> float:
        """Seconds that the longest running call has been running; 0 if there is none. While an owner is mute, transfers
        hang with any client, so that their time counts from then on."""
        if self.owners.mute(now):
            self._mute_at = now
        transfers = max(threads.oldest() for threads in (self.transfers, self.puts, self.trials))
        return max(self.probes.oldest(), min(transfers, now - self._mute_at))

    def stop(self) -> None:
        for threads in self._threads:
            threads.stop()


class Link:
    """``name``: of the store, for messages. ``connect``: what tests replace."""

    def __init__(self, settings: Settings, name: str, connect: Connect = connect) -> None:
        self.settings = settings
        self.state: State = "new"
        self.trouble = "there was no time to connect yet"
        self.regions: list[Region] = []  # to be registered with every client
        self.breaker = _breaker()
        self.replaced = 0  #: clients given up
        self._name = name
        self._connect = connect
        self._client: Client | None = None
        self._pid = os.getpid()
        self._doubts = 0
        self._failing_since = self._failed_at = -math.inf  # of transfers
        self._changed = anyio.Event()
        self.advice: list[str] = []  #: what Mooncake makes of the settings, if that is not what they say
        self._said: set[str] = set()
        self._connecting = Trouble(logger, name, "values are computed until it can be used")
        self._calling = Trouble(logger, name, "it is left alone for a while", level=logging.INFO)  # the pool warns

    # ---- life

    async def open(self, tasks: anyio.abc.TaskGroup) -> None:
        """Connect, or go on trying in ``tasks``. Raises ConfigError if Mooncake cannot be used here at all."""
        self._pid = os.getpid()
        self.state = "connecting"
        try:
            await self._attempt()
        except StoreError as error:
            self._connecting.bad(anyio.current_time(), "connection", reason(error))
        tasks.start_soon(self._keep)

    async def close(self) -> None:
        """Give the client back. One whose calls do not come back is left as it is, with their memory."""
        client, self._client, self.state = self._client, None, "closed"
        if client is None:
            return
        with anyio.CancelScope(shield=True):
            with move_on_at(anyio.current_time() + CLOSE_S):
                for call in client.running:
                    await call.ended.wait()
            await self._dispose(client, again=True)

    async def _keep(self) -> None:
        """Connect when there is no client; give up one that hangs."""
        pause = FIRST_PAUSE_S
        while True:
            if self._client is None:
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                try:
                    await self._attempt()
                except Exception as error:
                    self._connecting.bad(anyio.current_time(), "connection", reason(error))
                else:
                    self._connecting.good(anyio.current_time(), "connection")
            else:
                pause = FIRST_PAUSE_S if not self.replaced else min(2.0**self.replaced, LONGEST_PAUSE_S)
                limit = self.settings.options.hang_s
                with move_on_at(anyio.current_time() + min(1.0, limit / 4)):
                    await self._changed.wait()
                client = self._client
                if client is not None and client.oldest(anyio.current_time()) > limit:
                    self._replace(client, f"a call has not come back for {limit:g} s")

    async def _attempt(self) -> None:
        """One attempt to connect. Raises StoreError, or ConfigError if Mooncake is not installed."""
        try:
            if len(_hung) >= MOST_HUNG and not await self._close_one():
                raise StoreError(f"{MOST_HUNG} clients of this process hang; it must be restarted to use Mooncake")
            limit = anyio.current_time() + self.settings.options.timeout_s
            host = await local_address(self.settings, limit)
            # The memory that a client lends stays with it, also when it has been given up.
            settings = self.settings.without_segment() if self.replaced else self.settings
            connected = await self._in_thread(partial(self._connect, settings, host))
            client = Client(connected, host, self.settings, self._name)
            try:
                await self._prepare(client)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._dispose(client)
                raise
        except ConfigError:
            raise
        except Exception as error:  # the native client's own are none of kvpool's
            self.trouble = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            raise StoreError(self.trouble) from error
        self.breaker = _breaker()
        self._doubts = 0
        self._failed_at = -math.inf
        self._client, self.state = client, "ready"

    async def _dispose(self, client: Client, *, again: bool = False) -> None:
        """Put a client aside for the next store (``again``), close it, or leave it if it has calls under way."""
        if client.busy:
            self._leave(client)
            return
        await self._in_thread(client.unregister_all)
        unwanted = put_aside(client.connected, self.settings, client.host) if again else client.connected
        if unwanted is not None:
            await self._in_thread(partial(close, unwanted))
        client.stop()
        client.arena.close()

    async def _close_one(self) -> bool:
        """Close a client that was given up and whose calls have all come back since; False if there is none.

        Only when there are very many: closing stops the whole process for about a second.
        """
        done = next((client for client in _hung if not client.busy), None)
        if done is None:
            return False
        _hung.remove(done)
        await self._in_thread(partial(close, done.connected))
        return True

    async def _in_thread(self, fn: Callable[[], T]) -> T:
        """One call that is waited for, in a thread that ends with it."""
        threads = NativeThreads(1, f"{self._name} setup")
        call = await threads.start(fn)
        threads.stop()
        await call.wait_through()
        return call.result()

    async def _prepare(self, client: Client) -> None:
        """Register memory, and see what Mooncake makes of the settings."""
        lease = await client.arena.acquire(PLACEMENT_BYTES)
        advice = list(client.connected.advice)

        def prepare() -> list[int]:
            client.register([lease.region])
            try:
                client.register(self.regions)
            except StoreError as error:
                advice.append(f"{error}; values in it are copied once more")
            key = f"{self.settings.options.prefix}placement/{os.urandom(8).hex()}"
            advice.extend(placement_advice(client.native, client.config, self.settings, key, _address(lease)))
            return []

        call = await client.probes.start(prepare, lease.release)
        if not await call.wait(anyio.current_time() + self.settings.options.timeout_s):
            raise StoreError("the first call of a new client did not come back in time")
        call.result()
        self.advice = advice
        for text in advice:
            self._say(text)

    def _replace(self, client: Client, reason: str) -> None:
        if client is self._client:
            self._client, self.state, self.trouble = None, "connecting", reason
            self.replaced += 1
            logger.warning("%s: %s; its client is given up and a new one made", self._name, reason)
            self._leave(client)
            self._changed.set()
            self._changed = anyio.Event()

    @staticmethod
    def _leave(client: Client) -> None:
        """Leave a client alone for good: it cannot be closed, for its calls would meet freed memory."""
        client.stop()
        _hung.append(client)

    # ---- use

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the store: it has the clients, but not their threads."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises StoreClosed in a forked child."""
        if self.forked:
            raise StoreClosed(f"{self._name} was opened by the parent of this process; a forked child cannot use it")

    @property
    def current(self) -> Client | None:
        """The client of the moment, if there is one."""
        return self._client

    def client(self) -> Client:
        """The client of the moment. Raises StoreError if there is none."""
        if self._client is None:
            raise StoreError(f"{self._name}: {self.trouble}")
        return self._client

    async def register(self, regions: Sequence[Region]) -> None:
        """Have this memory registered with this client, if there is one, and those to come. Raises StoreError."""
        client = self._client
        if client is None:
            self.regions += regions
            return

        def register() -> list[int]:
            client.register(regions)
            return []

        call = await client.probes.start(register)
        await call.wait_through()
        call.result()
        self.regions += regions

    async def ask(
        self,
        client: Client,
        threads: NativeThreads,
        fn: Callable[[], list[int]],
        n: int,
        deadline: float,
        lease: Lease | None = None,
        *,
        through: bool = False,
    ) -> list[int] | None:
        """The codes that ``fn`` gives for ``n`` keys, from a thread; None if it was late.

        If codes are returned, ``lease`` is the caller's again; in every other case the last of both, call and caller,
        has released it or will. ``through``: the call uses the caller's memory, so it is waited for whatever happens.
        A transfer that is late says nothing about the master: it may be an owner that does not answer.
        Raises StoreError if the store is not to be asked now.
        """
        left = False

        def then() -> None:
            if left and lease is not None:
                lease.release()

        good: bool | None = None
        call = None
        returned = False
        try:
            ticket = await self._admitted(deadline)
            try:
                with move_on_at(deadline):
                    call = await threads.start(fn, then)
                if call is None:
                    return None
                try:
                    await call.wait(deadline)
                finally:
                    if not call.ended.is_set():
                        threads.leave(call)
                        if through:
                            await call.wait_through()
                if not call.ended.is_set():
                    good = False if threads is client.probes else None
                    return None
                try:
                    codes = call.result()
                except Exception as error:
                    good = False
                    raise StoreError(f"{self._name}: {type(error).__name__}: {error}") from error
                if len(codes) != n:
                    codes = [CLIENT_FAILED] * n
                good = not n or any(c != CLIENT_FAILED and meaning_of(c) is not Meaning.UNREACHABLE for c in codes)
                returned = True
                self._watch(client, codes)
                return codes
            finally:
                self._settle(client, ticket, good)
        finally:
            if call is not None and not call.ended.is_set():
                left = True
            elif not returned and lease is not None:
                lease.release()

    async def _admitted(self, deadline: float) -> int:
        """The breaker's ticket. Before a probe the master is asked for a sign of life, which costs no thread."""
        now = anyio.current_time()
        probe = self.breaker.state(now) == "half-open"
        ticket = self.breaker.admit(now, now + self.settings.options.hang_s)
        if ticket is None:
            raise StoreError(f"{self._name}: not asked, it kept failing")
        if probe:
            try:
                await local_address(self.settings, min(deadline, now + self.settings.options.timeout_s))
            except BaseException as error:
                self.breaker.settle(ticket, anyio.current_time(), False if isinstance(error, StoreError) else None)
                raise
        return ticket

    def _settle(self, client: Client, ticket: int, good: bool | None) -> None:
        now = anyio.current_time()
        before = self.breaker.state(now)
        self.breaker.settle(ticket, now, good)
        after = self.breaker.state(now)
        if good:
            self._doubts = 0
            if after == "closed" and not self._calling.well:
                self._calling.good(now, "call")
        elif good is False:
            self._calling.bad(now, "call", "its client cannot do its work", announce=after != "closed")
            if before == "half-open":
                self._doubts += 1  # the master gave a sign of life just now
                if self._doubts >= DOUBTS:
                    self._replace(client, "its calls fail though the master answers")

    def _watch(self, client: Client, codes: Sequence[int]) -> None:
        """Give up a client whose transfers go on failing for longer than a master takes to forget a dead owner.

        An owner that was started again under the same name is looked for at its port of before, for ever.
        """
        now = anyio.current_time()
        if TRANSFER_FAIL not in codes or client.owners.mute(now):
            return
        if now - self._failed_at > FORGET_S:
            self._failing_since = now
        self._failed_at = now
        if now - self._failing_since > FAILING_S and len(_hung) < MOST_HUNG // 2:
            self._replace(client, f"transfers have been failing for {FAILING_S:g} s")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s: %s", self._name, text)


def _merged(regions: Iterable[Region]) -> list[tuple[tuple[int, int], list[Region]]]:
    """Spans (address, bytes) that do not overlap, by address, and the regions that lie in each."""
    merged: list[tuple[tuple[int, int], list[Region]]] = []
    for region in sorted((r for r in regions if r.nbytes), key=lambda r: r.address):
        end = region.address + region.nbytes
        if merged and region.address < sum(merged[-1][0]):
            (start, nbytes), owners = merged.pop()
            merged.append(((start, max(start + nbytes, end) - start), [*owners, region]))
        else:
            merged.append(((region.address, region.nbytes), [region]))
    return merged


def _breaker() -> Breaker:
    return Breaker(failures=3, cooldown_s=0.5, max_cooldown_s=8.0)


def _address(lease: Lease) -> int:
    return lease.region.address + lease.offset
