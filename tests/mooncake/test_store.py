"""What only a real client can show: bytes without a copy, settings that are ignored, and how processes end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator

import anyio
import numpy as np
import pytest

from kvpool.backends.mooncake import MooncakeStore
from kvpool.config import Config
from kvpool.hashes import chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout
from kvpool.pool import KVPool
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.testing.stores import get, put
from tests.mooncake.servers import Mooncake

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def mooncake() -> Iterator[Mooncake]:
    with Mooncake(memory=128 << 20) as mooncake:
        yield mooncake


@pytest.mark.parametrize("zero_copy", ["yes", "no"])
@pytest.mark.parametrize("checksum", ["xxh3_64", "none"])
@pytest.mark.parametrize("page", [40 << 10, 300 << 10])
async def test_blocks_survive_the_way_there_and_back(
    mooncake: Mooncake, zero_copy: str, checksum: str, page: int, anyio_backend_name: str
) -> None:
    """All layers in one allocation, as in vLLM: their spans overlap."""
    rng = np.random.default_rng(page)
    cache = rng.integers(0, 256, (16, 3, page), np.uint8)
    before = cache.copy()
    layers = [cache[:, i] for i in range(3)]
    spans = [np.lib.stride_tricks.as_strided(layer, (15 * 3 * page + page,), (1,)) for layer in layers]
    regions = BlockLayout.of_arrays(*(span[None] for span in spans)).regions
    layout = BlockLayout(
        regions,
        np.arange(3, dtype=np.intp),
        np.zeros(3, np.int64),
        np.full(3, 3 * page, np.int64),
        np.full(3, page, np.int64),
        16,
    )
    spec = CacheSpec((CacheGroup(Kind.FULL, 4),), 4)
    config = Config.load({"staging_bytes": "32MiB", "batch_bytes": "4MiB"}, environ={})
    prefix = f"{anyio_backend_name}/{zero_copy}/{checksum}/{page}:"
    store = MooncakeStore(f"{mooncake.url}?zero_copy={zero_copy}&checksum={checksum}&prefix={prefix}")
    async with KVPool(store, spec=spec, namespace=Namespace.of({"t": 1}), layouts=[layout], config=config) as pool:
        hashes = chain_hashes(list(range(32)), 4)
        assert (await pool.save([pool.transfer(0, hashes, range(8), range(8))]))[0].ok.all()
        assert (await pool.lookup(hashes, 33)).length == 32
        cache[8:] = 0
        target = [15, 8, 14, 9, 13, 10, 12, 11]
        assert (await pool.load([pool.transfer(0, hashes, range(8), target)]))[0].ok.all()
        assert np.array_equal(cache[target], before[:8])
        assert np.array_equal(cache[:8], before[:8])
        assert (pool.staging.peak == 0) == (zero_copy == "yes")


async def test_settings_that_mooncake_ignores_are_said(mooncake: Mooncake, caplog: pytest.LogCaptureFixture) -> None:
    options = "protocol=rdma&replicas=3&preferred_segment=10.9.9.9:1&tenant=blue"
    async with MooncakeStore(f"{mooncake.url}?{options}") as store:
        for words in ("no RDMA device", "Mooncake made 1", "preferred_segment=10.9.9.9:1 is ignored", "tenant=blue"):
            assert words in caplog.text
        assert (await put(store, [("a", b"1")])).ok.all()
        assert (await get(store, ["a"], [1]))[0].ok.all()
        assert not store.capabilities.zero_copy


async def test_replicas_and_segments_that_are_there_are_not_complained_of(caplog: pytest.LogCaptureFixture) -> None:
    with Mooncake(owners=2, memory=32 << 20) as two:
        async with MooncakeStore(f"{two.url}?replicas=2&preferred_segment=127.0.0.1:1&soft_pin=true") as store:
            assert (await put(store, [("a", b"1")])).ok.all()
    assert "ignored" not in caplog.text
    assert "replicas" not in caplog.text


async def test_a_store_can_lend_memory_itself() -> None:
    with Mooncake(owners=0) as alone:
        async with MooncakeStore(f"{alone.url}?segment=32MiB") as store:
            assert (await put(store, [("a", b"12345")])).ok.all()
            async with MooncakeStore(alone.url) as other:
                assert (await get(other, ["a"], [5]))[1] == [b"12345"]


async def test_a_client_is_set_up_once_and_used_again(mooncake: Mooncake) -> None:
    """Setting up and closing hold the interpreter's lock, so that nothing else runs in the process."""
    natives = set()
    threads = []
    for _ in range(5):
        async with MooncakeStore(mooncake.url) as store:
            natives.add(id(store._link.client().native))
            await put(store, [("a", b"1")])
        threads.append(len(os.listdir("/proc/self/task")))
    assert len(natives) == 1
    assert threads[-1] < threads[0] + 20, "a client has about 30"


async def test_a_client_that_lends_memory_is_freed_when_it_is_closed() -> None:
    with Mooncake(owners=0) as alone:
        async with MooncakeStore(f"{alone.url}?segment=16MiB") as store:
            await put(store, [("a", b"1")])
            native = weakref.ref(store._link.client().native)
        del store
        gc.collect()
        assert native() is None


async def test_clients_that_cannot_be_set_up_leave_no_threads(mooncake: Mooncake) -> None:
    threads = []
    for _ in range(4):
        async with MooncakeStore(f"{mooncake.url}?segment=100TiB") as store:
            results = await put(store, [("a", b"1")])
            assert "setting up a client" in str(results.errors[0])
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[-1] < threads[0] + 10, "a client has about 20 then"


_FORKS = """
import multiprocessing, sys, anyio
from kvpool.backends.mooncake import MooncakeStore
from kvpool.errors import ConfigError

async def use(url):
    async with MooncakeStore(url):
        pass

def child(url):
    try:
        anyio.run(use, url)
    except ConfigError as error:
        sys.exit(8 if "spawn" in str(error) else 1)

if __name__ == "__main__":
    anyio.run(use, sys.argv[1])
    process = multiprocessing.get_context("fork").Process(target=child, args=sys.argv[1:])
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


async def test_a_forked_child_is_refused_where_it_would_hang(mooncake: Mooncake) -> None:
    command = [sys.executable, "-c", _FORKS, mooncake.url]
    ended = await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    )
    assert ended.returncode == 8, ended.stderr


_ENDS = """
import os, sys, anyio
from kvpool.backends.mooncake import MooncakeStore
from kvpool.memory import Buffers

async def main(url, how):
    store = MooncakeStore(url)
    await store.__aenter__()
    assert (await store.put(["end/" + how], Buffers.of(bytearray(10)))).ok.all()
    if how == "open":
        sys.exit(7)  # with an open store
    await store.__aexit__(None, None, None)

anyio.run(main, *sys.argv[1:])
if sys.argv[2] == "forked" and not os.fork():
    sys.exit(7)  # a child has the client, but not its threads
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) if sys.argv[2] == "forked" else 7)
"""


@pytest.mark.parametrize("how", ["open", "closed", "forked"])
async def test_a_process_ends_with_its_own_exit_code(mooncake: Mooncake, how: str) -> None:
    command = [sys.executable, "-c", _ENDS, mooncake.url, how]
    ended = await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    )
    assert ended.returncode == 7, ended.stderr
