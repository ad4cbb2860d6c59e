"""Jobs past their deadline whose memory Mooncake still uses: zero copy, and an owner that is frozen while it is asked.

Until the call has come back the blocks are nobody else's, and the engine goes on in all the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mooncake.servers import Mooncake
from tests.vllm.engine import BLOCK, Engine, Output, prompt

LENGTH = 1500  # of the other prompts


@pytest.fixture(scope="module")
def mooncake() -> Iterator[Mooncake]:
    """The master does not forget the owner meanwhile."""
    with Mooncake(client_ttl=600) as mooncake:
        yield mooncake


@pytest.fixture(scope="module")
def engine(model: Path, mooncake: Mooncake) -> Iterator[Engine]:
    store = f"{mooncake.url}?zero_copy=yes&failed_key_s=0&presence_cache_s=0"
    engine = Engine(model, {"store": store, "load_timeout_s": 0.5, "save_timeout_s": 0.5}, kv_bytes=16 << 20)
    yield engine
    engine.close()


def computed(engine: Engine, seed: int) -> list[tuple[list[int], Output]]:
    """Prompts that need all of the engine's blocks, and some twice, and what they give."""
    prompts = [prompt(LENGTH, seed + i) for i in range(engine.pool.num_gpu_blocks * BLOCK // LENGTH + 1)]
    return [(tokens, engine.run(tokens, salt="apart")) for tokens in prompts]


def heals(engine: Engine, tokens: list[int], local: Output) -> None:
    """What is computed can be saved and loaded again, and is right whenever it is."""
    again, whole = local, len(tokens) // BLOCK * BLOCK
    for _ in range(200):  # the owner counts as silent for a little while
        engine.forget()
        again = engine.run(tokens)
        if again.cached == whole:
            break
    assert again.cached == whole
    assert again.like(local)
    engine.assert_at_rest()


@pytest.mark.parametrize(
    ("end", "length"),
    [
        ("bytes come late", 1000),
        ("bytes never come", 70),  # Mooncake gives up one piece after the other, 3 s each
        ("aborted", 1000),
    ],
)
def test_a_load(engine: Engine, mooncake: Mooncake, end: str, length: int) -> None:
    [owner] = mooncake.owners
    asked = prompt(length, seed=1)
    others = computed(engine, seed=100 * len(end))
    cold = engine.run(asked)
    engine.drain()
    local = engine.run(asked)
    engine.forget()
    loading = engine.worker.outstanding
    with owner.frozen():
        name = engine.add(asked)
        engine.step_until(lambda: loading()["loads"])
        engine.step_until(lambda: not engine.worker._expiry)
        assert loading()["loads"] == 1, "it is cancelled, and has not ended"
        free = engine.pool.get_num_free_blocks()
        if end == "aborted":
            engine.abort(name)
        assert engine.pool.get_num_free_blocks() == free <= engine.pool.num_gpu_blocks - 1 - length // BLOCK
        done = {}
        if end == "bytes never come":
            done = engine.finish([name])
        for tokens, wanted in others[:1]:
            other = engine.add(tokens)
            done |= engine.finish([other])
            assert done[other].near(wanted)
    for tokens, wanted in others:
        other = engine.add(tokens)
        done |= engine.finish([other])
        assert done[other].near(wanted), "it computes in all blocks that can be had"
    if end != "aborted":
        output = (done if name in done else engine.finish([name]))[name]
        assert output.cached == 0
        assert output.near(cold)
    engine.assert_at_rest()
    heals(engine, asked, local)


def test_a_save(engine: Engine, mooncake: Mooncake) -> None:
    [owner] = mooncake.owners
    others, tokens, fresh = computed(engine, seed=2000), prompt(1000, seed=3000), prompt(1000, seed=4000)
    engine.run(fresh)
    engine.drain()
    heals(engine, fresh, engine.run(fresh))  # puts come through: the next is not refused at once
    engine.drain()
    before = engine.connector.counters.quarantined_saves
    with owner.frozen():
        cold = engine.run(tokens)
        engine.drain()
        assert engine.connector.counters.quarantined_saves > before, "nobody waits for it"
        assert engine.connector.outstanding()["saves"], "and its blocks are still pinned"
        pinned = engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()
        assert pinned >= 1
    for each, wanted in others:
        assert engine.run(each).near(wanted), "it computes in all blocks that can be had"
    engine.drain()
    local = engine.run(tokens)
    assert local.near(cold)
    heals(engine, tokens, local)
