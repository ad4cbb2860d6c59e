"""Which server holds a key, and connections to it: one server, the one that Sentinels name, or a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from kvpool.backends._redis_link import Address, ConnectionLost
from kvpool.backends._redis_wire import Access, Connection, Reply, ServerError, command
from kvpool.threads import Threads

__all__ = ["Cluster", "OneServer", "Pool", "Servers", "slot_of", "through_sentinels"]

SLOTS = 16384
_WINDOW = 1024  # keys sorted by server between two turns of the loop


class Pool:
    """Connections to one server, at most ``size``, of which transfers leave one to calls that move no values."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], size: int) -> None:
        self.threads = Threads(size)  #: for calls that wait on one of the connections
        self._connect = connect
        self._all = anyio.Semaphore(size, fast_acquire=True)
        self._transfers = anyio.Semaphore(size - 1, fast_acquire=True)
        self._idle: list[Connection] = []
        self._age = 0
        self._retired = False

    @asynccontextmanager
    async def connection(self, *, transfer: bool = False) -> AsyncIterator[Connection]:
        """A connection that is idle. Raises ConnectionLost or ServerError if there is none to be had."""
        if transfer:
            async with self._transfers, self.connection() as connection:
                yield connection
            return
        async with self._all:
            age = self._age
            connection = self._take() or await self._connect()
            try:
                yield connection
            finally:
                if connection.idle and age == self._age and not self._retired:
                    self._idle.append(connection)
                else:
                    connection.close()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.fresh():
                return connection
            connection.close()
        return None

    def close(self) -> None:
        """Hang up; connections in use go when they are given back. New ones may be made."""
        self._age += 1
        while self._idle:
            self._idle.pop().close()

    def retire(self) -> None:
        """Hang up, and keep no connection from now on."""
        self._retired = True
        self.close()


class Servers(ABC):
    """Where values are. Methods that wait raise ConnectionLost or ServerError."""

    @abstractmethod
    async def split(self, wanted: Sequence[int], name_of: Callable[[int], bytes]) -> list[tuple[Pool, Sequence[int]]]:
        """Which server has which of the ``wanted`` keys (indices)."""

    @abstractmethod
    async def pools(self) -> list[Pool]:
        """Every server that holds values."""

    @abstractmethod
    def distrust(self, pool: Pool) -> None:
        """This server failed, or is no longer the one to ask: connect anew, look again who is."""

    def moved(self, pool: Pool, error: ServerError) -> bool:
        """This server sends a key elsewhere (MOVED). Whether asking again makes sense."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Hang up."""


class OneServer(Servers):
    """All values are on one server."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def split(self, wanted: Sequence[int], name_of: Callable[[int], bytes]) -> list[tuple[Pool, Sequence[int]]]:
        return [(self._pool, wanted)]

    async def pools(self) -> list[Pool]:
        return [self._pool]

    def distrust(self, pool: Pool) -> None:
        pool.close()

    def close(self) -> None:
        self._pool.close()


def through_sentinels(
    sentinels: Sequence[Address], service: str, sentinel_access: Access, access: Access
) -> Callable[[], Awaitable[Connection]]:
    """Connects to the master that the first Sentinel which answers names; they are asked for each connection."""

    order = list(sentinels)

    async def connect() -> Connection:
        failures = []
        for sentinel in list(order):
            try:
                master = await _ask_once(sentinel, sentinel_access, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
            except (ConnectionLost, ServerError) as error:
                failures.append(f"{sentinel}: {error}")
                order.remove(sentinel)
                order.append(sentinel)
                continue
            match master:
                case [bytes(host), bytes(port)]:
                    return await _open_master(Address(host.decode(), int(port)), access)
            failures.append(f"{sentinel}: knows no {service!r}")
        raise ConnectionLost("no Sentinel names the master: " + "; ".join(failures))

    return connect


async def _open_master(address: Address, access: Access) -> Connection:
    """Just after a failover, Sentinels may still name a server that has become a replica."""
    connection = await Connection.open(address, access)
    try:
        (role,) = await connection.ask(command("ROLE"))
        if isinstance(role, ServerError):
            raise role
        if not (isinstance(role, list) and role[:1] == [b"master"]):
            raise ConnectionLost(f"{address}, which the Sentinels name, is not a master now")
    except BaseException:
        connection.close()
        raise
    return connection


async def _ask_once(address: Address, access: Access, *words: str) -> Reply:
    connection = await Connection.open(address, access)
    try:
        (reply,) = await connection.ask(command(*words))
    finally:
        connection.close()
    if isinstance(reply, ServerError):
        raise reply
    return reply


class Cluster(Servers):
    """Each key is on the server that owns its slot. The table of slots is asked for when it is first needed, and again
    after a server has failed or sent a key elsewhere."""

    def __init__(self, seeds: Sequence[Address], access: Access, size: int) -> None:
        self._access = access
        self._size = size
        self._seeds = frozenset(seeds)
        self._pools: dict[Address, Pool] = {}  # in the order in which they are asked
        for address in seeds:
            self._pool(address)
        self._owners: list[Pool] = []  # by slot; empty: not known
        self._lock = anyio.Lock()

    async def split(self, wanted: Sequence[int], name_of: Callable[[int], bytes]) -> list[tuple[Pool, Sequence[int]]]:
        owners = await self._table()
        parts: dict[Pool, list[int]] = {}
        for start in range(0, len(wanted), _WINDOW):
            for i in wanted[start : start + _WINDOW]:
                parts.setdefault(owners[slot_of(name_of(i))], []).append(i)
            await anyio.lowlevel.checkpoint()
        return list(parts.items())

    async def pools(self) -> list[Pool]:
        return list(dict.fromkeys(await self._table()))

    def distrust(self, pool: Pool) -> None:
        pool.close()
        self._owners = []
        for address in [address for address, known in self._pools.items() if known is pool]:
            self._pools[address] = self._pools.pop(address)  # to the end

    def moved(self, pool: Pool, error: ServerError) -> bool:
        self._owners = []
        host, _, port = str(error).split()[-1].rpartition(":")  # MOVED slot host:port
        asked = next((address.host for address, known in self._pools.items() if known is pool), "")
        address = Address(host.strip("[]") or asked, int(port) if port.isdigit() else 0)
        self._pools = {address: self._pool(address), **self._pools}  # it knows best: ask it first
        return True

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _pool(self, address: Address) -> Pool:
        if address not in self._pools:
            self._pools[address] = Pool(lambda: Connection.open(address, self._access), self._size)
        return self._pools[address]

    async def _table(self) -> list[Pool]:
        async with self._lock:
            if self._owners:
                return self._owners
            failures = []
            for address, pool in list(self._pools.items()):
                try:
                    async with pool.connection() as connection:
                        (reply,) = await connection.ask(command("CLUSTER", "SLOTS"))
                    if isinstance(reply, ServerError):
                        raise reply
                    self._owners = self._read(reply, address)
                    return self._owners
                except (ConnectionLost, ServerError) as error:
                    failures.append(f"{address}: {error}")
            raise ConnectionLost("no server of the cluster tells who has what: " + "; ".join(failures))

    def _read(self, reply: Reply, asked: Address) -> list[Pool]:
        """The owner of each slot by a reply to CLUSTER SLOTS. A server that does not know its own name is the one that
        was asked; it also gets the slots that nobody has, and says so."""
        owners = [self._pool(asked)] * SLOTS
        for entry in reply if isinstance(reply, list) else ():
            match entry:
                case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                    name = host.decode() if isinstance(host, bytes) and host not in (b"", b"?") else asked.host
                    owners[first : last + 1] = [self._pool(Address(name, port))] * (last + 1 - first)
                case _:
                    raise ConnectionLost(f"CLUSTER SLOTS answered {entry!r}")
        used = set(owners)
        for address in [a for a, pool in self._pools.items() if pool not in used and a not in self._seeds]:
            self._pools.pop(address).retire()
        return owners


def slot_of(name: bytes) -> int:
    """The cluster slot of a name, as the Redis cluster specification defines it: CRC-16 (XMODEM) modulo 16384 of the
    text between the first { and the next }, or of the whole name if there is none."""
    if (start := name.find(b"{")) >= 0 and (end := name.find(b"}", start)) > start + 1:
        name = name[start + 1 : end]
    return crc_hqx(name, 0) % SLOTS
