"""What the transport suite works with: a handler that does as it is told, both client faces as one, a server process.

``python -m kvpool.testing._lookups URL LOOP`` is that server process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import anyio
import xxhash

from kvpool.errors import TransportError
from kvpool.hashes import chain_hashes
from kvpool.registry import create_transport
from kvpool.transport import LookupRequest, LookupResult, LookupTransport, PolledLookupClient

__all__ = [
    "CLOSE_S",
    "HANG_S",
    "NAMESPACE",
    "AsyncFace",
    "Face",
    "Handler",
    "Outcome",
    "PolledFace",
    "ServerProcess",
    "assert_answered",
    "expected",
    "lookup",
    "poll_all",
    "until_answered",
]

Outcome = LookupResult | TransportError
T = TypeVar("T")

NAMESPACE = b"conformance-test"
#: No call of the suite takes as long unless it hangs.
HANG_S = 60.0
#: A transport closes within this time, whether its peers live or not.
CLOSE_S = 5.0


def lookup(num_hashes: int = 3, do: str = "answer", *, seed: int = 0, namespace: bytes = NAMESPACE) -> LookupRequest:
    """A request that tells :class:`Handler` what to do, in its epoch. ``seed``: other hashes."""
    hashes = chain_hashes(range(seed, seed + num_hashes), 1)
    return LookupRequest(namespace, do.encode().ljust(16, b"\0"), 1 << 40, 0, hashes)


def expected(request: LookupRequest) -> LookupResult:
    """The answer to a request: it proves that every byte of the hashes has arrived."""
    digest = xxhash.xxh64_intdigest(request.hashes.view) >> 32
    return LookupResult(len(request.hashes), (digest, request.local_tokens), request.epoch, 0.5)


def assert_answered(outcomes: list[Outcome], *requests: LookupRequest) -> None:
    """Each request has its own answer, in the order of the requests."""
    assert outcomes == [expected(r) for r in requests]


class Handler:
    """Does what a request says. ``begun`` counts by deed; ``running`` are those that have not ended.

    answer; count: the hit length says how many "answer" have begun; sleep: answer after 20 ms; raise; hang: until
    cancelled; stubborn: 150 ms that cannot be cancelled; none, long: results that are none.
    """

    def __init__(self) -> None:
        self.begun: dict[str, int] = {}
        self.running = 0

    async def __call__(self, request: LookupRequest) -> LookupResult:
        do = request.epoch.rstrip(b"\0").decode()
        self.begun[do] = self.begun.get(do, 0) + 1
        self.running += 1
        try:
            return await self._do(do, request)
        finally:
            self.running -= 1

    async def _do(self, do: str, request: LookupRequest) -> LookupResult:
        if do == "count":
            return LookupResult(self.begun.get("answer", 0), (), request.epoch, 0.5)
        if do == "raise":
            raise LookupError("no shelf for this book")
        if do == "none":
            return None  # type: ignore[return-value]
        if do == "long":
            return LookupResult(request.num_tokens, (), request.epoch, 0.5)
        if do == "hang":
            await anyio.sleep_forever()
        if do == "sleep":
            await anyio.sleep(0.02)
        if do == "stubborn":
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.15)
        return expected(request)


class Face:
    """One client, asked the same way whichever face it shows."""

    def __init__(self, transport: LookupTransport) -> None:
        self.transport = transport

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        raise NotImplementedError

    async def ask(self, *requests: LookupRequest, seconds: float = HANG_S / 2) -> list[Outcome]:
        """The outcomes of lookups that are all in flight at once, in the order of the requests."""
        raise NotImplementedError


class AsyncFace(Face):
    """The async client."""

    def __init__(self, transport: LookupTransport) -> None:
        super().__init__(transport)
        self.client = transport.client()

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.__aexit__(*exc)

    async def ask(self, *requests: LookupRequest, seconds: float = HANG_S / 2) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}

        async def one(i: int, request: LookupRequest) -> None:
            try:
                outcomes[i] = await self.client.lookup(request, deadline=anyio.current_time() + seconds)
            except TransportError as error:
                outcomes[i] = error

        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                for i, request in enumerate(requests):
                    tasks.start_soon(one, i, request)
        return [outcomes[i] for i in range(len(requests))]


class PolledFace(Face):
    """The polled client, on a thread of its own as in an engine."""

    def __init__(self, transport: LookupTransport) -> None:
        super().__init__(transport)
        self._thread = ThreadPoolExecutor(1)
        self.client: PolledLookupClient

    async def run(self, function: Callable[[], T]) -> T:
        """Call something on the client's thread."""
        return await anyio.to_thread.run_sync(self._thread.submit(function).result)

    async def __aenter__(self) -> Self:
        self.client = await self.run(self.transport.polled_client)
        return self

    async def __aexit__(self, *exc: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.run(self.client.close)
            self._thread.shutdown()

    async def ask(self, *requests: LookupRequest, seconds: float = HANG_S / 2) -> list[Outcome]:
        return await self.run(lambda: poll_all(self.client, requests, seconds))


def poll_all(client: PolledLookupClient, requests: Sequence[LookupRequest], seconds: float) -> list[Outcome]:
    """Submit all, then poll until each has ended; checks that each ticket is reported once."""
    tickets = [client.submit(request, timeout=seconds) for request in requests]
    assert len(set(tickets)) == len(tickets)
    outcomes: dict[int, Outcome] = {}
    end = time.monotonic() + HANG_S
    while len(outcomes) < len(tickets):
        assert time.monotonic() < end, f"{len(tickets) - len(outcomes)} of {len(tickets)} tickets never ended"
        for ticket, outcome in client.poll(wait=0.5):
            assert ticket in tickets, "a ticket of nobody"
            assert ticket not in outcomes, "a ticket twice"
            outcomes[ticket] = outcome
    return [outcomes[ticket] for ticket in tickets]


async def until_answered(client: Face) -> None:
    """Ask until somebody answers: a lookup that is sent while a server comes up may be lost."""
    with anyio.fail_after(HANG_S):
        while True:
            [outcome] = await client.ask(lookup(1, "count"), seconds=0.3)
            if isinstance(outcome, LookupResult):
                return
            await anyio.sleep(0.01)


class ServerProcess:
    """A process that serves a URL with :class:`Handler`; killed at the end, whatever state it is in."""

    def __init__(self, url: str, loop: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", __name__, url, loop]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"serving\n", f"no server on {url}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """As by kill -9: it cannot clean up."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def _serve(url: str) -> None:
    async with create_transport(url).serve(Handler(), namespace=NAMESPACE):
        print("serving", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(_serve, sys.argv[1], backend=sys.argv[2])
