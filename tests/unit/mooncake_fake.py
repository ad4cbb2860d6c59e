"""A Mooncake cluster in this process, with what was measured on the real one, its traps included.

What would crash the process, write into memory at random or read torn bytes is noted in ``Cluster.crimes`` instead: bad
pointers, calls after close, close during a call, one key twice in a get, removal by force.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from kvpool.backends._mooncake_client import Connected
from kvpool.backends._mooncake_url import Settings

__all__ = ["Cluster", "FakeNative"]


class Cluster:
    """Values by name, leases, room; and a port that gives a sign of life, as a master does. A context manager."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.leases: dict[str, float] = {}
        self.lease_s = 0.1
        self.room: float = float("inf")  # bytes
        self.answer: dict[str, list[int]] = {}  # codes that the next calls of a method give for all keys
        self.empty = False  # answers of a client that is not initialised
        self.crimes: list[str] = []
        self.calls: Counter[str] = Counter()
        self.batches: list[tuple[str, list[str], list[list[int]]]] = []  # method, names, sizes
        self.natives: list[FakeNative] = []
        self.go_on = threading.Event()  # transfers wait for it
        self.go_on.set()
        self.setups: list[Settings] = []
        self.alive = True  # the master gives signs of life
        self.pings = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()
        self.places: dict[str, str] = {}  # of values: the owner, if there are any
        self.owners: list[str] = []
        self.mute: set[str] = set()  # owners that give no sign of life
        self.failing: set[str] = set()  # owners whose transfers fail
        self._owners: list[socket.socket] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.go_on.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for listener in self._owners:
            listener.shutdown(socket.SHUT_RDWR)
        for connection in (*self._open, *self._owners):
            connection.close()
        assert not self.crimes, self.crimes

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self._listener.getsockname()[1]}"

    def add_owner(self) -> str:
        """One that keeps values from now on, in turn with the others."""
        listener = socket.create_server(("127.0.0.1", 0))
        owner = f"127.0.0.1:{listener.getsockname()[1]}"
        self._owners.append(listener)
        self.owners.append(owner)
        threading.Thread(target=self._answer, args=(listener, owner), daemon=True).start()
        return owner

    def _answer(self, listener: socket.socket, owner: str) -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            self._open.append(connection)
            if owner not in self.mute:
                with suppress(OSError):
                    connection.recv(100)
                    connection.sendall(bytes(9))

    def connect(self, settings: Settings, host: str) -> Connected:
        self.setups.append(settings)
        if not self.alive:
            self.crimes.append("set up without a master: the process stands still")
        native = FakeNative(self)
        self.natives.append(native)
        return Connected(native, "config")

    def codes(self, method: str, n: int) -> list[int] | None:
        """What a call is to answer, if not what it would."""
        self.calls[method] += 1
        if self.empty:
            return []
        planned = self.answer.get(method)
        return [planned.pop(0)] * n if planned else None

    def touch(self, name: str) -> None:
        self.leases[name] = time.monotonic() + self.lease_s

    def leased(self, name: str) -> bool:
        return self.leases.get(name, 0.0) > time.monotonic()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Transfers do not come back meanwhile."""
        self.go_on.clear()
        try:
            yield
        finally:
            self.go_on.set()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            self._open.append(connection)
            self.pings += 1
            if self.alive:
                connection.recv(100)
                connection.sendall(b"\x15" + bytes(19))


class FakeNative:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.closed = False
        self.inside = 0
        self.spans: dict[int, int] = {}

    # ---- what a store calls

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        with self._call():
            if (codes := self._cluster.codes("exist", len(keys))) is not None:
                return codes
            for key in keys:
                self._cluster.touch(key)
            return [int(key in self._cluster.values) for key in keys]

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], config: Any, /
    ) -> list[int]:
        with self._call():
            self._look("put", keys, pointers, sizes)
            if (codes := self._cluster.codes("put", len(keys))) is not None:
                return codes
            self._cluster.go_on.wait()
            return [self._put(*one) for one in zip(keys, pointers, sizes, strict=True)]

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], /
    ) -> list[int]:
        with self._call():
            self._look("get", keys, pointers, sizes)
            if (codes := self._cluster.codes("get", len(keys))) is not None:
                return codes
            self._cluster.go_on.wait()
            if len(set(keys)) < len(keys):
                self._cluster.crimes.append("a key twice in a get: one destination is never written")
            return [self._get(*one) for one in zip(keys, pointers, sizes, strict=True)]

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        with self._call():
            self._cluster.calls["describe"] += 1
            return {key: [_replica(self._cluster, key)] for key in keys if key in self._cluster.places}

    def get_size(self, key: str) -> int:
        with self._call():
            return len(self._cluster.values[key]) if key in self._cluster.values else -704

    def remove(self, key: str, force: bool, /) -> int:
        with self._call():
            if force:
                self._cluster.crimes.append("removed by force: whoever reads it gets torn bytes")
            if (codes := self._cluster.codes("remove", 1)) is not None:
                return codes[0]
            if key not in self._cluster.values:
                return -704
            if self._cluster.leased(key):
                return -706
            del self._cluster.values[key]
            return 0

    def register_buffer(self, pointer: int, nbytes: int, /) -> int:
        with self._call():
            if any(pointer < start + n and start < pointer + nbytes for start, n in self.spans.items()):
                return -600
            self.spans[pointer] = nbytes
            return 0

    def unregister_buffer(self, pointer: int, /) -> int:
        with self._call():
            return 0 if self.spans.pop(pointer, None) else -600

    def close(self) -> int:
        if self.inside:
            self._cluster.crimes.append("closed during a call: SIGSEGV")
        self.closed = True
        return 0

    # ---- how it is done

    @contextmanager
    def _call(self) -> Iterator[None]:
        if self.closed:
            self._cluster.crimes.append("called after close: SIGSEGV")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def _look(self, what: str, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> None:
        self._cluster.batches.append((what, keys, sizes))
        if not len(keys) == len(pointers) == len(sizes):
            self._cluster.crimes.append("lists of different lengths")
        for addresses, lengths in zip(pointers, sizes, strict=True):
            if len(addresses) != len(lengths):
                self._cluster.crimes.append("not one size a pointer")
            for address, n in zip(addresses, lengths, strict=True):
                if not any(start <= address and address + n <= start + room for start, room in self.spans.items()):
                    self._cluster.crimes.append("a pointer outside registered memory")

    def _put(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        cluster = self._cluster
        if not sum(sizes):
            return -600
        if key in cluster.values:
            return 0  # and the old value stays
        if sum(map(len, cluster.values.values())) + sum(sizes) > cluster.room:
            return -200
        if cluster.owners:
            owner = cluster.owners[len(cluster.places) % len(cluster.owners)]
            if owner in cluster.failing:
                return -800
            cluster.places[key] = owner
        cluster.values[key] = b"".join(ctypes.string_at(a, n) for a, n in zip(addresses, sizes, strict=True))
        return 0

    def _get(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        value = self._cluster.values.get(key)
        if value is None:
            return -704
        self._cluster.touch(key)
        if self._cluster.places.get(key) in self._cluster.failing:
            return -800
        if sum(sizes) != len(value):
            return -600 if sum(sizes) < len(value) else -800
        at = 0
        for address, n in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, value[at : at + n], n)
            at += n
        return len(value)


def _replica(cluster: Cluster, key: str) -> Any:
    """As far as a store looks at it."""
    place = SimpleNamespace(transport_endpoint=cluster.places[key], size=len(cluster.values[key]))
    return SimpleNamespace(
        status=SimpleNamespace(name="COMPLETE"),
        is_memory_replica=lambda: True,
        get_memory_descriptor=lambda: SimpleNamespace(buffer_descriptor=place),
    )
