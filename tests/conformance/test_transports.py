"""Every lookup transport that ships with kvpool keeps the contract; and the suite finds transports that do not."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from uuid import uuid4

import anyio
import pytest

from kvpool.errors import TransportError
from kvpool.protocols import inprocess
from kvpool.protocols.inprocess import InProcessTransport
from kvpool.testing._lookups import AsyncFace, Face, PolledFace
from kvpool.testing.remote_transports import RemoteTransportConformance
from kvpool.testing.transports import TransportConformance
from kvpool.transport import LookupHandler, LookupRequest, LookupResult, PolledLookupClient


class TestInProcess(TransportConformance):
    def url(self) -> str:
        return f"inprocess://{uuid4().hex}"


class TestZmqIpc(RemoteTransportConformance):
    def url(self) -> str:
        return f"zmq+ipc://{uuid4().hex}"


class TestZmqTcp(RemoteTransportConformance):
    loops = frozenset({"asyncio"})  # what differs from ipc is the address
    open_close_cycles = 100

    def url(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return f"zmq+tcp://127.0.0.1:{free.getsockname()[1]}"


# ---- transports with one mistake each


class _Crossed(InProcessTransport):
    """Gives an answer to whoever asked before."""

    def serve(self, handler: LookupHandler, *, namespace: bytes | None = None) -> AbstractAsyncContextManager[None]:
        last: list[LookupRequest] = []

        async def crossed(request: LookupRequest) -> LookupResult:
            last.append(request)
            return await handler(last[-2] if len(last) > 1 else request)

        return super().serve(crossed, namespace=namespace)


class _Lenient(InProcessTransport):
    """Answers whatever namespace it is asked for."""

    def serve(self, handler: LookupHandler, *, namespace: bytes | None = None) -> AbstractAsyncContextManager[None]:
        return super().serve(handler)


class _Wrapping(InProcessTransport):
    """Its task group shows through."""

    @asynccontextmanager
    async def _serve(self, handler: LookupHandler, namespace: bytes | None) -> AsyncIterator[None]:
        async with super()._serve(handler, namespace), anyio.create_task_group():
            yield


class _Stealing(InProcessTransport):
    """A second server takes the address over."""

    @asynccontextmanager
    async def _serve(self, handler: LookupHandler, namespace: bytes | None) -> AsyncIterator[None]:
        victim = inprocess._servers.pop(self.address, None)
        try:
            async with super()._serve(handler, namespace):
                yield
        finally:
            if victim is not None:
                inprocess._servers[self.address] = victim


class _Polled(PolledLookupClient):
    """The real client, to be spoilt."""

    def __init__(self, real: PolledLookupClient) -> None:
        self.real = real
        self.leak = os.dup(0)

    def submit(self, request: LookupRequest, *, timeout: float) -> int:
        return self.real.submit(request, timeout=timeout)

    def poll(self, *, wait: float = 0.0) -> Sequence[tuple[int, LookupResult | TransportError]]:
        return self.real.poll(wait=wait)

    def cancel(self, ticket: int) -> None:
        """Forgets to forget."""

    def close(self) -> None:
        self.real.close()


class _Spoilt(InProcessTransport):
    def polled_client(self) -> PolledLookupClient:
        return _Polled(super().polled_client())


class _Twice(_Polled):
    def poll(self, *, wait: float = 0.0) -> Sequence[tuple[int, LookupResult | TransportError]]:
        return [*(done := super().poll(wait=wait)), *done]


class _Doubling(InProcessTransport):
    def polled_client(self) -> PolledLookupClient:
        return _Twice(super().polled_client())


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("broken", "test", "face"),
    [
        (_Crossed, "test_every_answer_reaches_its_own_request", AsyncFace),
        (_Lenient, "test_another_namespace_is_refused_by_name", PolledFace),
        (_Wrapping, "test_an_error_beside_the_server_stays_what_it_is", None),
        (_Stealing, "test_an_address_has_one_server", None),
        (_Spoilt, "test_a_cancelled_ticket_is_never_reported", None),
        (_Spoilt, "test_open_and_close_leave_nothing_behind", None),
        (_Doubling, "test_every_answer_reaches_its_own_request", PolledFace),
    ],
)
def test_the_suite_finds(broken: type[InProcessTransport], test: str, face: type[Face] | None, loop: str) -> None:
    class Suite(TestInProcess):
        open_close_cycles = 10

    arguments = [broken(uuid4().hex), *([face] if face else [])]
    with pytest.raises((AssertionError, BaseExceptionGroup, pytest.fail.Exception)):
        anyio.run(getattr(Suite(), test), *arguments, backend=loop)
