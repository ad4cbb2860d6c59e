"""Aborts, reuse of ids and stores that misbehave: every request ends, no block leaks, no state stays behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.vllm.engine import BLOCK, Engine, Output, environment, prompt
from tests.vllm.faults import Faults


@pytest.fixture(scope="module", params=["model", pytest.param("hybrid_model", marks=pytest.mark.long)])
def engine(
    request: pytest.FixtureRequest, faults: Faults, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    model: Path = request.getfixturevalue(request.param)
    store = f"file://{tmp_path_factory.mktemp('store')}"
    timeouts = {"load_timeout_s": 1, "save_timeout_s": 1, "lookup_timeout_ms": 1000, "failed_key_ttl_s": 0}
    config = {"store": faults.url(store), **timeouts}
    engine = Engine(model, config, kv_bytes=64 << 20, max_num_batched_tokens=512)  # prompts are computed in pieces
    yield engine
    engine.close()


def test_what_vllm_sets_for_an_engine_does_not_reach_other_processes(engine: Engine) -> None:
    own = {"LOCAL_WORLD_SIZE", "VLLM_WORKER_MULTIPROC_METHOD"}
    assert own <= set(os.environ)
    assert not own & set(environment())
    assert set(environment()) <= set(os.environ)


def test_abort_while_a_load_is_in_flight(engine: Engine, faults: Faults) -> None:
    tokens = prompt(1000, seed=30)
    cold = engine.run(tokens)
    engine.forget()
    with faults(kind="delay", op="get", seconds=0.1):
        for steps in range(6):
            name = engine.add(tokens)
            while not engine.connector.outstanding()["loads"]:
                engine.step()
            for _ in range(steps * 10):
                engine.step()
            held = engine.pool.get_num_free_blocks()
            engine.abort(name)
            assert engine.pool.get_num_free_blocks() == held < engine.pool.num_gpu_blocks - 1, "a load may still write"
            engine.assert_at_rest()
            engine.forget()
    assert engine.run(tokens).near(cold)
    engine.assert_at_rest()


@pytest.mark.parametrize("kind", ["stuck", "deaf", "hang", "raise", "failed", "timed_out", "corrupt", "absent"])
@pytest.mark.parametrize("op", ["exists", "get", "put"])
def test_a_store_that_misbehaves_costs_a_recomputation_at_most(
    engine: Engine, faults: Faults, op: str, kind: str
) -> None:
    tokens = prompt(600, seed=31)
    cold = engine.run(tokens)
    engine.forget()
    fresh = prompt(600, seed=hash((op, kind)) % 1000 + 1000)
    with faults(kind=kind, op=op, seconds=2.0 if kind == "deaf" else 0.0):
        names = [engine.add(tokens), engine.add(fresh)]
        done = engine.finish(names)
        assert done[names[0]].near(cold)
        assert done[names[1]].finish == "length"
        engine.assert_at_rest()
    # With the store well again, what was lost is saved again, and all of it is loaded.
    engine.forget()
    assert engine.run(tokens).near(cold)
    engine.forget()
    healed = engine.run(tokens)
    assert healed.near(cold)
    assert healed.cached == 600 // BLOCK * BLOCK
    engine.assert_at_rest()


@pytest.mark.parametrize(
    ("state", "op"),
    [("waits for the lookup", "exists"), ("loads", "get"), ("computes", ""), ("decodes", ""), ("saves", "put")],
)
def test_abort_in_every_state(engine: Engine, faults: Faults, state: str, op: str) -> None:
    tokens, other = prompt(1000, seed=32), prompt(1500, seed=33)
    cold = engine.run(tokens)
    engine.forget()
    loads = state in ("waits for the lookup", "loads")
    wanted = tokens if loads else prompt(1000, seed=34 + len(state))
    with faults(kind="delay", op=op or "delete", seconds=0.2):
        beside = engine.add(other, output=20)
        name = engine.add(wanted, output=50)
        known = engine.scheduler.requests
        (request,) = (request for key, request in known.items() if key.startswith(name))

        def reached() -> object:
            held, status = engine.connector.outstanding(), request.status.name
            computed = request.num_computed_tokens
            return {
                "waits for the lookup": held["lookups"] > 0,
                "loads": held["loads"] > 0 and status == "WAITING_FOR_REMOTE_KVS",
                "computes": status == "RUNNING" and 0 < computed < len(wanted),
                "decodes": status == "RUNNING" and request.num_output_tokens > 3,
                "saves": held["saves"] > 0 and computed == len(wanted),
            }[state]

        engine.step_until(reached)
        engine.abort(name)
        assert engine.finish([beside])[beside].finish == "length"
        engine.assert_at_rest()
    engine.forget()
    assert engine.run(tokens).near(cold)
    engine.assert_at_rest()


def test_abort_at_every_step(engine: Engine) -> None:
    for steps in range(12):
        tokens = prompt(900, seed=40 + steps)
        name = engine.add(tokens, output=20)
        for _ in range(steps):
            engine.step()
        engine.abort(name)
        engine.assert_at_rest()


def test_a_reused_request_id_is_a_new_request(engine: Engine) -> None:
    for seed in (60, 61, 60, 61):
        tokens = prompt(700, seed=seed)
        name = engine.add(tokens, name="same")
        engine.step()
        engine.abort(name)
        name = engine.add(tokens, name="same")
        assert engine.finish([name])[name].finish == "length"
    engine.assert_at_rest()


def test_reset_while_saves_are_in_flight(engine: Engine) -> None:
    engine.run(prompt(1500, seed=62))
    engine.forget()  # drains, then resets: no pin may be left
    engine.assert_at_rest()


def test_reset_while_a_load_is_in_flight(engine: Engine, faults: Faults) -> None:
    """vLLM cannot reset then, and says so; what is loaded for the old epoch is void, and the request is computed."""
    tokens = prompt(600, seed=63)
    cold = engine.run(tokens)
    engine.forget()
    with faults(kind="delay", op="get", seconds=0.2):
        name = engine.add(tokens)
        while not engine.connector.outstanding()["loads"]:
            engine.step()
        assert not engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.finish([name])[name].near(cold)
    engine.assert_at_rest()
    assert engine.llm.reset_prefix_cache(reset_connector=True)


def test_reset_of_running_requests(engine: Engine) -> None:
    """vLLM throws them out and back in. While a save still reads their blocks it refuses, and nothing is lost."""
    prompts = [prompt(500, seed=64 + i) for i in range(3)]
    expected = []
    for tokens in prompts:
        expected.append(engine.run(tokens, output=8))
        engine.forget()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
    for steps in (1, 2, 4):
        names = [engine.add(tokens, output=8) for tokens in prompts]
        done: dict[str, Output] = {}
        for _ in range(steps):
            done |= engine.step()
        with suppress(RuntimeError):
            engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        done |= engine.finish(set(names) - set(done))
        assert all(done[name].near(wanted) for name, wanted in zip(names, expected, strict=True))
        engine.assert_at_rest()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
