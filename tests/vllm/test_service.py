"""A store, or a lookup address, that is not there when the engine starts: served without, and healed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import numpy as np
import pytest

from kvpool.config import Config
from kvpool.errors import KVPoolError, StoreError
from kvpool.hashes import chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout
from kvpool.pool import KVPool
from kvpool.registry import create_store, create_transport
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.transport import LookupRequest, LookupResult
from kvpool.vllm import service as service_module
from kvpool.vllm import worker as worker_module
from kvpool.vllm.messages import Job, Part, StepWork, WorkerReport
from kvpool.vllm.service import Service
from kvpool.vllm.worker import WorkerSide
from tests.redis.server import RedisServer
from tests.vllm.engine import Engine, prompt

BLOCK, EPOCH = 4, bytes(16)
SPEC = CacheSpec((CacheGroup(Kind.FULL, BLOCK),), BLOCK)
ENGINE = Namespace.of({"test": "service"})
HASHES = chain_hashes(np.arange(4 * BLOCK), BLOCK)


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_RETRY_S", 0.3)


# ---- the service alone


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.01)


def pool() -> KVPool:
    return KVPool(create_store("memory://"), spec=SPEC, namespace=ENGINE)


@pytest.mark.anyio
async def test_what_fails_to_open_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "RETRY_S", 0.01)
    tries = {"pool": 0, "server": 0}

    @asynccontextmanager
    async def fails_twice(name: str) -> AsyncIterator[Any]:
        tries[name] += 1
        if tries[name] < 3:
            raise OSError("not yet")
        if name == "server":
            yield None
        else:
            async with pool() as opened:
                yield opened

    with anyio.fail_after(20):
        async with Service(lambda: fails_twice("pool"), lambda: fails_twice("server")).run() as service:
            with pytest.raises(StoreError, match="not yet"):
                await service.pool()
            await until(lambda: tries == {"pool": 3, "server": 3} and service.is_open)
            assert isinstance(await service.pool(), KVPool)


@pytest.mark.anyio
async def test_a_pool_that_breaks_later_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "RETRY_S", 0.01)
    opened: list[KVPool] = []
    broken = anyio.Event()

    @asynccontextmanager
    async def breaks() -> AsyncIterator[KVPool]:
        async with anyio.create_task_group() as tasks, pool() as fresh:
            opened.append(fresh)
            if len(opened) == 1:
                tasks.start_soon(raise_after, broken)
            yield fresh

    async def raise_after(event: anyio.Event) -> None:
        await event.wait()
        raise OSError("the connection is gone")

    with anyio.fail_after(20):
        async with Service(breaks).run() as service:
            assert await service.pool() is opened[0]
            broken.set()
            await until(lambda: len(opened) == 2 and service.is_open)
            assert await service.pool() is opened[1]


@pytest.mark.anyio
async def test_an_opening_that_hangs_is_given_up_and_never_delays_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "RETRY_S", 0.01)
    monkeypatch.setattr(service_module, "OPEN_TIMEOUT_S", 0.05)
    tries = 0

    @asynccontextmanager
    async def hangs() -> AsyncIterator[KVPool]:
        nonlocal tries
        tries += 1
        if tries == 3:
            monkeypatch.setattr(service_module, "OPEN_TIMEOUT_S", 1000.0)
        await anyio.sleep_forever()
        yield pool()

    with anyio.fail_after(20):
        async with Service(hangs).run() as service:
            with pytest.raises(StoreError, match="did not open within"):
                await service.pool()
            await until(lambda: tries == 4)


# ---- a worker's half on it


@pytest.fixture
def workers() -> Iterator[Callable[..., WorkerSide]]:
    made: list[WorkerSide] = []

    def make(store: str | dict[str, str], transport: str = "", **config: Any) -> WorkerSide:
        options = {"url": transport} if transport else None
        side = WorkerSide(Config.load({"store": store, **config}), SPEC, options)
        side.start([BlockLayout.of_arrays(np.zeros((64, 32), np.uint8))], {"form": "test"})
        made.append(side)
        return side

    yield make
    for side in made:
        side.close()


def late(there: Path) -> str:
    return f"tests.vllm.hanging:LateStore?there={there}"


def saves(side: WorkerSide, number: int) -> bool:
    """One save job, stepped until it has ended: whether it was stored. Its blocks are released either way."""
    begin(side, number)
    return ends(side, number)


def begin(side: WorkerSide, number: int) -> None:
    ids = np.arange(4)
    given = StepWork(ENGINE.digest, EPOCH, [], [Job(number, "r", EPOCH, (Part(0, ids, HASHES, ids + 1),))], idle=True)
    side.submit(given)


def ends(side: WorkerSide, number: int) -> bool:
    end = time.monotonic() + 30
    total = WorkerReport()
    while number not in total.saved:
        assert time.monotonic() < end
        side.collect(StepWork(ENGINE.digest, EPOCH, idle=True))
        total = total.aggregate(side.take_report() or WorkerReport())
    assert total.released == {number: 1}
    return total.saved[number][1]


def saves_at_last(side: WorkerSide) -> None:
    end = time.monotonic() + 60
    number = 100
    while not saves(side, number):
        assert time.monotonic() < end, "the store is there, and the pool does not come back"
        number += 1
        time.sleep(0.05)


def test_a_store_that_opens_later(
    workers: Callable[..., WorkerSide], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvpool")
    side = workers(late(tmp_path / "there"))
    assert not saves(side, 1)
    assert side.counters()["failed_jobs"] == 1
    assert "the store: 1 opening failed" in caplog.text
    assert "job 1" not in caplog.text
    (tmp_path / "there").touch()
    saves_at_last(side)
    said = [r.getMessage() for r in caplog.records if "the store" in r.getMessage()]
    assert len(said) == 2, "once when it fails, however often it is tried, and once when it serves"
    assert "kvpool: the store: serves again" in said[1]


def test_a_folder_that_becomes_usable(workers: Callable[..., WorkerSide], tmp_path: Path) -> None:
    blocked = tmp_path / "mount"
    blocked.write_text("not mounted yet")
    side = workers(f"file://{blocked}/kv")
    assert not saves(side, 1)
    blocked.unlink()
    saves_at_last(side)


def test_a_redis_that_starts_later(workers: Callable[..., WorkerSide]) -> None:
    server = RedisServer()
    side = workers(f"redis://127.0.0.1:{server.port}", save_timeout_s=1)
    assert not saves(side, 1)
    with server:
        saves_at_last(side)


def test_lookups_are_misses_at_once_while_the_store_is_away(workers: Callable[..., WorkerSide], tmp_path: Path) -> None:
    url = f"zmq+ipc://kvpool-{uuid4().hex}"
    side = workers(late(tmp_path / "there"), url)
    assert ask(url).hit_length == 0
    assert side.counters()["lookups_without_store"] >= 1
    (tmp_path / "there").touch()
    saves_at_last(side)
    assert ask(url).hit_length == 4 * BLOCK


def test_a_lookup_address_that_is_taken_is_served_when_it_is_free(
    workers: Callable[..., WorkerSide], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"zmq+ipc://kvpool-{uuid4().hex}"
    first = workers(f"file://{tmp_path}/a", url)
    ask(url)  # it is there
    second = workers(f"file://{tmp_path}/b", url)
    assert saves(second, 1), "saves need no lookup server"
    end = time.monotonic() + 30
    while "the lookup server: 1 opening failed" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    first.close()
    while ask(url).hit_length == 0:
        assert time.monotonic() < end, "the address is free, and nobody answers"
        time.sleep(0.05)


# ---- sleep mode: the engine's memory goes and comes back


def test_an_engine_that_sleeps_and_wakes_goes_on(workers: Callable[..., WorkerSide], tmp_path: Path) -> None:
    url = f"zmq+ipc://kvpool-{uuid4().hex}"
    side = workers(f"file://{tmp_path}", url)
    assert saves(side, 1)
    for _ in range(3):
        side.suspend()
        side.suspend()
        side.resume()
        side.resume()
        assert ask(url).hit_length == 4 * BLOCK
    assert saves(side, 2)


def test_a_step_of_an_engine_that_sleeps_is_harmless(workers: Callable[..., WorkerSide], tmp_path: Path) -> None:
    """A request that is added to a sleeping engine makes it step."""
    side = workers(f"file://{tmp_path}")
    assert saves(side, 1)
    side.suspend()
    assert not saves(side, 2)
    side.resume()
    assert saves(side, 3)
    assert not any(side.outstanding().values())


def test_what_was_in_flight_when_it_fell_asleep_is_reported(workers: Callable[..., WorkerSide], tmp_path: Path) -> None:
    side = workers(faulty(tmp_path, kind="stuck", op="put"))
    begin(side, 1)
    side.suspend()
    side.resume()
    assert not ends(side, 1)
    assert not any(side.outstanding().values())


def test_it_must_not_sleep_while_the_store_may_touch_its_memory(
    workers: Callable[..., WorkerSide], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = workers(faulty(tmp_path, kind="deaf", op="put", seconds=2), save_timeout_s=0.1, deadline_grace_s=0)
    begin(side, 1)
    end = time.monotonic() + 30
    while not side.counters()["abandoned_calls"]:
        assert time.monotonic() < end
    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "CLOSE_TIMEOUT_S", 0.1)
        with pytest.raises(KVPoolError, match="must not sleep"):
            side.suspend()
    side.suspend()  # it has let go
    side.resume()
    assert not ends(side, 1)


def faulty(folder: Path, **fault: object) -> dict[str, str]:
    script = folder / "faults.json"
    script.write_text(json.dumps([fault]))
    return {"url": "kvpool.testing.faults:FaultyStore", "store": f"file://{folder}/kv", "script": str(script)}


def test_an_engine_that_starts_without_its_store(model: Path, tmp_path: Path) -> None:
    engine = Engine(model, {"store": late(tmp_path / "there")})
    try:
        tokens = prompt(320, seed=1)
        cold = engine.run(tokens)
        engine.assert_at_rest()
        assert engine.counters["saved_chunks"] == 0
        (tmp_path / "there").touch()
        end = time.monotonic() + 60
        while not engine.counters["saved_chunks"]:
            assert time.monotonic() < end, "the store is there, and the pool does not come back"
            engine.forget()
            engine.run(tokens)
            engine.drain()
        engine.forget()
        assert engine.run(tokens).near(cold)
        assert engine.counters["loaded_chunks"] > 0
        engine.assert_at_rest()
    finally:
        engine.close()


def ask(url: str) -> LookupResult:
    """A lookup, asked again until somebody answers."""
    client = create_transport({"url": url}).polled_client()
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            request = LookupRequest(ENGINE.digest, EPOCH, 4 * BLOCK + 1, 0, HASHES)
            client.submit(request, timeout=2)
            while not (done := client.poll(wait=1.0)):
                assert time.monotonic() < end
            if isinstance(result := done[0][1], LookupResult):
                return result
        raise AssertionError("nobody answers")
    finally:
        client.close()
