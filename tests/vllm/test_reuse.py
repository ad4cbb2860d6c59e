"""A real engine reuses its KV cache through kvpool, bit for bit.

The oracle: a request served by an external hit gives tokens and log probabilities bitwise equal to the same request
served by vLLM's own local prefix hit. Cold against cached may differ by rounding, since the sums run in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.redis.server import RedisServer
from tests.vllm.engine import BLOCK, Engine, Output, prompt
from tests.vllm.faults import damaged_loads
from tests.vllm.models import WINDOW
from tests.vllm.other_process import run_engine, run_phases


def _kinds(*short: str) -> list[Any]:
    """Every model on every store as ``model-store``; all but ``short`` take part in the long tests only."""
    every = [f"{model}-{store}" for model in ("model", "hybrid_model") for store in ("memory", "file", "redis")]
    return [kind if kind in short else pytest.param(kind, marks=pytest.mark.long) for kind in every]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URLs of stores that are there for these tests."""
    with RedisServer() as server:
        yield {"memory": "memory://", "file": f"file://{tmp_path_factory.mktemp('store')}", "redis": server.url}


# The file store has its turn with both models when processes share.
@pytest.fixture(scope="module", params=_kinds("model-memory", "hybrid_model-redis"))
def engine(request: pytest.FixtureRequest, stores: dict[str, str]) -> Iterator[Engine]:
    model, store = request.param.split("-")
    engine = Engine(request.getfixturevalue(model), {"store": stores[store]}, kv_bytes=64 << 20)
    yield engine
    engine.close()


def test_an_external_hit_is_bitwise_equal_to_a_local_hit(engine: Engine) -> None:
    tokens = prompt(1000, seed=1)
    cold = engine.run(tokens)
    engine.drain()
    local = engine.run(tokens)
    engine.forget()
    external = engine.run(tokens)
    assert cold.cached == 0
    assert external.cached == local.cached == 1000 // BLOCK * BLOCK
    assert external.like(local)
    assert external.near(cold)
    engine.assert_at_rest()


def test_only_what_the_engine_does_not_hold_is_loaded(engine: Engine) -> None:
    start = prompt(512, seed=2)
    whole = prompt(1000, seed=3, start=start)
    engine.run(whole)
    engine.drain()
    local = engine.run(whole)
    engine.forget()
    engine.run(start, output=1)  # now the engine holds the first part by itself (loaded), the rest is only in the store
    before = engine.counters
    partly = engine.run(whole)
    # With several groups vLLM keeps of a prompt what its own replay needs, which is one block less.
    local_tokens = 512 if engine.groups == 1 else 480
    beyond = range(local_tokens // BLOCK, 1000 // BLOCK)
    full, window = len(beyond), sum(1 for chunk in beyond if (chunk + 1) * BLOCK > 992 - WINDOW + 1)
    expected = [full] if engine.groups == 1 else [full, window, window]
    assert engine.counters["loaded_chunks"] - before["loaded_chunks"] == sum(expected)
    assert partly.cached == local.cached
    assert partly.like(local)
    engine.assert_at_rest()


def test_a_wrong_block_changes_the_output(engine: Engine) -> None:
    """Negative control: if loaded bytes did not matter, the tests above would prove nothing."""
    tokens = prompt(1000, seed=4)
    engine.run(tokens)
    engine.drain()
    local = engine.run(tokens)
    engine.forget()
    reversed_blocks: list[int] = []

    def reverse_one(block_ids: Any, rows: Any) -> Any:
        if reversed_blocks:
            return ()
        rows[3] = rows[3][::-1]
        reversed_blocks.append(int(block_ids[3]))
        return reversed_blocks

    with damaged_loads(engine.worker.layouts[-1], reverse_one) as wrong:  # the full-attention group
        damaged = engine.run(tokens)
    assert wrong
    assert damaged.cached == local.cached
    assert not damaged.near(local)
    engine.forget()


def test_a_salt_keeps_requests_apart(engine: Engine) -> None:
    tokens = prompt(500, seed=5)
    engine.run(tokens, salt="a")
    engine.forget()
    assert engine.run(tokens, salt="b").cached == 0
    engine.forget()
    assert engine.run(tokens, salt="a").cached == 500 // BLOCK * BLOCK
    engine.assert_at_rest()


def test_a_whole_prompt_in_the_store_still_leaves_the_last_token_to_compute(engine: Engine) -> None:
    tokens = prompt(BLOCK * 8, seed=6)
    engine.run(tokens)
    engine.drain()
    local = engine.run(tokens)
    engine.forget()
    external = engine.run(tokens)
    assert external.cached == local.cached == BLOCK * 7
    assert external.like(local)
    engine.assert_at_rest()


def test_short_and_single_token_prompts_touch_nothing(engine: Engine) -> None:
    before = engine.counters
    for length in (1, 2, BLOCK - 1):
        engine.run(prompt(length, seed=length))
    after = engine.counters
    assert {k: after[k] - before[k] for k in ("lookups", "save_jobs", "load_jobs")} == {
        "lookups": 0,
        "save_jobs": 0,
        "load_jobs": 0,
    }
    engine.assert_at_rest()


def test_chunked_prefill_saves_each_block_once(engine: Engine) -> None:
    before = engine.counters
    tokens = prompt(2000, seed=7)
    names = [engine.add(prompt(1500, seed=8)), engine.add(tokens)]  # together more than one step may compute
    engine.finish(names)
    engine.drain()
    saved = engine.counters["saved_chunks"] - before["saved_chunks"]
    every = 1500 // BLOCK + 2000 // BLOCK
    # Sliding-window groups store the tails that a later hit needs, and not the rest.
    assert saved == every if engine.groups == 1 else every < saved < 2 * every
    engine.assert_at_rest()


def _shared(*short: str) -> list[Any]:
    """Models on stores that processes share, in one process each and with a worker process of its own."""
    kinds = [
        f"{model}-{store}-{processes}"
        for model in ("model", "hybrid_model", "mamba_model")
        for store in ("file", "redis")
        for processes in ("one", "worker")
    ]
    return [kind if kind in short else pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


#: Tokens of the prompt of 1000 that whole blocks hold; vLLM makes them as large as a state.
CACHED = {"model": 992, "hybrid_model": 992, "mamba_model": 864}


@pytest.mark.parametrize("kind", _shared("hybrid_model-redis-one", "mamba_model-file-worker"))
def test_a_second_engine_loads_what_a_first_one_saved(
    kind: str, stores: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """The first engine computes, saves and ends; a second, other process answers bitwise as the first's local hit."""
    name, store, processes = kind.split("-")
    model = request.getfixturevalue(name)
    first = run_engine(model, stores[store], "local", processes == "worker")
    second = run_engine(model, stores[store], "external", processes == "worker")
    assert second["cached"] == CACHED[name]
    assert second == first


#: Tensor and pipeline parallel.
RANKS = {"tensor": (2, 1), "pipeline": (1, 2)}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("hybrid_model", "tensor"),
        ("hybrid_model", "pipeline"),
        pytest.param("mamba_model", "tensor", marks=pytest.mark.long),
        pytest.param("mamba_model", "pipeline", marks=pytest.mark.long),
    ],
)
def test_ranks_load_their_own_shards(name: str, ranks: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Two ranks: what is stored is there once a rank, and comes back bit for bit when both have forgotten it."""
    model = request.getfixturevalue(name)
    local, external = run_phases(model, f"file://{tmp_path}", "both", True, *RANKS[ranks])
    objects = [p for p in tmp_path.rglob("*") if p.is_file() and p.parent.parent.name.endswith((".0", ".1"))]
    shards = {p.parent.parent.name for p in objects}
    assert {shard.split(".")[1] for shard in shards} == {"0", "1"}
    assert len(shards) == 2 * len({shard.split(".")[0] for shard in shards})
    assert external["cached"] == CACHED[name]
    assert external == local


@pytest.mark.long
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("store", ["file", "redis"])
def test_ranks_of_another_engine_load_what_those_of_the_first_saved(
    hybrid_model: Path, tmp_path: Path, stores: dict[str, str], store: str, ranks: str
) -> None:
    url = f"file://{tmp_path}" if store == "file" else f"{stores[store]}?prefix={tmp_path.name}:"
    first = run_engine(hybrid_model, url, "local", True, *RANKS[ranks])
    second = run_engine(hybrid_model, url, "external", True, *RANKS[ranks])
    assert second["cached"] == CACHED["hybrid_model"]
    assert second == first


def test_outputs_do_not_change_with_the_pool(engine: Engine) -> None:
    """A salted copy of each prompt runs without reuse; with reuse the tokens are the same."""
    outputs: list[tuple[Output, Output]] = []
    for seed in range(10, 14):
        tokens = prompt(300 + 50 * seed, seed=seed)
        cold = engine.run(tokens)
        engine.forget()
        outputs.append((cold, engine.run(tokens)))
    assert all(reused.cached > 0 and reused.near(cold) for cold, reused in outputs)
    engine.assert_at_rest()
