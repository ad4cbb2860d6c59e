"""Multi-head latent attention (DeepSeek-V3-like) reuses its latents, bit for bit; ranks that hold the same store once.

Without AMX vLLM has only a reference kernel for it on CPU: blocks of 16, and prefix caching off, since its prefill
cannot read what is cached. Its decode can. So prefix caching is switched on here, and prompts are whole blocks and one
token, which is all that is left to compute after a hit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.config import Config
from kvpool.memory import BlockLayout
from kvpool.ranks import Parallel, Rank
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.vllm.worker import WorkerSide
from tests.vllm.engine import Engine, prefix_caching_on, prompt
from tests.vllm.faults import damaged_loads
from tests.vllm.halves import BLOCK
from tests.vllm.worker_half import job, until, work

LENGTH = 16 * 40


@pytest.fixture(scope="module")
def engine(mla_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    store = f"file://{tmp_path_factory.mktemp('store')}"
    with prefix_caching_on():
        engine = Engine(mla_model, {"store": store, "failed_key_ttl_s": 0}, block_size=16, attention_backend="CPU_MLA")
    yield engine
    engine.close()


def test_an_external_hit_is_bitwise_equal_to_a_local_hit(engine: Engine) -> None:
    assert [g.kind for g in engine.connector.spec.groups] == [Kind.MLA]
    tokens = prompt(LENGTH + 1, seed=1)
    engine.run(tokens)
    engine.drain()
    local = engine.run(tokens)
    engine.forget()
    external = engine.run(tokens)
    assert external.cached == local.cached == LENGTH
    assert external.like(local)
    engine.assert_at_rest()


def test_a_wrong_block_changes_the_output(engine: Engine) -> None:
    """Negative control: one block holds what another should. (Places do not matter, positions are part of a latent.)"""
    tokens = prompt(LENGTH + 1, seed=2)
    engine.run(tokens)
    engine.drain()
    local = engine.run(tokens)
    engine.forget()

    def mistake_one(block_ids: Any, rows: Any) -> Any:
        rows[3] = rows[4]
        return block_ids[3:4]

    with damaged_loads(engine.worker.layouts[0], mistake_one) as wrong:
        damaged = engine.run(tokens)
    assert wrong
    assert damaged.cached == local.cached
    assert not damaged.near(local)
    engine.forget()


def test_ranks_that_hold_the_same_store_it_once_and_load_it_all(tmp_path: Path) -> None:
    """Two tensor-parallel ranks: each stores every other latent, each loads all."""
    spec = CacheSpec((CacheGroup(Kind.MLA, BLOCK),), BLOCK, parallel=Parallel(2))
    memory = np.random.default_rng(0).integers(0, 255, (64, 32), np.uint8)
    save, load = job(1, blocks=8), job(2, blocks=8)
    held = save.parts[0].block_ids
    saved, loaded = [], []
    for phase in ("save", "load"):
        for rank in (Rank(0), Rank(1)):
            mine = memory.copy() if phase == "save" else np.zeros_like(memory)
            side = WorkerSide(Config.load({"store": f"file://{tmp_path}"}), spec, None, rank=rank, kv_heads=[1])
            side.start([BlockLayout.of_arrays(mine)], {"form": "latent"})
            try:
                if phase == "save":
                    until(side, lambda r: 1 in r.saved, work(saves=(save,)))
                    saved.append(side.counters()["saved_chunks"])
                else:
                    *_, total = until(side, lambda r: 2 in r.loaded, work(loads=(load,)))
                    assert total.loaded == {2: (1, True)}
                    loaded.append(mine)
            finally:
                side.close()
    assert saved == [4, 4]
    for mine in loaded:
        assert (mine[held] == memory[held]).all()
        assert not np.delete(mine, held, axis=0).any()
