"""Real engines share their KV cache through a Mooncake cluster, bit for bit. The oracle: tests/vllm/test_reuse.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mooncake.servers import Mooncake
from tests.vllm.engine import BLOCK, Engine, prompt
from tests.vllm.other_process import run_engine

WHOLE = 1000 // BLOCK * BLOCK
TOKENS = prompt(1000, seed=1)  # as the other process has it


@contextmanager
def engine_on(model: Path, store: str) -> Iterator[Engine]:
    engine = Engine(model, {"store": store})
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["model", "hybrid_model"])
def test_a_restarted_engine_reuses_what_an_owner_has_kept(
    kind: str, mooncake: Mooncake, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(kind)
    with engine_on(model, mooncake.url) as engine:
        cold = engine.run(TOKENS)
        engine.drain()
        local = engine.run(TOKENS)
        engine.forget()
        external = engine.run(TOKENS)
        assert (cold.cached, local.cached, external.cached) == (0, WHOLE, WHOLE)
        assert external.like(local)
        assert external.near(cold)
        engine.assert_at_rest()
    with engine_on(model, mooncake.url) as engine:
        again = engine.run(TOKENS)
        assert again.cached == WHOLE
        assert again.like(local)
        assert engine.counters["loaded_chunks"] > 0
        engine.assert_at_rest()


@pytest.mark.parametrize("kind", ["model", "hybrid_model"])
def test_an_engine_whose_blocks_mooncake_reads_and_writes_itself(
    kind: str, mooncake: Mooncake, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Over TCP, and the layers share one allocation, in the hybrid model even bytes; the calls are those of RDMA."""
    model: Path = request.getfixturevalue(kind)
    with engine_on(model, f"{mooncake.url}?zero_copy=yes&prefix=zero-{kind}:") as engine:
        engine.run(TOKENS)
        engine.drain()
        local = engine.run(TOKENS)
        engine.forget()
        external = engine.run(TOKENS)
        assert external.cached == WHOLE
        assert external.like(local)
        engine.assert_at_rest()
    assert "cannot be registered" not in caplog.text


def test_an_engine_in_another_process_shares_while_the_first_one_lives(model: Path, mooncake: Mooncake) -> None:
    with engine_on(model, mooncake.url + "?prefix=two:") as engine:
        engine.run(TOKENS)
        engine.drain()
        local = engine.run(TOKENS)
        other = run_engine(model, mooncake.url + "?prefix=two:", "external", True)
        assert other["cached"] == WHOLE
        assert (tuple(other["tokens"]), tuple(other["logprobs"])) == (local.tokens, local.logprobs)


def test_an_engine_goes_on_without_a_master_and_finds_it_again(model: Path) -> None:
    with Mooncake() as mooncake, engine_on(model, mooncake.url + "?timeout_s=1") as engine:
        cold = engine.run(TOKENS)
        engine.forget()
        mooncake.master.kill()
        lost = engine.run(TOKENS)
        assert lost.cached == 0
        assert lost.like(cold)
        engine.forget()
        mooncake.master.start()
        for seed in range(100, 400):  # each computes, and tries to save
            engine.run(prompt(64, seed), output=1)
            engine.forget()
            if engine.run(prompt(64, seed), output=1).cached:
                break
        else:
            raise AssertionError("the engine never found the master again")
        engine.assert_at_rest()
