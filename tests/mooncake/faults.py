"""What a user of a Mooncake store sees while something is broken, and how long it takes to recover.

``python -m tests.mooncake.namespace python -m tests.mooncake.faults [-v] [NAME...]`` plays the scenarios and prints the
table of docs/mooncake.md; tests/mooncake/test_faults.py plays them too, and checks what must hold in all of them.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import anyio
import anyio.to_thread

from kvpool.memory import Buffers
from kvpool.registry import create_store
from kvpool.store import Status, Store
from tests.mooncake.servers import ROOT, Master, Mooncake, Owner
from tests.mooncake.traffic import Seen, Traffic, value_of

__all__ = ["SCENARIOS", "Outcome", "play"]

BROKEN_S = 3.0  # how long something stays broken, where it can be chosen
MIB = 1 << 20


@dataclass
class Stage:
    """What a scenario acts on. ``traffic`` runs all the while; ``store`` is what it runs on."""

    mooncake: Mooncake
    store: Store
    traffic: Traffic


@dataclass(frozen=True)
class Outcome:
    """``recovered_s``: from the end of the fault (or its begin, if it stays) until all was well."""

    what: str
    seen: Seen
    recovered_s: float


#: Breaks something and, where it can be mended, mends it. It may give the seconds that recovery took by itself.
Act: TypeAlias = Callable[[Stage], Awaitable[float | None]]


@dataclass(frozen=True)
class Scenario:
    """What happens, and what the servers and the store are started with. Everything must be well again at the end."""

    what: str
    act: Act
    owners: int = 2
    memory: int = 64 * MIB
    lease: str = "2s"
    forgotten_s: int = 3  # an owner is, when it has been silent for so long


async def play(scenario: Scenario) -> Outcome:
    """Play it with servers of its own. Raises TimeoutError if it does not recover."""
    seen, seconds = Seen(), math.nan
    options: dict[str, str | int | bool] = {"default_kv_lease_ttl": scenario.lease, "client_ttl": scenario.forgotten_s}
    with Mooncake(scenario.owners, scenario.memory, **options) as mooncake:
        with anyio.fail_after(120):
            async with create_store(mooncake.url) as store, anyio.create_task_group() as tasks:
                traffic = Traffic(store)
                tasks.start_soon(traffic.run)
                await traffic.recovered()
                assert not traffic.seen.wrong
                traffic.seen = seen
                took = await scenario.act(Stage(mooncake, store, traffic))
                seconds = await traffic.recovered()
                seconds = seconds if took is None else took
                tasks.cancel_scope.cancel()
    return Outcome(scenario.what, seen, seconds)


async def start(server: Master | Owner) -> None:
    """Start it again while the traffic goes on."""
    server.launch()
    await anyio.to_thread.run_sync(server.wait)


async def master_killed(stage: Stage) -> None:
    stage.mooncake.master.kill()
    await anyio.sleep(BROKEN_S)
    await start(stage.mooncake.master)


async def master_restarted(stage: Stage) -> None:
    stage.mooncake.master.kill()
    await start(stage.mooncake.master)


async def master_frozen(stage: Stage) -> None:
    with stage.mooncake.master.frozen():
        await anyio.sleep(BROKEN_S)


async def owner_killed(stage: Stage) -> None:
    stage.mooncake.owners[0].kill()


async def only_owner_killed(stage: Stage) -> None:
    stage.mooncake.owners[0].kill()
    await anyio.sleep(BROKEN_S)
    await start(stage.mooncake.owners[0])


async def owner_frozen(stage: Stage) -> None:
    with stage.mooncake.owners[0].frozen():
        await anyio.sleep(BROKEN_S)


async def owner_frozen_for_long(stage: Stage) -> None:
    with stage.mooncake.owners[0].frozen():
        await anyio.sleep(4 * BROKEN_S)


async def store_full(stage: Stage) -> None:
    """Values that are leased all the while cannot be evicted, so there is no room for others."""
    keys = [f"large/{i}/3" for i in range(400)]
    for key in keys:
        results = await stage.store.put([key], Buffers.of(value_of(key)))
        if results.status[0] == Status.REJECTED:
            break
        await stage.store.exists([key])
    else:
        raise AssertionError("the store was never full")


async def leases_end(stage: Stage) -> None:
    """Owners that are slow while they are read, so that leases end in the middle of a transfer."""
    for _ in range(20):
        for owner in stage.mooncake.owners:
            owner.signal(signal.SIGSTOP)
        await anyio.sleep(0.1)
        for owner in stage.mooncake.owners:
            owner.signal(signal.SIGCONT)
        await anyio.sleep(0.05)


async def writer_killed(stage: Stage) -> float:
    """Another process is killed while the owners do not take what it puts; the same values are put again by this one,
    until they are there. The seconds that took."""
    keys = [f"half/{i}/3" for i in range(32)]
    with _writer(stage.mooncake.url, keys) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        await anyio.to_thread.run_sync(writer.stdout.readline)  # it is connected
        for owner in stage.mooncake.owners:
            owner.signal(signal.SIGSTOP)
        writer.stdin.write(b"now\n")
        writer.stdin.flush()
        await anyio.to_thread.run_sync(writer.stdout.readline)
        await anyio.sleep(0.5)
        writer.kill()
        for owner in stage.mooncake.owners:
            owner.signal(signal.SIGCONT)
    begin = time.monotonic()
    while True:
        if await _came_through(stage, keys):
            return time.monotonic() - begin
        await anyio.sleep(0.1)


def _writer(url: str, keys: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.mooncake.faults", "write", url, *keys]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def _came_through(stage: Stage, keys: list[str]) -> bool:
    """Put these values, and get them; whether all of them were there, and right."""
    traffic = stage.traffic
    put, got = await traffic.put(keys), await traffic.get(keys)
    return all(put) and all(got)


async def many_calls(stage: Stage) -> None:
    """Far more calls at once than there are threads, and more pieces than Mooncake's queues take by default."""

    async def one(n: int) -> None:
        keys = [f"many/{n}/{i}/0" for i in range(100)]
        await stage.store.put(keys, Buffers.of(*map(value_of, keys)))
        await stage.traffic.get(keys)

    async with anyio.create_task_group() as tasks:
        for n in range(40):
            tasks.start_soon(one, n)


SCENARIOS = {
    scenario.act.__name__: scenario
    for scenario in (
        Scenario(f"The master is killed, and started again after {BROKEN_S:g} s", master_killed),
        Scenario("The master is restarted at once", master_restarted),
        Scenario(f"The master is frozen for {BROKEN_S:g} s", master_frozen),
        Scenario("One of two owners is killed", owner_killed),
        Scenario(f"The only owner is killed, and started again after {BROKEN_S:g} s", only_owner_killed, owners=1),
        Scenario(f"One of two owners is frozen for {BROKEN_S:g} s", owner_frozen),
        Scenario(
            f"One of two owners is frozen for {4 * BROKEN_S:g} s, and not forgotten",
            owner_frozen_for_long,
            forgotten_s=60,
        ),
        Scenario("The store is full of leased values", store_full, owners=1, memory=32 * MIB),
        Scenario("Leases of 50 ms end in the middle of transfers", leases_end, lease="50ms"),
        Scenario("A writer is killed in the middle of a put", writer_killed),
        Scenario("40 calls of 100 values at once", many_calls),
    )
}


async def write(url: str, keys: list[str]) -> None:
    """The writer that is killed."""
    values = Buffers.of(*map(value_of, keys))
    async with create_store(url) as store:
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        print("putting", flush=True)
        await store.put(keys, values)


def main(names: list[str]) -> None:
    print("| | put | lookup | load | slowest call | well again after |\n|---|---|---|---|---|---|")
    for name in names or SCENARIOS:
        outcome = anyio.run(play, SCENARIOS[name])
        ops = (outcome.seen.statuses[op] for op in ("put", "exists", "get"))
        cells = [", ".join(f"{status} {n}" for status, n in sorted(counts.items())) for counts in ops]
        times = [f"{outcome.seen.slowest_s:.2f} s", f"{outcome.recovered_s:.1f} s"]
        print("|", " | ".join([outcome.what, *cells, *times]), "|", flush=True)
        for error, n in outcome.seen.errors.most_common(5) if "-v" in sys.argv else ():
            print(f"    {n}x {error}")
        assert not outcome.seen.wrong, outcome.seen.wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        anyio.run(write, sys.argv[2], sys.argv[3:])
    else:
        main([name for name in sys.argv[1:] if name != "-v"])
