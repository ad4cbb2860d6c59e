"""How much a lookup through the ZeroMQ transport costs over a bare DEALER/ROUTER round trip on the same machine.

Run from the checkout: ``.venv/bin/python benchmarks/lookup_transport.py``. The server runs in a process of its own.
All ways carry the same bytes and take turns, so that other load on the machine meets each. The difference to the first
is what counts; where other work disturbs, that of p10 says most. *On an event loop* is the bare server, woken by anyio:
the floor for whatever serves from one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles

import anyio
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.hashes import BlockHashes
from kvpool.protocols.binary import BinaryCodec
from kvpool.registry import create_transport
from kvpool.transport import LookupRequest, LookupResult, PolledLookupClient

EPOCH = bytes(16)


def request(num_hashes: int, handler_us: int = 0) -> LookupRequest:
    """A lookup of so many 32-byte digests; ``local_tokens`` tells the benchmark's handler how long to wait."""
    hashes = BlockHashes(os.urandom(32 * num_hashes), 32, scheme="benchmark")
    return LookupRequest(EPOCH, EPOCH, 1 << 30, handler_us, hashes)


async def handler(lookup: LookupRequest) -> LookupResult:
    if lookup.local_tokens:
        await anyio.sleep(lookup.local_tokens / 1e6)
    return LookupResult(len(lookup.hashes), (len(lookup.hashes),), lookup.epoch, 1.0)


def serve(kind: str, address: str, loop: str) -> None:
    """The server's process: the transport, or a bare ROUTER that answers 100 bytes to anything."""
    if kind == "kvpool":

        async def main() -> None:
            async with create_transport(address).serve(handler):
                await anyio.sleep_forever()

        return anyio.run(main, backend=loop)

    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)

    def answer(flags: int = 0) -> None:
        identity, *_ = router.recv_multipart(flags, copy=False)
        router.send_multipart([identity, bytes(100)])

    async def answer_all() -> None:
        while True:
            await anyio.wait_readable(router.FD)
            while int(router.get(zmq.EVENTS)) & int(zmq.POLLIN):
                answer(zmq.NOBLOCK)

    if kind == "loop":
        return anyio.run(answer_all, backend=loop)
    while True:
        answer()


def one_lookup(client: PolledLookupClient, lookup: LookupRequest) -> None:
    ticket = client.submit(lookup, timeout=10)
    while not (done := client.poll(wait=1)):
        pass
    assert done[0][0] == ticket
    assert isinstance(done[0][1], LookupResult), done[0][1]


def burst(client: PolledLookupClient, lookup: LookupRequest, n: int) -> None:
    for _ in range(n):
        client.submit(lookup, timeout=10)
    left = n
    while left:
        done = client.poll(wait=1)
        assert all(isinstance(outcome, LookupResult) for _, outcome in done), done
        left -= len(done)


def measure(rounds: int, **ways: Callable[[], object]) -> dict[str, list[float]]:
    """Milliseconds of each way, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 20):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if i >= 20:  # warm
                times[name].append((time.perf_counter() - start) * 1000)
    return times


def show(title: str, times: dict[str, list[float]]) -> None:
    print(title)
    base = None
    for name, values in times.items():
        cuts = quantiles(values, n=100)
        p10, p50, p99 = cuts[9], cuts[49], cuts[98]
        base = base or (p10, p50)
        added = f"{p10 - base[0]:+.3f} at p10, {p50 - base[1]:+.3f} at p50"
        print(f"  {name:22} p10 {p10:7.3f}  p50 {p50:7.3f}  p99 {p99:7.3f} ms   {added}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--loop", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve[0], options.serve[1], options.loop)

    url = f"zmq+ipc://bench-{os.getpid()}"
    bare = {kind: f"ipc://@bench-{kind}-{os.getpid()}" for kind in ("bare", "loop")}
    command = [sys.executable, __file__, "--loop", options.loop, "--serve"]
    servers = [subprocess.Popen([*command, kind, address]) for kind, address in [*bare.items(), ("kvpool", url)]]
    client = create_transport(url).polled_client()
    dealers: dict[str, zmq.Socket[bytes]] = {kind: zmq.Context.instance().socket(zmq.DEALER) for kind in bare}
    for kind, dealer in dealers.items():
        dealer.connect(bare[kind])
    try:
        for num_hashes in (32, 18_064):
            lookup = request(num_hashes)
            frames = [bytes(150), b"".join(BinaryCodec().encode(lookup.hashes))]

            def bare_trip(kind: str, frames: list[bytes] = frames) -> None:
                dealers[kind].send_multipart(frames)
                while not dealers[kind].poll(1000):
                    pass
                dealers[kind].recv_multipart()

            ways = {
                "bare DEALER/ROUTER": partial(bare_trip, "bare"),
                "bare, on an event loop": partial(bare_trip, "loop"),
                "kvpool polled client": partial(one_lookup, client, lookup),
            }
            show(f"{num_hashes:,} hashes, {len(frames[1]):,} bytes, round trip", measure(options.rounds, **ways))
        slow = request(32, handler_us=2000)
        times = measure(
            options.rounds // 10, one=lambda: one_lookup(client, slow), many=lambda: burst(client, slow, 32)
        )
        show("a handler that takes 2 ms: 1 lookup, and 32 at once", times)
    finally:
        client.close()
        for dealer in dealers.values():
            dealer.close(0)
        for server in servers:
            server.kill()
            server.wait()
    return None


if __name__ == "__main__":
    main()
