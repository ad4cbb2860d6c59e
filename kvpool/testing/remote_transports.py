"""The contract of a :class:`kvpool.transport.LookupTransport` between processes: servers die, freeze and come back.

Subclass one class, as for :mod:`kvpool.testing.transports`, whose tests it contains.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvpool.errors import LookupTimeout, TransportError
from kvpool.registry import create_transport
from kvpool.testing._lookups import (
    CLOSE_S,
    HANG_S,
    AsyncFace,
    Face,
    Handler,
    Outcome,
    PolledFace,
    ServerProcess,
    assert_answered,
    lookup,
    poll_all,
    until_answered,
)
from kvpool.testing.transports import TransportConformance
from kvpool.transport import LookupRequest, LookupResult

__all__ = ["RemoteTransportConformance"]


class _Both:
    """Several clients that ask the same."""

    def __init__(self, *clients: Face) -> None:
        self.clients = clients

    async def ask(self, *requests: LookupRequest, seconds: float = HANG_S / 2) -> list[Outcome]:
        """The outcomes of the first client, then those of the second; they ask side by side."""
        outcomes: dict[int, list[Outcome]] = {}

        async def one(i: int, client: Face) -> None:
            outcomes[i] = await client.ask(*requests, seconds=seconds)

        async with anyio.create_task_group() as tasks:
            for i, client in enumerate(self.clients):
                tasks.start_soon(one, i, client)
        return [outcome for i in range(len(self.clients)) for outcome in outcomes[i]]

    async def until_answered(self) -> None:
        for client in self.clients:
            await until_answered(client)

    async def assert_server_has_answered(self, n: int) -> None:
        for outcome in await self.ask(lookup(do="count")):
            assert isinstance(outcome, LookupResult)
            assert outcome.hit_length == n


class RemoteTransportConformance(TransportConformance):
    """Subclass it for a transport between processes. The server's process finds the URL's module on ``sys.path``."""

    @asynccontextmanager
    async def _server(self, url: str, loop: str) -> AsyncIterator[ServerProcess]:
        server = await anyio.to_thread.run_sync(ServerProcess, url, loop)
        with server:
            yield server

    @asynccontextmanager
    async def _both(self, url: str) -> AsyncIterator[_Both]:
        """A client of each face: starting servers takes long, so they share one."""
        transport = create_transport(url)
        async with AsyncFace(transport) as one, PolledFace(transport) as other:
            yield _Both(one, other)

    async def test_a_server_that_is_killed_and_comes_back(self, anyio_backend: str) -> None:
        url = self.url()
        async with self._both(url) as clients:
            for _ in range(2):
                async with self._server(url, anyio_backend) as server:
                    await clients.until_answered()
                    assert_answered(await clients.ask(lookup(), lookup(5)), *[lookup(), lookup(5)] * 2)
                    outcomes: list[Outcome] = []

                    async def ask(into: list[Outcome]) -> None:
                        into += await clients.ask(*(lookup(do="hang", seed=i) for i in range(20)), seconds=0.5)

                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(ask, outcomes)
                        await anyio.sleep(0.1)
                        server.kill()
                    assert len(outcomes) == 40
                    assert all(isinstance(o, TransportError) for o in outcomes)

    async def test_a_restarted_server_never_sees_old_requests(self, anyio_backend: str) -> None:
        url = self.url()
        async with self._both(url) as clients:
            async with self._server(url, anyio_backend):
                await clients.until_answered()
            outcomes = await clients.ask(*(lookup(seed=i) for i in range(20)), seconds=0.1)
            assert all(isinstance(o, TransportError) for o in outcomes)
            async with self._server(url, anyio_backend):
                await clients.until_answered()
                await clients.assert_server_has_answered(0)

    async def test_a_frozen_server_drops_what_has_run_out(self, anyio_backend: str) -> None:
        """Frozen, lookups run out of time; thawed, the server handles none of those, and goes on."""
        url = self.url()
        async with self._server(url, anyio_backend) as server, self._both(url) as clients:
            await clients.until_answered()
            server.signal(signal.SIGSTOP)
            for _ in range(2):
                outcomes = await clients.ask(*[lookup(200)] * 20, seconds=0.15)
                assert {type(o) for o in outcomes} == {LookupTimeout}
            server.signal(signal.SIGCONT)
            await clients.until_answered()
            await clients.assert_server_has_answered(0)
            assert_answered(await clients.ask(lookup()), lookup(), lookup())

    async def test_a_busy_server_outlives_clients_that_vanish(self, anyio_backend: str) -> None:
        """All its handlers hang, its queues are full, and the connections that filled them break."""
        url = self.url()
        transport = create_transport(url)

        async def flood(client: PolledFace, seconds: float) -> None:
            request = lookup(500, "hang")
            for _ in range(10):  # a few at a time, so that they get out
                await client.run(lambda: [client.client.submit(request, timeout=seconds) for _ in range(30)])
                await client.run(lambda: client.client.poll(wait=0.01))

        async with self._server(url, anyio_backend) as server:
            async with PolledFace(transport) as holder:
                await until_answered(holder)
                await flood(holder, 1.5)
                for _ in range(3):
                    async with PolledFace(transport) as vanishing:
                        await flood(vanishing, 1.5)
                await anyio.sleep(1.0)
            assert server.process.poll() is None
            async with self._both(url) as clients:
                await clients.until_answered()

    async def test_closing_beside_a_frozen_server(self, anyio_backend: str, face: type[Face]) -> None:
        url = self.url()
        async with self._server(url, anyio_backend) as server:
            client = face(create_transport(url))
            await client.__aenter__()
            await until_answered(client)
            server.signal(signal.SIGSTOP)
            await client.ask(*[lookup(20_000)] * 8, seconds=0.1)
            with anyio.fail_after(CLOSE_S):
                await client.__aexit__(None, None, None)

    async def test_an_address_has_one_server_of_all_processes(self, anyio_backend: str) -> None:
        url = self.url()
        transport = create_transport(url)
        async with self._server(url, anyio_backend), AsyncFace(transport) as client:
            await until_answered(client)
            with pytest.raises(TransportError):
                async with transport.serve(Handler()):
                    pytest.fail("two servers on one address")
            assert_answered(await client.ask(lookup()), lookup())

    async def test_a_forked_child_makes_a_client_of_its_own(self) -> None:
        transport = create_transport(self.url())
        async with transport.serve(Handler()), PolledFace(transport) as face:
            assert_answered(await face.ask(lookup()), lookup())

            def fork() -> int:
                if child := os.fork():
                    return os.waitpid(child, 0)[1]
                try:
                    client = transport.polled_client()
                    assert_answered(poll_all(client, [lookup(7)], HANG_S / 2), lookup(7))
                    client.close()
                    os._exit(0)
                finally:
                    os._exit(1)

            assert await face.run(fork) == 0
            assert_answered(await face.ask(lookup(5)), lookup(5))

    async def test_a_process_may_end_without_closing(self, anyio_backend: str) -> None:
        """Whatever a client forgot does not hold up the end of its process, beside a frozen server too."""
        url = self.url()
        program = (
            "from kvpool.testing._lookups import create_transport, lookup\n"
            f"client = create_transport({url!r}).polled_client()\n"
            "for i in range(20): client.submit(lookup(2000, 'hang', seed=i), timeout=30); client.poll(wait=0.005)\n"
        )

        def run() -> int:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            return subprocess.run([sys.executable, "-c", program], env=environment, timeout=HANG_S).returncode

        async with self._server(url, anyio_backend) as server:
            assert await anyio.to_thread.run_sync(run) == 0
            server.signal(signal.SIGSTOP)
            assert await anyio.to_thread.run_sync(run) == 0
