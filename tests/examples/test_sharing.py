"""The example engine with kvpool: what is loaded equals what would be computed, and whatever fails is computed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import pytest

from kvpool.hashes import BlockHashes
from tiny_engine.engine import Completion, Engine
from tiny_engine.model import Model, ModelConfig
from tiny_engine.sharing import Sharing

SMALL = ModelConfig(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_size=96, max_tokens=1024)
BLOCK = 16
PROMPT = np.random.default_rng(11).integers(0, SMALL.vocab_size, 333).tolist()
WHOLE = 320  # tokens of PROMPT in whole blocks

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALL)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return tmp_path.as_uri()


@asynccontextmanager
async def new_engine(model: Model, store: str, num_blocks: int = 64) -> AsyncIterator[Engine]:
    """An engine with poisoned memory; on leaving, no block may be held any more."""
    memory = model.new_kv(num_blocks, BLOCK)
    async with Sharing.open(store, model, memory) as sharing:
        engine = Engine(model, memory, sharing=sharing, chunk_tokens=128)
        engine.reset(poison=np.nan)
        with anyio.fail_after(60):
            yield engine
            await sharing.wait_saved()
        assert engine.blocks.num_free == num_blocks


async def alone(model: Model, prompt: Sequence[int], tokens: int) -> Completion:
    return await Engine(model, model.new_kv(64, BLOCK), prefix_cache=False).generate(prompt, tokens)


def same(one: Completion, other: Completion) -> None:
    assert one.tokens == other.tokens
    np.testing.assert_array_equal(one.logits, other.logits)


async def fill(model: Model, store: str, prompt: Sequence[int] = PROMPT, tokens: int = 4) -> Completion:
    """Let one engine compute and save a prompt."""
    async with new_engine(model, store) as engine:
        return await engine.generate(prompt, tokens)


async def test_external_hit_equals_local_hit_and_cold_bitwise(model: Model, store: str) -> None:
    cold = await alone(model, PROMPT, 4)
    same(await fill(model, store), cold)
    async with new_engine(model, store) as engine:
        external = await engine.generate(PROMPT, 4)
        local = await engine.generate(PROMPT, 4)
    assert (external.local_tokens, external.loaded_tokens, external.computed_tokens) == (0, WHOLE, 13)
    assert (local.local_tokens, local.loaded_tokens, local.computed_tokens) == (WHOLE, 0, 13)
    same(external, cold)
    same(local, cold)


async def test_a_chat_goes_on_in_another_engine(model: Model, store: str) -> None:
    """The answer's blocks, computed one token at a time, are shared like the prompt's."""
    first = await fill(model, store, tokens=40)
    turn = [*PROMPT, *first.tokens, *PROMPT[:20]]
    async with new_engine(model, store) as engine:
        second = await engine.generate(turn, 4)
    assert second.loaded_tokens == (333 + 39) // BLOCK * BLOCK
    same(second, await alone(model, turn, 4))


async def test_a_local_prefix_is_not_loaded_again(model: Model, store: str) -> None:
    await fill(model, store)
    async with new_engine(model, store) as engine:
        await engine.generate(PROMPT[:100], 1)
        longer = await engine.generate(PROMPT, 4)
    assert (longer.local_tokens, longer.loaded_tokens) == (96, WHOLE - 96)
    same(longer, await alone(model, PROMPT, 4))


async def test_a_corrupted_block_would_change_the_output(model: Model, store: str) -> None:
    """Without this the equalities above would prove nothing."""
    good = await fill(model, store)
    async with new_engine(model, store) as engine:
        assert engine.sharing
        load = engine.sharing.load

        async def load_and_corrupt(
            hashes: BlockHashes, num_tokens: int, table: Sequence[int], local: int
        ) -> npt.NDArray[np.intp]:
            proven = await load(hashes, num_tokens, table, local)
            engine.memory[0][table[7]] *= -1
            return proven

        engine.sharing.load = load_and_corrupt  # type: ignore[method-assign]
        bad = await engine.generate(PROMPT, 4)
    assert bad.loaded_tokens == WHOLE
    assert np.abs(bad.logits[0] - good.logits[0]).max() > 1e-3 * good.logits[0].std()


def spoil(root: Path, digest: bytes, damage: str) -> None:
    """Damage the one object of a block, or remove it."""
    [path] = root.rglob(f"*{digest.hex()}*")
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "zeros":
        path.write_bytes(bytes(len(data)))
    elif damage == "flipped bit":
        data[-100] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("damage", ["absent", "truncated", "flipped bit", "zeros"])
async def test_a_damaged_object_is_recomputed(model: Model, store: str, tmp_path: Path, damage: str) -> None:
    await fill(model, store)
    async with new_engine(model, store) as engine:
        assert engine.sharing
        pool = engine.sharing.pool
        lookup = pool.lookup

        async def lookup_then_damage(hashes: BlockHashes, *args: Any, **kwargs: Any) -> Any:
            hit = await lookup(hashes, *args, **kwargs)
            spoil(tmp_path, hashes[9], damage)
            return hit

        pool.lookup = lookup_then_damage  # type: ignore[method-assign]
        run = await engine.generate(PROMPT, 4)
        assert (run.loaded_tokens, run.computed_tokens) == (WHOLE - BLOCK, 13 + BLOCK)
        same(run, await alone(model, PROMPT, 4))


async def test_the_store_disappears(model: Model, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    await fill(model, root.as_uri())
    async with new_engine(model, root.as_uri()) as engine:
        shutil.rmtree(root)
        run = await engine.generate(PROMPT, 4)
    assert run.loaded_tokens == 0
    same(run, await alone(model, PROMPT, 4))


async def test_other_weights_never_share(model: Model, store: str) -> None:
    await fill(model, store)
    other = Model(replace(SMALL, seed=1))
    assert (await fill(other, store)).loaded_tokens == 0


async def test_a_load_that_hangs_stops_nobody_else_and_can_be_cancelled(model: Model, store: str) -> None:
    await fill(model, store)
    async with new_engine(model, store) as engine:
        assert engine.sharing
        loading = anyio.Event()

        async def hang(*args: Any, **kwargs: Any) -> Any:
            loading.set()
            await anyio.sleep_forever()

        engine.sharing.pool.store.get_into = hang  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, PROMPT, 4)
            await loading.wait()
            same(await engine.generate(PROMPT[5:100], 4), await alone(model, PROMPT[5:100], 4))
            tasks.cancel_scope.cancel()


async def test_many_requests_and_few_blocks(model: Model, store: str) -> None:
    """Saves hold blocks while others wait for them; all come back, and all answers are right."""
    rng = np.random.default_rng(5)
    prompts = [PROMPT[: int(n)] + rng.integers(0, 256, 9).tolist() for n in rng.integers(1, 320, 16)]
    for _ in range(2):
        async with new_engine(model, store, num_blocks=30) as engine, anyio.create_task_group() as tasks:

            async def run(prompt: list[int], engine: Engine = engine) -> None:
                same(await engine.generate(prompt, 3), await alone(model, prompt, 3))

            for prompt in prompts:
                tasks.start_soon(run, prompt)
