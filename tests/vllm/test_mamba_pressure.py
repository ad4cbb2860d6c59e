"""Mamba states where block memory is short, and in an engine that starts again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.vllm.messages import Job, StepWork
from tests.vllm.engine import Engine, prompt
from tests.vllm.mamba import block, start, whole


@pytest.fixture
def small(mamba_model: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine with so little block memory that requests are thrown out."""
    engine = start(mamba_model, f"file://{tmp_path}", kv_bytes=3 << 20)
    yield engine
    engine.close()


def test_a_state_is_saved_from_the_block_that_was_handed_over(small: Engine) -> None:
    """However late the save: the request has long dropped the block, but a pin keeps it from every other one."""
    engine, tokens = small, prompt(1000, seed=8)
    late: list[Job] = []
    submit, get_new_blocks = engine.worker.submit, engine.pool.get_new_blocks
    written: set[int] = set()

    def hold(work: StepWork, **options: bool) -> None:
        late.extend(work.saves)
        work.saves.clear()
        submit(work, **options)

    def watched(count: int) -> Any:
        blocks = get_new_blocks(count)
        written.update(b.block_id for b in blocks)
        return blocks

    engine.worker.submit = hold
    engine.run(tokens)
    local = engine.run(tokens)
    del engine.worker.submit
    read = {int(i) for job in late for part in job.parts for i in part.block_ids}
    engine.pool.get_new_blocks = watched
    seeds = iter(range(1000, 1200))
    while written | read < set(range(1, engine.pool.num_gpu_blocks)):
        engine.run(prompt(1000, seed=next(seeds)), output=1)
    del engine.pool.get_new_blocks
    assert not written & read
    submit(StepWork(engine.connector.namespace.digest, engine.connector.epoch, [], late, idle=True))
    engine.forget()
    external = engine.run(tokens)
    assert external.cached == local.cached
    assert external.like(local)
    engine.assert_at_rest()


def test_forced_preemption(small: Engine) -> None:
    """More than the block memory holds: all requests end, and what was stored meanwhile is right."""
    engine = small
    size = block(engine)
    prompts = [prompt(3 * size - 14, seed=70 + i) for i in range(6)]  # decoding takes each into another block
    names = [engine.add(tokens, output=30) for tokens in prompts]
    assert all(output.finish == "length" for output in engine.finish(names).values())
    assert engine.preemptions > 0, "the block memory is too large to force preemption"
    engine.assert_at_rest()
    hits = 0
    for tokens in prompts:
        engine.forget()
        external = engine.run(tokens)
        local = engine.run(tokens)
        assert local.cached == 2 * size
        if external.cached:  # a state that could not be pinned at its step is not stored
            assert external.cached == 2 * size
            assert external.like(local)
            hits += 1
    assert hits
    engine.assert_at_rest()


def test_a_restarted_engine_finds_what_the_first_one_stored(mamba_model: Path, tmp_path: Path) -> None:
    """With dense retention also the states inside of a prompt, where a chunk of its prefill ended."""
    tokens = prompt(1500, seed=9)
    options: dict[str, Any] = {"prefix_cache_retention_interval": None, "max_num_batched_tokens": 640}
    first = start(mamba_model, f"file://{tmp_path}", **options)
    try:
        first.run(tokens)
        first.drain()
        size = block(first)
        beginning = tokens[: 3 * size]
        local, partly = first.run(tokens), first.run(beginning)
        first.drain()
    finally:
        first.close()
    second = start(mamba_model, f"file://{tmp_path}", **options)
    try:
        assert second.run(beginning).like(partly)
        assert partly.cached == 2 * size
        second.forget()
        external = second.run(tokens)
        assert external.cached == local.cached == whole(second, 1500)
        assert external.like(local)
        second.assert_at_rest()
    finally:
        second.close()
