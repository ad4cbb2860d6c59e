"""How a lookup handler is run: what it does to itself is not the end of the service."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from kvpool.protocols._lookup_handler import Handling
from kvpool.protocols._lookup_wire import Code, Fault
from kvpool.registry import create_transport
from kvpool.testing._lookups import HANG_S, AsyncFace, Handler, expected, lookup
from kvpool.transport import LookupRequest, LookupResult


async def cancels_itself(request: LookupRequest) -> LookupResult:
    """As a handler does that awaits a future which somebody has cancelled."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future
    return expected(request)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("url", ["zmq+ipc://?max_handlers=3", "inprocess://"])
async def test_a_handler_that_cancels_itself_fails_alone(anyio_backend: str, url: str) -> None:
    """A cancellation that reaches the task group of a server would end it, and its owner's block, without an error."""
    good, transport = Handler(), create_transport(url)

    async def handler(request: LookupRequest) -> LookupResult:
        return await (cancels_itself if request.local_tokens else good)(request)

    bad = lookup()
    bad = LookupRequest(bad.namespace, bad.epoch, bad.num_tokens, 1, bad.hashes)
    answered = False
    async with transport.serve(handler), AsyncFace(transport) as client:
        outcomes = await client.ask(*[bad] * 5)
        assert ["cancelled itself" in str(outcome) for outcome in outcomes] == [True] * 5
        answered = await client.ask(lookup()) == [expected(lookup())]
    assert answered


@pytest.mark.anyio
async def test_who_is_cancelled_from_outside_has_not_failed(anyio_backend: str) -> None:
    handling = Handling(Handler(), "here")
    with anyio.move_on_after(0.01) as scope:
        await handling.run(lookup(do="hang"), anyio.current_time() + HANG_S)
    assert scope.cancelled_caught
    assert await handling.run(lookup(do="hang"), anyio.current_time() + 0.01) is None
    assert handling.failures == 0
    fault = await handling.run(lookup(do="raise"), anyio.current_time() + HANG_S)
    assert isinstance(fault, Fault)
    assert (fault.code, handling.failures) == (Code.HANDLER, 1)
