"""What a lookup costs the scheduler's thread: time and memory of each match call, by prompt length and by requests.

``python -m benchmarks.match_call [--rounds N]``. The scheduler's half of the connector asks a real server over ipc, in
a process of its own, with a pool on a store that answers at once. ``lookup_grace_ms`` is 0, so no call waits:

- *cold*: the first call for a request, which joins its hashes and sends them
- *not yet*: a call while the answer is out
- *answer*: the call that brings it
- *again*: a call that asks anew because the answer has expired; the hashes are joined already

No call waits, so its time is CPU time of the thread. Memory is the peak of what a call allocates, by tracemalloc, in a
run of its own.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any, Self
from uuid import uuid4

import anyio
import numpy as np

from kvpool.config import Config
from kvpool.keys import Namespace
from kvpool.memory import Buffers
from kvpool.pool import KVPool
from kvpool.registry import URL, create_transport
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import Capabilities, Presence, Results, Store
from kvpool.transport import LookupRequest, LookupResult
from kvpool.vllm.scheduler import SchedulerSide

BLOCK, EPOCH = 16, bytes(16)
SPEC = CacheSpec((CacheGroup(Kind.FULL, BLOCK),), BLOCK)
NAMESPACE = Namespace.of({"benchmark": "match_call"})
PROMPTS = (1_000, 10_000, 100_000, 289_024, 1_000_000)
IN_FLIGHT = (1, 8, 64, 512)


class Nothing(Store):
    """Has nothing, and says so at once."""

    capabilities = Capabilities(shared=True)

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        return np.zeros(len(keys), np.uint8)

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        raise NotImplementedError

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        raise NotImplementedError

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        raise NotImplementedError


async def serve(address: str) -> None:
    async with KVPool(Nothing(), spec=SPEC, namespace=NAMESPACE) as pool:

        async def answer(request: LookupRequest) -> LookupResult:
            hit = await pool.lookup(request.hashes, request.num_tokens)
            return LookupResult(hit.length, hit.boundaries, request.epoch, max_age=0.0)  # expires at once

        async with create_transport(address).serve(answer):
            await anyio.sleep_forever()


def request(num_tokens: int) -> Any:
    """A request as vLLM's scheduler hands it over, as far as the match call looks."""
    digests = os.urandom(32 * (num_tokens // BLOCK))
    return SimpleNamespace(
        request_id=uuid4().hex,
        block_hashes=[digests[i : i + 32] for i in range(0, len(digests), 32)],
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        lora_request=None,
        skip_reading_prefix_cache=False,
    )


class Scheduler:
    def __init__(self, address: str) -> None:
        client = create_transport(address).polled_client()
        config = Config.load({"lookup_grace_ms": 0, "lookup_timeout_ms": 60_000})
        self.side: Any = SchedulerSide(
            config, SPEC, lambda: NAMESPACE, "benchmark", client, reads=True, writes=False, epoch=EPOCH
        )

    def step(self) -> None:
        """What the end of a step does to match calls."""
        self.side._lookups.new_step()

    def one(self, asked: Any, timed: Any) -> dict[str, float]:
        """Each kind of match call for one new request."""
        found = {}
        for first, last in (("cold", "answer"), ("again", "")):
            found[first], result = timed(self.side.match, asked, 0)
            cost = found[first]
            while result is None:
                self.step()
                cost, result = timed(self.side.match, asked, 0)
                if result is None:
                    found["not yet"] = cost
                    time.sleep(1e-4)  # the rest of a step
            if last:
                found[last] = cost
            self.step()
        self.side.forget(asked.request_id)
        return found


def clocked(call: Any, *args: Any) -> tuple[float, Any]:
    start = time.thread_time()
    result = call(*args)
    return time.thread_time() - start, result


def traced(call: Any, *args: Any) -> tuple[float, Any]:
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    result = call(*args)
    return tracemalloc.get_traced_memory()[1] - before, result


def by_prompt(scheduler: Scheduler, rounds: int) -> None:
    kinds = ("cold", "not yet", "answer", "again")
    print(f"{'tokens':>10}  " + "  ".join(f"{kind + ', us':>14}" for kind in kinds) + "   peak bytes: cold, again")
    for num_tokens in PROMPTS:
        samples = [scheduler.one(request(num_tokens), clocked) for _ in range(rounds)]
        tracemalloc.start()
        memory = scheduler.one(request(num_tokens), traced)
        tracemalloc.stop()
        times = [median([s[kind] for s in samples if kind in s] or [math.nan]) * 1e6 for kind in kinds]
        row = "  ".join(f"{t:14.1f}" for t in times)
        print(f"{num_tokens:10,}  {row}   {memory['cold']:,.0f}, {memory['again']:,.0f}", flush=True)


def by_requests(scheduler: Scheduler, rounds: int, num_tokens: int = 16_000) -> None:
    print(f"{'requests':>10}  {'ask, us each':>14}  {'wait, us each':>14}  {'kept bytes each':>16}")
    for count in IN_FLIGHT:
        asks, waits = [], []
        for _ in range(rounds):
            waiting = [request(num_tokens) for _ in range(count)]
            asks.append(clocked(lambda w=waiting: [scheduler.side.match(r, 0) for r in w])[0] / count)
            while waiting:
                scheduler.step()
                seconds, results = clocked(lambda w=waiting: [scheduler.side.match(r, 0) for r in w])
                waits.append(seconds / len(waiting))
                for asked, result in zip(waiting, results, strict=True):
                    if result is not None:
                        scheduler.side.forget(asked.request_id)
                waiting = [r for r, result in zip(waiting, results, strict=True) if result is None]
        tracemalloc.start()
        waiting = [request(num_tokens) for _ in range(count)]
        before = tracemalloc.get_traced_memory()[0]
        for asked in waiting:
            scheduler.side.match(asked, 0)
        kept = (tracemalloc.get_traced_memory()[0] - before) / count
        tracemalloc.stop()
        for asked in waiting:
            scheduler.side.forget(asked.request_id)
        scheduler.step()
        print(f"{count:10,}  {median(asks) * 1e6:14.1f}  {median(waits) * 1e6:14.1f}  {kept:16,.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return anyio.run(serve, options.serve)
    address = f"zmq+ipc://match-{os.getpid()}"
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.match_call", "--serve", address])
    try:
        scheduler = Scheduler(address)
        scheduler.one(request(1_000), clocked)  # until the server is there
        by_prompt(scheduler, options.rounds)
        by_requests(scheduler, max(3, options.rounds // 5))
        scheduler.side.close()
    finally:
        server.kill()
        server.wait()
    return None


if __name__ == "__main__":
    main()
