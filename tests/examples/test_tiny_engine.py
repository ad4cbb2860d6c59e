"""The example engine by itself: the same bits however a prompt is computed, and no block lost."""

from __future__ import annotations

from dataclasses import replace

import anyio
import numpy as np
import pytest

from kvpool.hashes import chain_hashes
from tiny_engine.blocks import BlockPool
from tiny_engine.engine import Engine
from tiny_engine.model import Model, ModelConfig

SMALL = ModelConfig(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_size=96, max_tokens=1024)
BLOCK = 16
PROMPT = np.random.default_rng(7).integers(0, SMALL.vocab_size, 333).tolist()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALL)


def new_engine(model: Model, num_blocks: int = 64, *, prefix_cache: bool = True, chunk_tokens: int = 128) -> Engine:
    memory = model.new_kv(num_blocks, BLOCK)
    for layer in memory:
        layer.fill(np.nan)  # whatever is read without having been written shows
    return Engine(model, memory, prefix_cache=prefix_cache, chunk_tokens=chunk_tokens)


# ---- the model


@pytest.mark.parametrize("steps", [[333], [64] * 6, [16] * 21, [300] + [1] * 33, [17, 1, 150, 200]])
def test_bits_do_not_depend_on_chunking_or_placement(model: Model, steps: list[int]) -> None:
    def run(steps: list[int], table: list[int]) -> list[np.ndarray]:
        kv = model.new_kv(64, BLOCK)
        for layer in kv:
            layer.fill(np.nan)
        start, logits = 0, np.empty(0, np.float32)
        for step in steps:
            stop = min(start + step, len(PROMPT))
            logits = model.forward(PROMPT, start, stop, table, kv)
            start = stop
        assert start == len(PROMPT)
        return [logits] + [layer[table].swapaxes(1, 2).reshape(-1, 2, 2, 16)[: len(PROMPT)] for layer in kv]

    reference = run([333], list(range(21)))
    shuffled = np.random.default_rng(1).permutation(64)[:21].tolist()
    for one, other in zip(reference, run(steps, shuffled), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("position", [0, 100, 331])
def test_output_depends_on_the_whole_context(model: Model, position: int) -> None:
    changed = list(PROMPT)
    changed[position] ^= 1
    logits = [model.forward(p, 0, len(p), range(21), model.new_kv(21, BLOCK)) for p in (PROMPT, changed)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3 * logits[0].std()


def test_forward_refuses_a_table_that_is_too_short(model: Model) -> None:
    with pytest.raises(ValueError, match="with 3 blocks"):
        model.forward(PROMPT, 0, 100, [0, 1, 2], model.new_kv(8, BLOCK))


def test_fingerprint_tells_weights_apart(model: Model) -> None:
    assert model.fingerprint() == Model(SMALL).fingerprint()
    assert model.fingerprint() != Model(replace(SMALL, seed=1)).fingerprint()


# ---- the block pool


def test_block_pool_evicts_what_was_free_for_longest_and_a_prefix_last() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for block, digest in zip([*first, *second], (b"a", b"b", b"c", b"d"), strict=True):
        pool.publish(block, digest)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == [first[1]]  # the end of the prompt that was released first
    assert pool.match([b"a", b"b"]) == [first[0]]
    assert pool.match([b"c", b"d"]) == second
    assert pool.num_free == 0


def test_block_pool_counts_users_and_refuses_nonsense() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.pin(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    with pytest.raises(MemoryError, match="2 blocks wanted, 1 of 3"):
        pool.allocate(2)
    pool.release(blocks)
    assert pool.num_free == 3
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)


# ---- the engine


@pytest.mark.anyio
async def test_local_hit_equals_cold_bitwise(model: Model) -> None:
    cold = await new_engine(model, prefix_cache=False).generate(PROMPT, 8)
    engine = new_engine(model)
    first = await engine.generate(PROMPT, 8)
    again = await engine.generate(PROMPT, 8)
    longer = [*PROMPT, *first.tokens, 1, 2, 3]
    turn = await engine.generate(longer, 4)
    cold_turn = await new_engine(model, prefix_cache=False).generate(longer, 4)

    assert (first.local_tokens, first.computed_tokens) == (0, 333)
    assert (again.local_tokens, again.computed_tokens) == (320, 13)
    assert turn.local_tokens == 336  # the answer's block included
    assert len(cold.tokens) == 8
    for run in (first, again):
        assert run.tokens == cold.tokens
        np.testing.assert_array_equal(run.logits, cold.logits)
    np.testing.assert_array_equal(turn.logits, cold_turn.logits)
    assert engine.blocks.num_free == 64


@pytest.mark.anyio
async def test_a_corrupted_block_changes_the_output(model: Model) -> None:
    engine = new_engine(model)
    good = await engine.generate(PROMPT, 4)
    blocks = engine.blocks.match(chain_hashes(PROMPT, BLOCK))
    engine.blocks.release(blocks)
    engine.memory[0][blocks[5]] += 1
    bad = await engine.generate(PROMPT, 4)
    assert bad.local_tokens == 320
    assert not np.array_equal(good.logits, bad.logits)
    assert np.abs(good.logits[0] - bad.logits[0]).max() > 0.01 * good.logits[0].std()


@pytest.mark.anyio
async def test_reset_forgets(model: Model) -> None:
    engine = new_engine(model)
    first = await engine.generate(PROMPT, 2)
    engine.reset(poison=np.nan)
    again = await engine.generate(PROMPT, 2)
    assert again.local_tokens == 0
    np.testing.assert_array_equal(again.logits, first.logits)


@pytest.mark.anyio
async def test_many_requests_share_few_blocks(model: Model) -> None:
    """More work than memory: requests wait for each other, none gets another's bits, all blocks come back."""
    rng = np.random.default_rng(3)
    prompts = [PROMPT[: int(n)] + rng.integers(0, 256, 5).tolist() for n in rng.integers(1, 333, 12)]
    alone = [await new_engine(model, prefix_cache=False).generate(p, 3) for p in prompts]
    engine = new_engine(model, num_blocks=25)
    together = [alone[0]] * len(prompts)

    async def run(i: int) -> None:
        together[i] = await engine.generate(prompts[i], 3)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for i in range(len(prompts)):
                tasks.start_soon(run, i)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)
    assert sum(c.local_tokens for c in together) > 0
    assert engine.blocks.num_free == 25


@pytest.mark.anyio
async def test_a_cancelled_request_gives_its_blocks_back(model: Model) -> None:
    engine = new_engine(model, num_blocks=25)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(engine.generate, PROMPT, 50)
        await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    assert engine.blocks.num_free == 25
    assert len((await engine.generate(PROMPT, 2)).tokens) == 2


@pytest.mark.anyio
async def test_a_request_that_never_fits_is_refused(model: Model) -> None:
    with pytest.raises(MemoryError, match="22 blocks are needed, the engine has 8"):
        await new_engine(model, num_blocks=8).generate(PROMPT, 16)
    with pytest.raises(ValueError, match="needs a prompt"):
        await new_engine(model).generate([], 16)
