"""The contract of :class:`kvpool.transport.LookupTransport` as tests that an author gets by subclassing one class.

::

    class TestMyTransport(TransportConformance):
        def url(self): return f"my_pkg.mod:MyTransport?name={uuid4()}"

For a transport between processes, subclass :class:`~kvpool.testing.remote_transports.RemoteTransportConformance`, which
adds to these tests. Needs pytest and trio: ``pip install 'kvpool[testing]'``.
"""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import anyio
import pytest

from kvpool.errors import LookupTimeout, ProtocolMismatch, TransportClosed, TransportError
from kvpool.hashes import BlockHashes
from kvpool.registry import create_transport
from kvpool.testing._lookups import (
    CLOSE_S,
    HANG_S,
    NAMESPACE,
    AsyncFace,
    Face,
    Handler,
    Outcome,
    PolledFace,
    assert_answered,
    expected,
    lookup,
    poll_all,
    until_answered,
)
from kvpool.testing.cancel import cancel_everywhere
from kvpool.transport import LookupRequest, LookupResult, LookupTransport, PolledLookupClient

__all__ = ["TransportConformance"]


class TransportConformance:
    """Subclass it in a test module, under a name that pytest collects."""

    pytestmark = pytest.mark.anyio

    #: The event loops to run on.
    loops: ClassVar[frozenset[str]] = frozenset({"asyncio", "trio"})
    #: Open and close this often, with a flat count of descriptors and threads.
    open_close_cycles: ClassVar[int] = 1000

    def url(self) -> str:
        """A new address, which no other test of this host uses."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "anyio_backend" in metafunc.fixturenames:
            metafunc.parametrize("anyio_backend", sorted(self.loops))
        if "face" in metafunc.fixturenames:
            metafunc.parametrize("face", [AsyncFace, PolledFace], ids=["async", "polled"])

    @pytest.fixture
    def transport(self) -> LookupTransport:
        """The transport of one test."""
        return create_transport(self.url())

    # ---- answers

    async def test_every_answer_reaches_its_own_request(self, transport: LookupTransport, face: type[Face]) -> None:
        """100 in flight, some slow and some quick; each answer proves which bytes the server read."""
        requests = [lookup(1 + i, "sleep" if i % 3 else "answer", seed=i) for i in range(100)]
        async with transport.serve(Handler()), face(transport) as client:
            assert_answered(await client.ask(*requests), *requests)

    async def test_no_hashes_and_very_many(self, transport: LookupTransport, face: type[Face]) -> None:
        requests = [replace(lookup(), hashes=BlockHashes(scheme="chained")), lookup(18_064), lookup(1)]
        async with transport.serve(Handler()), face(transport) as client:
            assert_answered(await client.ask(*requests), *requests)

    async def test_every_field_arrives(self, transport: LookupTransport, face: type[Face]) -> None:
        seen: list[LookupRequest] = []
        result = LookupResult(12_345, (12_344, 0, 17), bytes(range(16)), 0.25)

        async def handler(request: LookupRequest) -> LookupResult:
            seen.append(request)
            return result

        hashes = BlockHashes(b"0123456789ab" * 3, 12, scheme="another chain")
        request = LookupRequest(NAMESPACE, b"0123456789abcdef", 99_999, 16, hashes)
        async with transport.serve(handler), face(transport) as client:
            assert await client.ask(request) == [result]
        assert seen == [request]
        assert seen[0].hashes.hash_len == 12

    async def test_many_clients(self, transport: LookupTransport, face: type[Face]) -> None:
        async def work(n: int) -> None:
            async with face(transport) as client:
                for i in range(5):
                    requests = [lookup(2, "sleep", seed=100 * n + 10 * i + j) for j in range(3)]
                    assert_answered(await client.ask(*requests), *requests)

        async with transport.serve(Handler()), anyio.create_task_group() as tasks:
            for n in range(8):
                tasks.start_soon(work, n)

    async def test_hashes_may_grow_after_the_call(self, transport: LookupTransport) -> None:
        request = lookup(5, "sleep")
        answer = expected(request)
        async with transport.serve(Handler()), PolledFace(transport) as client:

            def ask() -> list[Outcome]:
                ticket = client.client.submit(request, timeout=HANG_S / 2)
                request.hashes.extend(bytes(32 * 100))
                done = dict(client.client.poll(wait=HANG_S))
                return [done[ticket]]

            assert await client.run(ask) == [answer]

    async def test_a_pickled_transport_means_the_same_address(self, transport: LookupTransport) -> None:
        copy = pickle.loads(pickle.dumps(transport))
        async with transport.serve(Handler()), AsyncFace(copy) as client:
            assert_answered(await client.ask(lookup()), lookup())

    # ---- no answer

    async def test_a_handler_that_fails_is_an_error_by_name(self, transport: LookupTransport, face: type[Face]) -> None:
        async with transport.serve(Handler()), face(transport) as client:
            wrong = ["raise", "none", "long"]
            *errors, answer = await client.ask(*(lookup(do=do) for do in wrong), lookup())
            for error in errors:
                assert isinstance(error, TransportError)
                assert not isinstance(error, LookupTimeout | ProtocolMismatch | TransportClosed)
            assert "LookupError" in str(errors[0])
            assert "no shelf for this book" in str(errors[0])
            assert answer == expected(lookup())
            assert_answered(await client.ask(lookup()), lookup())

    async def test_a_handler_that_hangs_is_stopped_at_the_deadline(
        self, transport: LookupTransport, face: type[Face]
    ) -> None:
        handler = Handler()
        async with transport.serve(handler), face(transport) as client:
            hung, answer = await client.ask(lookup(do="hang"), lookup(), seconds=0.8)
            assert isinstance(hung, LookupTimeout)
            assert answer == expected(lookup())
            await _until(lambda: not handler.running)
            assert_answered(await client.ask(lookup()), lookup())

    async def test_many_that_hang_do_not_end_the_service(self, transport: LookupTransport, face: type[Face]) -> None:
        async with transport.serve(Handler()), face(transport) as client:
            outcomes = await client.ask(*(lookup(do="hang", seed=i) for i in range(300)), seconds=0.3)
            assert {type(o) for o in outcomes} == {LookupTimeout}
            assert_answered(await client.ask(lookup()), lookup())

    async def test_late_answers_are_dropped(self, transport: LookupTransport, face: type[Face]) -> None:
        handler = Handler()
        async with transport.serve(handler), face(transport) as client:
            for i in range(3):
                [late] = await client.ask(lookup(do="stubborn"), seconds=0.02)
                assert isinstance(late, LookupTimeout)
                assert_answered(await client.ask(lookup(seed=i)), lookup(seed=i))
            await _until(lambda: not handler.running)
            assert_answered(await client.ask(lookup(2), lookup(4)), lookup(2), lookup(4))

    async def test_no_time_at_all(self, transport: LookupTransport, face: type[Face]) -> None:
        async with transport.serve(Handler()), face(transport) as client:
            for timeout in (0.0, -1.0):
                [outcome] = await client.ask(lookup(do="hang"), seconds=timeout)
                assert isinstance(outcome, LookupTimeout)
            assert_answered(await client.ask(lookup()), lookup())

    async def test_another_namespace_is_refused_by_name(self, transport: LookupTransport, face: type[Face]) -> None:
        handler, other = Handler(), b"another-model-16"
        async with transport.serve(handler, namespace=NAMESPACE), face(transport) as client:
            right, wrong = await client.ask(lookup(), lookup(namespace=other))
            assert right == expected(lookup())
            assert isinstance(wrong, ProtocolMismatch)
            assert NAMESPACE.hex() in str(wrong)
            assert other.hex() in str(wrong)
        assert handler.begun == {"answer": 1}

    # ---- servers come and go

    async def test_nobody_serves_then_somebody_does(self, transport: LookupTransport, face: type[Face]) -> None:
        async with face(transport) as client:
            [error] = await client.ask(lookup(), seconds=0.05)
            assert isinstance(error, TransportError)
            for _ in range(3):
                async with transport.serve(Handler()):
                    await until_answered(client)
                    assert_answered(await client.ask(lookup(), lookup(9)), lookup(), lookup(9))
                [error] = await client.ask(lookup(), seconds=0.05)
                assert isinstance(error, TransportError)

    async def test_a_server_is_followed_at_once_by_the_next(self, transport: LookupTransport, face: type[Face]) -> None:
        async with face(transport) as client:
            for _ in range(20):
                async with transport.serve(Handler()):
                    await client.ask(lookup(), seconds=0.001)
            async with transport.serve(Handler()):
                await until_answered(client)

    async def test_submit_never_blocks(self, transport: LookupTransport) -> None:
        """With nobody there, and with a server that answers nothing: each ticket ends, none is answered."""
        requests = [lookup(2000, "hang")] * 300
        async with PolledFace(transport) as client:
            outcomes = await client.ask(*requests, seconds=0.2)
            assert all(isinstance(o, TransportError) for o in outcomes)
            async with transport.serve(Handler()):
                await until_answered(client)
                outcomes = await client.ask(*requests, seconds=0.2)
                assert all(isinstance(o, TransportError) for o in outcomes)
                assert_answered(await client.ask(lookup()), lookup())

    async def test_an_address_has_one_server(self, transport: LookupTransport) -> None:
        first, second = Handler(), Handler()
        async with transport.serve(first), AsyncFace(transport) as client:
            with pytest.raises(TransportError):
                async with transport.serve(second):
                    pytest.fail("two servers on one address")
            with pytest.raises(TransportError):
                async with pickle.loads(pickle.dumps(transport)).serve(second):
                    pytest.fail("two servers on one address")
            assert_answered(await client.ask(lookup()), lookup())
        async with transport.serve(second), AsyncFace(transport) as client:
            assert_answered(await client.ask(lookup()), lookup())
        assert (first.begun, second.begun) == ({"answer": 1}, {"answer": 1})

    async def test_two_addresses_do_not_meet(self, transport: LookupTransport, face: type[Face]) -> None:
        other = create_transport(self.url())
        here, there = Handler(), Handler()
        async with transport.serve(here), other.serve(there), face(other) as client:
            assert_answered(await client.ask(lookup()), lookup())
        assert (here.begun, there.begun) == ({}, {"answer": 1})

    async def test_the_end_of_a_server_ends_its_handlers(self, transport: LookupTransport, face: type[Face]) -> None:
        handler = Handler()
        outcomes: list[Outcome] = []
        async with face(transport) as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                outcomes.extend(await client.ask(*(lookup(do="hang", seed=i) for i in range(5)), seconds=1.0))

            with anyio.fail_after(CLOSE_S):
                async with transport.serve(handler):
                    tasks.start_soon(ask)
                    await _until(lambda: handler.running == 5)
                assert handler.running == 0
        assert len(outcomes) == 5
        assert all(isinstance(o, TransportError) for o in outcomes)

    async def test_an_error_beside_the_server_stays_what_it_is(self, transport: LookupTransport) -> None:
        error = KeyError("the caller's own")
        with pytest.raises(KeyError) as caught:
            async with transport.serve(Handler()), transport.client():
                raise error
        assert caught.value is error
        with anyio.move_on_after(0.05) as scope:
            async with transport.serve(Handler()), transport.client():
                await anyio.sleep_forever()
        assert scope.cancelled_caught

    # ---- clients come and go

    async def test_cancelled_at_every_await(self, transport: LookupTransport) -> None:
        handler = Handler()
        async with transport.serve(handler), AsyncFace(transport) as client:
            assert_answered(await client.ask(lookup()), lookup())

            async def call() -> LookupResult:
                return await client.client.lookup(lookup(do="sleep"), deadline=anyio.current_time() + HANG_S / 2)

            async def after(step: int) -> None:
                assert_answered(await client.ask(lookup(1 + step)), lookup(1 + step))

            assert await cancel_everywhere(call, after) > 0
            await _until(lambda: not handler.running)

    async def test_cancelling_one_leaves_the_others_waiting(self, transport: LookupTransport) -> None:
        async with transport.serve(Handler()), AsyncFace(transport) as client:
            requests = [lookup(2 + i, "sleep") for i in range(6)]
            for victim in range(6):
                scopes = [anyio.CancelScope() for _ in requests]
                outcomes: dict[int, LookupResult] = {}

                async def ask(i: int, scopes: list[anyio.CancelScope], into: dict[int, LookupResult]) -> None:
                    with scopes[i]:
                        into[i] = await client.client.lookup(requests[i], deadline=anyio.current_time() + HANG_S / 2)

                with anyio.fail_after(HANG_S):
                    async with anyio.create_task_group() as tasks:
                        for i in range(6):
                            tasks.start_soon(ask, i, scopes, outcomes)
                        await anyio.sleep(0.005)
                        scopes[victim].cancel()
                assert outcomes == {i: expected(r) for i, r in enumerate(requests) if i != victim}

    async def test_a_cancelled_ticket_is_never_reported(self, transport: LookupTransport) -> None:
        async with transport.serve(Handler()), PolledFace(transport) as face:
            client = face.client

            def work() -> None:
                for do in ("answer", "sleep", "hang", "raise"):
                    cancelled = client.submit(lookup(do=do), timeout=0.05)
                    client.cancel(cancelled)
                    client.cancel(cancelled)
                    client.cancel(-1)
                    assert poll_all(client, [lookup(4)], HANG_S / 2) == [expected(lookup(4))]
                done = client.submit(lookup(), timeout=HANG_S / 2)
                time.sleep(0.05)  # its answer is likely to wait for us already
                client.cancel(done)
                assert poll_all(client, [lookup(4)], HANG_S / 2) == [expected(lookup(4))]
                assert list(client.poll(wait=0.1)) == []

            await face.run(work)

    async def test_closing_a_busy_client(self, transport: LookupTransport, face: type[Face]) -> None:
        handler = Handler()
        async with transport.serve(handler), face(transport) as bystander:
            client = face(transport)
            await client.__aenter__()
            outcomes: list[Outcome] = []
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    if isinstance(client, AsyncFace):
                        outcomes.extend(await client.ask(*(lookup(do="hang", seed=i) for i in range(5))))
                    elif isinstance(client, PolledFace):
                        polled = client.client
                        await client.run(lambda: [polled.submit(lookup(do="hang"), timeout=HANG_S) for _ in range(5)])

                tasks.start_soon(ask)
                with anyio.fail_after(HANG_S):
                    while handler.running < 5:
                        if isinstance(client, PolledFace):  # what could not be sent yet goes with the next poll
                            await client.run(client.client.poll)
                        await anyio.sleep(0.002)
                with anyio.fail_after(CLOSE_S):
                    await client.__aexit__(None, None, None)
            assert {type(o) for o in outcomes} <= {TransportClosed}
            assert len(outcomes) == (5 if face is AsyncFace else 0)
            assert_answered(await bystander.ask(lookup()), lookup())

    async def test_a_client_is_used_between_open_and_close(self, transport: LookupTransport) -> None:
        async with transport.serve(Handler()):
            client = transport.client()
            with pytest.raises(TransportClosed):
                await client.lookup(lookup(), deadline=anyio.current_time() + 1)
            async with client:
                assert await client.lookup(lookup(), deadline=anyio.current_time() + HANG_S) == expected(lookup())
            with pytest.raises(TransportClosed):
                await client.lookup(lookup(), deadline=anyio.current_time() + 1)
            with pytest.raises(TransportClosed):
                await client.__aenter__()
            polled = transport.polled_client()
            polled.close()
            polled.close()
            for call in _calls(polled):
                with pytest.raises(TransportClosed):
                    call()

    async def test_a_forked_child_is_refused_and_does_no_harm(self, transport: LookupTransport) -> None:
        async with transport.serve(Handler()), PolledFace(transport) as face, AsyncFace(transport) as other:
            assert_answered(await face.ask(lookup()), lookup())

            def fork() -> int:
                if child := os.fork():
                    return os.waitpid(child, 0)[1]
                refused = 0
                try:
                    for call in _calls(face.client):
                        try:
                            call()
                        except TransportClosed:
                            refused += 1
                    face.client.close()
                finally:
                    os._exit(0 if refused == 3 else 1)

            assert await face.run(fork) == 0
            assert_answered(await face.ask(lookup(5)), lookup(5))
            assert_answered(await other.ask(lookup(6)), lookup(6))

    async def test_open_and_close_leave_nothing_behind(self, transport: LookupTransport) -> None:
        def counts() -> tuple[int, int]:
            gc.collect()
            folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
            return len(os.listdir(folder)), threading.active_count()

        async def cycle(ask: bool) -> None:
            async with transport.serve(Handler()), transport.client() as client:
                polled = transport.polled_client()
                if ask:
                    await client.lookup(lookup(), deadline=anyio.current_time() + HANG_S)
                    polled.submit(lookup(), timeout=1)
                polled.close()

        for _ in range(5):
            await cycle(True)
        before = counts()
        for i in range(self.open_close_cycles):
            await cycle(i % 10 == 0)
        after = counts()
        assert after[0] <= before[0] + 2, "descriptors leak"
        assert after[1] <= before[1] + 2, "threads leak"


def _calls(client: PolledLookupClient) -> list[Callable[[], object]]:
    return [lambda: client.submit(lookup(), timeout=1), client.poll, lambda: client.cancel(1)]


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(HANG_S):
        while True:
            if condition():
                return
            await anyio.sleep(0.002)
