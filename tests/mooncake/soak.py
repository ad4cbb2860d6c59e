"""Traffic for minutes while things break at random: no crash, no hang, no wrong byte, memory and descriptors flat.

``python -m tests.mooncake.namespace python -m tests.mooncake.soak SECONDS [SEED] [--zero-copy]`` prints a line for each
fault. The exit code is 0 if no byte was wrong. With ``--zero-copy`` Mooncake reads and writes the traffic's own memory.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import anyio
import numpy as np

from kvpool.backends.mooncake import MooncakeStore
from kvpool.memory import Region
from kvpool.registry import create_store
from kvpool.store import Store
from tests.mooncake.faults import start
from tests.mooncake.servers import ROOT, Mooncake
from tests.mooncake.traffic import ROOM, Seen, Traffic
from tests.process import die_with_parent

__all__ = ["Report", "soak"]

PATIENCE_S = 90.0  # what takes longer to recover hangs
LONGEST_S = 2.0  # of a fault
STORE = "?timeout_s=2&hang_s=5"


@dataclass(frozen=True)
class Use:
    """What this process uses at a moment when all is well."""

    mib: float
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Use:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tasks = sum(1 for _ in Path("/proc/self/task").iterdir())
        return cls(pages * 4096 / 2**20, sum(1 for _ in Path("/proc/self/fd").iterdir()), tasks)


@dataclass
class Report:
    """``uses``: after each fault. ``recovered_s``: the longest recovery. ``seen``: of each store that was open."""

    faults: Counter[str] = field(default_factory=Counter)
    uses: list[Use] = field(default_factory=list)
    recovered_s: float = 0.0
    seen: list[Seen] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [key for seen in self.seen for key in seen.wrong]

    @property
    def growth(self) -> Use:
        """From the first third of the uses to the last third, by their medians."""
        third = max(1, len(self.uses) // 3)

        def rise(of: Callable[[Use], float]) -> float:
            early, late = sorted(map(of, self.uses[:third])), sorted(map(of, self.uses[-third:]))
            return late[len(late) // 2] - early[len(early) // 2]

        return Use(rise(lambda u: u.mib), int(rise(lambda u: u.descriptors)), int(rise(lambda u: u.threads)))


async def soak(
    seconds: float, seed: int, say: Callable[[str], None] = lambda text: None, *, zero_copy: bool = False
) -> Report:
    """Raises TimeoutError if a fault does not heal, RuntimeError if the other process fails."""
    with Mooncake(owners=2, memory=64 << 20) as mooncake, Neighbour(mooncake.url) as neighbour:
        return await Soak(mooncake, neighbour, seed, say, zero_copy).run(seconds)


class Neighbour:
    """Another process with traffic of its own, which puts the same values as this one."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.mooncake.soak", "neighbour", self._url]
        self._process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def restart(self) -> None:
        """Kill it wherever it is, and start it again. Raises RuntimeError if it had ended by itself."""
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"the other process has ended (exit code {code})")
        self._process.kill()
        self._process.wait()
        self.start()


class Soak:
    def __init__(
        self, mooncake: Mooncake, neighbour: Neighbour, seed: int, say: Callable[[str], None], zero_copy: bool
    ) -> None:
        self._mooncake = mooncake
        self._zero_copy = zero_copy
        self._neighbour = neighbour
        self._choose = random.Random(seed)
        self._say = say
        self._report = Report()
        self._faults = (
            self._master_frozen,
            self._master_killed,
            self._owner_frozen,
            self._owner_killed,
            self._neighbour_killed,
            self._calls_cancelled,
        )

    async def run(self, seconds: float) -> Report:
        end = time.monotonic() + seconds
        lives = 0
        while time.monotonic() < end:
            lives += 1
            # The store closes while there is traffic on it.
            async with (
                anyio.create_task_group() as tasks,
                MooncakeStore(self._mooncake.url + STORE + "&zero_copy=yes" * self._zero_copy) as store,
            ):
                rooms = [np.zeros(ROOM, np.uint8) for _ in range(2)] if self._zero_copy else [None, None]
                await store.register([Region.of(room) for room in rooms if room is not None])
                traffic = [Traffic(store, f"{lives}/{n}", n, room) for n, room in enumerate(rooms)]
                self._report.seen += [each.seen for each in traffic]
                for each in traffic:
                    tasks.start_soon(each.run)
                for _ in range(self._choose.randint(3, 8)):
                    if time.monotonic() < end:
                        await self._one(store, traffic)
        return self._report

    async def _one(self, store: Store, traffic: list[Traffic]) -> None:
        """One fault, from which all must recover."""
        fault = self._choose.choice(self._faults)
        begin = time.monotonic()
        with anyio.fail_after(PATIENCE_S + 4 * LONGEST_S):
            await fault(store)
            broken = time.monotonic()
            for each in traffic:
                await each.recovered()
        took = time.monotonic() - broken
        name = fault.__name__.strip("_").replace("_", " ")
        self._report.faults[name] += 1
        self._report.recovered_s = max(self._report.recovered_s, took)
        use = Use.now()
        self._report.uses.append(use)
        self._say(
            f"{name:16} for {broken - begin:4.1f} s, well again after {took:4.1f} s; "
            f"{use.mib:4.0f} MiB, {use.descriptors} descriptors, {use.threads} threads"
        )

    async def _master_frozen(self, store: Store) -> None:
        with self._mooncake.master.frozen():
            await self._a_while()

    async def _master_killed(self, store: Store) -> None:
        self._mooncake.master.kill()
        await self._a_while()
        await start(self._mooncake.master)

    async def _owner_frozen(self, store: Store) -> None:
        with self._choose.choice(self._mooncake.owners).frozen():
            await self._a_while(4 * LONGEST_S)  # the master may forget it meanwhile, and transfers time out

    async def _owner_killed(self, store: Store) -> None:
        owner = self._choose.choice(self._mooncake.owners)
        owner.kill()
        await self._a_while()
        await start(owner)

    async def _neighbour_killed(self, store: Store) -> None:
        await self._a_while()
        self._neighbour.restart()

    async def _calls_cancelled(self, store: Store) -> None:
        for n in range(20):
            traffic = Traffic(store, f"cancelled/{n}", n)
            self._report.seen.append(traffic.seen)
            with anyio.move_on_after(self._choose.uniform(0, 0.05)):
                await traffic.round()

    async def _a_while(self, longest: float = LONGEST_S) -> None:
        await anyio.sleep(self._choose.uniform(0, longest))


async def neighbour(url: str) -> None:
    async with create_store(url + STORE) as store:
        traffic = Traffic(store, "1/0")
        while True:
            await traffic.round()
            assert not traffic.seen.wrong, traffic.seen.wrong


def main(seconds: float, seed: int, zero_copy: bool) -> None:
    report = anyio.run(lambda: soak(seconds, seed, lambda text: print(text, flush=True), zero_copy=zero_copy))
    rounds = sum(seen.rounds for seen in report.seen)
    values = sum(seen.statuses["get"]["OK"] for seen in report.seen)
    print(f"seed {seed}: {report.faults.total()} faults, {rounds:,} rounds, {values:,} values loaded and compared")
    print(f"wrong: {len(report.wrong)}; longest recovery {report.recovered_s:.1f} s; growth {report.growth}")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    if sys.argv[1] == "neighbour":
        anyio.run(neighbour, sys.argv[2])
    else:
        numbers = [word for word in sys.argv[1:] if word != "--zero-copy"]
        seed = int(numbers[1]) if len(numbers) > 1 else random.randrange(1 << 16)
        main(float(numbers[0]), seed, "--zero-copy" in sys.argv)
