"""What is special about lookups within a process: other threads, other loops, simulated time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import anyio
import numpy as np
import pytest
import trio
import trio.testing

from kvpool.errors import ConfigError, LookupTimeout, TransportError
from kvpool.protocols.inprocess import InProcessTransport
from kvpool.registry import create_transport
from kvpool.testing._lookups import HANG_S, AsyncFace, Handler, Outcome, PolledFace, assert_answered, expected, lookup
from kvpool.transport import LookupRequest, LookupResult


@pytest.mark.parametrize("url", ["inprocess://a:1", "inprocess://a/b", "inprocess://me@a", "inprocess://a?x=1"])
def test_an_address_is_a_name_and_nothing_else(url: str) -> None:
    with pytest.raises(ConfigError, match="a name and nothing else"):
        create_transport(url)


@pytest.mark.anyio
async def test_the_same_name_means_the_same_server_and_no_name_a_private_one(anyio_backend: str) -> None:
    async with create_transport("inprocess://same").serve(Handler()):
        async with AsyncFace(create_transport("inprocess://same")) as client:
            assert_answered(await client.ask(lookup()), lookup())
        async with AsyncFace(create_transport("inprocess://")) as client:
            [outcome] = await client.ask(lookup())
            assert isinstance(outcome, TransportError)


@pytest.mark.anyio
async def test_no_more_handlers_than_allowed_and_waiting_counts(anyio_backend: str) -> None:
    transport = InProcessTransport(max_handlers=2)
    handler, most = Handler(), 0

    async def watched(request: LookupRequest) -> LookupResult:
        nonlocal most
        most = max(most, handler.running + 1)
        return await handler(request)

    async with transport.serve(watched), AsyncFace(transport) as client:
        requests = [lookup(do="sleep", seed=i) for i in range(8)]
        assert_answered(await client.ask(*requests), *requests)
        hung = await client.ask(*(lookup(do="hang", seed=i) for i in range(4)), seconds=0.05)
        assert {type(o) for o in hung} == {LookupTimeout}
        assert handler.begun["hang"] == 2
    assert most == 2


@pytest.mark.anyio
async def test_no_copy_of_the_hashes_is_made(anyio_backend: str) -> None:
    seen: list[LookupRequest] = []

    async def handler(request: LookupRequest) -> LookupResult:
        seen.append(request)
        return expected(request)

    transport, request = InProcessTransport(), lookup(1000)
    async with transport.serve(handler), AsyncFace(transport) as one, PolledFace(transport) as other:
        assert_answered(await one.ask(request), request)
        assert_answered(await other.ask(request), request)
    assert all(np.shares_memory(r.hashes._rows, request.hashes._rows) for r in seen)
    assert seen[0] is request


@pytest.mark.anyio
@pytest.mark.parametrize("other_loop", ["asyncio", "trio"])
async def test_an_async_client_on_another_loop(anyio_backend: str, other_loop: str) -> None:
    transport = InProcessTransport()

    async def ask() -> None:
        async with AsyncFace(transport) as client:
            requests = [lookup(1 + i, "sleep") for i in range(10)]
            assert_answered(await client.ask(*requests), *requests)
            [hung] = await client.ask(lookup(do="hang"), seconds=0.05)
            assert isinstance(hung, LookupTimeout)

    handler = Handler()
    async with transport.serve(handler):
        await anyio.to_thread.run_sync(lambda: anyio.run(ask, backend=other_loop))
        with anyio.fail_after(HANG_S):
            while handler.running:  # noqa: ASYNC110
                await anyio.sleep(0.001)


def test_a_loop_that_ended_without_closing_its_server_is_an_error() -> None:
    transport = InProcessTransport()
    server, loop = transport.serve(Handler()), asyncio.new_event_loop()
    loop.run_until_complete(server.__aenter__())
    loop.close()

    def ask() -> list[Outcome]:
        client = transport.polled_client()
        client.submit(lookup(), timeout=HANG_S)
        return [outcome for _, outcome in client.poll(wait=HANG_S)]

    with ThreadPoolExecutor(1) as thread:
        [outcome] = thread.submit(ask).result()
    assert isinstance(outcome, TransportError)
    assert "the serving loop has ended" in str(outcome)


def test_simulated_time_is_the_only_time() -> None:
    """An hour of lookups that hang, on one thread, without a wait in real time."""
    transport, handler = InProcessTransport(), Handler()

    async def program() -> None:
        async with transport.serve(handler), transport.client() as client:
            polled = transport.polled_client()
            started = anyio.current_time()
            for _ in range(60):
                ticket = polled.submit(lookup(do="hang"), timeout=30)
                with pytest.raises(LookupTimeout):
                    await client.lookup(lookup(do="hang"), deadline=anyio.current_time() + 30)
                answered = polled.submit(lookup(), timeout=30)
                assert [(t, type(o)) for t, o in polled.poll()] == [(ticket, LookupTimeout)]
                await anyio.sleep(30)
                assert polled.poll() == [(answered, expected(lookup()))]
            assert anyio.current_time() - started == pytest.approx(3600)
            polled.close()
        assert handler.running == 0

    trio.run(program, clock=trio.testing.MockClock(autojump_threshold=0))
