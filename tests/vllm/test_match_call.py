"""What a match call holds and copies, as the scheduler's half and the real client of ZeroMQ make it."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool.protocols._lookup_wire import Incoming, ServerWire
from kvpool.protocols._zmq_link import Link, receive
from kvpool.protocols.binary import BinaryCodec
from kvpool.protocols.zmq import ZmqTransport
from kvpool.registry import URL, parse_url
from kvpool.transport import LookupResult
from tests.vllm.halves import EPOCH, FakePool, FakeRequest, scheduler

DIGEST = 32
#: Beside what grows with the prompt: tables, tickets, headers.
REST = 8_000
#: ``bytes.join`` holds so much for each of its parts while it runs.
JOIN = 80


class Asked(FakeRequest):
    """A request of so many hashes, none of which anybody has."""

    def __init__(self, hashes: int) -> None:
        super().__init__(0)
        self.block_hashes = [os.urandom(DIGEST) for _ in range(hashes)]
        self.num_prompt_tokens = self.num_tokens = 4 * hashes + 1


class Server:
    """Answers in the test's own thread, when it is told to, a miss that has expired when it arrives."""

    def __init__(self, url: URL) -> None:
        self._link = Link(url)
        self._router = self._link.router()
        self._wire = ServerWire(BinaryCodec())

    def answer(self) -> list[int]:
        """The bytes of hashes of each lookup that has arrived; waits for one."""
        assert self._router.poll(20_000), "no lookup arrived"
        asked = []
        while (frames := receive(self._router)) is not None:
            identity, header, hashes = frames
            incoming = self._wire.accept([header, hashes])
            assert isinstance(incoming, Incoming)
            asked.append(hashes.nbytes)
            self._router.send_multipart([identity, self._wire.reply(incoming.id, LookupResult(0, (0,), EPOCH, 0.0))])
        return asked

    def close(self) -> None:
        self._link.close(self._router)


class Memory:
    """Bytes of Python's, of a call: held at most while it ran, and still held after it."""

    peak = kept = 0


@contextmanager
def memory() -> Iterator[Memory]:
    found = Memory()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    yield found
    after, peak = tracemalloc.get_traced_memory()
    found.peak, found.kept = peak - before, after - before


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_a_match_call_copies_each_hash_twice_at_most() -> None:
    """Cold: joined, and put into the frame that serves every lookup. Asked anew: into that frame only."""
    transport = ZmqTransport(parse_url("zmq+ipc://"))
    server = Server(transport.url)
    client: Any = transport.polled_client()
    side = scheduler(FakePool(64), client=client, lookup_grace_ms=0, lookup_timeout_ms=20_000)
    frame = 0
    try:
        for count in (18_064, 625, 18_064):
            asked = Asked(count)
            side.on_new_request(asked)

            def match(asked: Asked = asked) -> int | None:
                side._lookups.new_step()
                answer: int | None = side.match(asked, 0)
                return answer

            def answered(match: Callable[[], int | None] = match) -> None:
                end = time.monotonic() + 20
                while (found := match()) is None:
                    assert time.monotonic() < end
                assert found == 0

            with memory() as cold:
                assert match() is None
            assert server.answer() == [2 + DIGEST * count], "sent once"
            answered()
            assert cold.peak <= (JOIN + DIGEST) * count + REST
            larger = max(0, DIGEST * count - frame)
            assert cold.kept <= DIGEST * count + larger + REST
            frame += larger

            with memory() as again:
                assert match() is None
            with memory() as not_yet:
                assert match() is None
            assert server.answer() == [2 + DIGEST * count]
            answered()
            assert again.peak <= REST, "nothing is joined, and the frame is there"
            assert not_yet.peak <= 1_000
            side.forget(asked.request_id)
    finally:
        client.close()
        server.close()
