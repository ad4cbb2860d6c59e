"""Lookups from the engine's process to the store's: both sides' own client and server, over ipc, in one process."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import quantiles
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import uuid4

import anyio
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import LookupKeyClient, LookupKeyServer

from benchmarks.hot_path.measure import Row
from benchmarks.hot_path.paths import Lookup
from benchmarks.hot_path.workload import Prompt, namespace
from kvpool.config import Config
from kvpool.registry import create_transport
from kvpool.transport import LookupRequest, LookupResult, PolledLookupClient

__all__ = ["concurrent", "server_cpu"]

_EPOCH = bytes(16)
_MANY = 32


class _Theirs:
    """vLLM's client and server; one lookup after another."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"lookup_rpc_port": uuid4().hex[:8]}),
        )
        lookup.prompt.oracle.worker.store = lookup.clients[0]
        self.server = LookupKeyServer(lookup.prompt.oracle.worker, config)
        self.client = LookupKeyClient(config)

    def many(self, count: int) -> list[float]:
        """Ask ``count`` times at once; seconds until each answer."""
        prompt, done = self._lookup.prompt, list[float]()
        start = time.perf_counter()
        answers = [self.client.lookup(str(i), prompt.num_tokens, prompt.listed, non_block=True) for i in range(count)]
        for i, answer in enumerate(answers):
            if answer is None:  # else it came before the call returned, and the client has forgotten the question
                self.client.futures[str(i)].add_done_callback(lambda _: done.append(time.perf_counter() - start))
            else:
                done.append(time.perf_counter() - start)
        for i, answer in enumerate(answers):
            result = answer or self.client.lookup(str(i), prompt.num_tokens, prompt.listed)
            assert result is not None
            assert result.hit_length == prompt.num_tokens - 256
        return done

    def close(self) -> None:
        self.client.close()  # type: ignore[no-untyped-call]
        self.server.running = False
        # The server's thread sleeps in its socket; it ends with the process, as it does in vLLM.


class _Ours:
    """kvpool's polled client, and its server with a pool on an event loop in a thread of its own."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._transport = create_transport("zmq+ipc://")
        self._started, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: anyio.run(self._serve))
        self._thread.start()
        self._started.wait()
        self.client: PolledLookupClient = self._transport.polled_client()

    async def _serve(self) -> None:
        async def answer(request: LookupRequest) -> LookupResult:
            hit = await self._lookup.pool.lookup(request.hashes, request.num_tokens)
            return LookupResult(hit.length, hit.boundaries, request.epoch, 1.0)

        patient = Config.load({"lookup_timeout_ms": 10_000})
        async with self._lookup.open(patient), self._transport.serve(answer):
            self._started.set()
            await anyio.to_thread.run_sync(self._stop.wait)

    def many(self, count: int) -> list[float]:
        prompt = self._lookup.prompt
        request = LookupRequest(namespace().digest, _EPOCH, prompt.num_tokens, 0, prompt.hashes)
        seconds: list[float] = []
        start = time.perf_counter()
        for _ in range(count):
            self.client.submit(request, timeout=10)
        while len(seconds) < count:
            for _, result in self.client.poll(wait=1):
                assert isinstance(result, LookupResult), result
                assert result.hit_length == prompt.num_tokens - 256
                seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        self.client.close()
        self._stop.set()
        self._thread.join()


@contextmanager
def _both(prompt: Prompt, seconds: float) -> Iterator[tuple[Lookup, _Theirs, _Ours]]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, {"VLLM_RPC_BASE_PATH": folder}))
        lookup = Lookup(prompt, 1.0, 0.0, seconds)
        theirs, ours = _Theirs(lookup), _Ours(lookup)
        stack.callback(theirs.close)
        stack.callback(ours.close)
        yield lookup, theirs, ours


def server_cpu(prompt: Prompt, runs: int) -> Row:
    """CPU seconds of the whole process, client and server, for one lookup after another."""
    with _both(prompt, 0.0) as (lookup, theirs, ours):
        times: dict[Any, list[float]] = {theirs: [], ours: []}
        theirs.many(1)
        ours.many(1)
        counts = lookup.counts()
        for _ in range(runs):
            for side, count in ((theirs, 1), (ours, 50)):
                start = time.process_time()
                for _ in range(count):
                    side.many(1)
                times[side].append((time.process_time() - start) / count)
    return Row("lookup_server_cpu", 2, times[theirs], times[ours], counts)


def concurrent(prompt: Prompt, runs: int) -> Row:
    """The 99th percentile of 32 lookups that are asked at once of a store that takes 2 ms."""
    with _both(prompt, 0.002) as (lookup, theirs, ours):
        times: dict[Any, list[float]] = {theirs: [], ours: []}
        theirs.many(1)
        ours.many(1)
        counts = lookup.counts()
        for _ in range(runs):
            for side, found in times.items():
                found.append(quantiles(side.many(_MANY), n=100, method="inclusive")[98])
    return Row("lookup_32_concurrent_p99", 8, times[theirs], times[ours], counts)
