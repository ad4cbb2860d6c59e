"""The block layout of DeepSeek-V4: five groups with blocks of 4 to 256 tokens whose pages lie in the same bytes.

Its kernels need more than this CPU may have, so nothing is computed: a real engine is built, its own scheduler hands
out blocks and the connector's jobs, and the worker's half moves bytes that were put there at random.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.spec import Kind
from kvpool.vllm.messages import StepWork
from tests.vllm.engine import Engine, prefix_caching_on, prompt
from tests.vllm.models import write_deepseek_v4

TOKENS, HIT = 1000, 768


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = write_deepseek_v4(tmp_path_factory.mktemp("models") / "tiny-deepseek-v4")
    store = {"store": f"file://{tmp_path_factory.mktemp('store')}"}
    with prefix_caching_on():
        options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "block_size": 256}
        engine = Engine(model, store, kv_bytes=64 << 20, max_model_len=1024, max_num_batched_tokens=1024, **options)
    yield engine
    engine.close()


def blocks(engine: Engine, group: int, ids: Any) -> Any:
    """The bytes of a group's blocks, uint8[n, block bytes]."""
    layout = engine.worker.layouts[group]
    out = np.empty((len(ids), layout.block_bytes), np.uint8)
    layout.gather(ids, out)
    return out


def scheduled(engine: Engine) -> StepWork:
    """What vLLM's scheduler hands to the worker with its next step."""
    work = engine.scheduler.schedule().kv_connector_metadata
    assert isinstance(work, StepWork)
    return work


def moved(engine: Engine, work: StepWork) -> None:
    """Do the jobs of one step, and let the scheduler's half know. All must go well."""
    engine.worker.submit(work)
    left, end = {job.number for job in (*work.saves, *work.loads)}, time.monotonic() + 60
    while left:
        assert time.monotonic() < end
        engine.worker.collect(StepWork(work.namespace, work.epoch, idle=True))
        if (report := engine.worker.take_report()) is not None:
            engine.connector.take_report(SimpleNamespace(kv_connector_worker_meta=report))
            ended = report.saved | report.loaded
            assert all(ok for _, ok in ended.values())
            left -= ended.keys()


def test_the_layout(engine: Engine) -> None:
    spec, config = engine.connector.spec, engine.scheduler.kv_cache_config
    assert [(g.kind, g.block_size) for g in spec.groups] == [
        (Kind.SLIDING_WINDOW, 64),
        (Kind.SLIDING_WINDOW, 64),
        (Kind.MLA, 256),
        (Kind.SLIDING_WINDOW, 4),
        (Kind.SLIDING_WINDOW, 8),
    ]
    assert (spec.hash_block_size, spec.alignment) == (4, config.cache_hit_alignment_tokens) == (4, 256)
    layouts = engine.worker.layouts
    assert {int(s) for layout in layouts for s in layout.strides} == {93888}
    assert len(set(layouts[2].sizes.tolist())) > 1, "layers of one group have pages of different sizes"
    assert len({layout.regions[0].address for layout in layouts}) == 1, "the groups lie in the same bytes"


def test_saved_looked_up_and_loaded_byte_for_byte(engine: Engine) -> None:
    tokens = prompt(TOKENS, seed=1)
    random = np.random.default_rng(0)
    name = engine.add(tokens, output=1)
    end = time.monotonic() + 60
    while not (work := scheduled(engine)).saves:  # until the lookup has been answered
        assert time.monotonic() < end, "nothing is saved"
    saving = [part for job in work.saves for part in job.parts]
    for part in saving:
        layout = engine.worker.layouts[part.group]
        layout.scatter(part.block_ids, random.integers(0, 256, (len(part.block_ids), layout.block_bytes), np.uint8))
    # Read back when all is written: a block that two groups held would not be what either wrote.
    stored = {
        (part.group, int(chunk)): row.tobytes()
        for part in saving
        for chunk, row in zip(part.chunk_ids, blocks(engine, part.group, part.block_ids), strict=True)
    }
    assert {group for group, _ in stored} == set(range(5))
    moved(engine, work)
    engine.abort(name)

    assert engine.llm.reset_prefix_cache()
    for layout in engine.worker.layouts:
        for region in layout.regions:
            region.array[:] = 7
    engine.add(tokens, output=1)
    end = time.monotonic() + 60
    while not (loads := scheduled(engine)).loads:
        assert time.monotonic() < end, "no hit"
    moved(engine, loads)
    (job,) = loads.loads
    assert [part.group for part in job.parts] == list(range(5))
    for part in job.parts:
        assert (part.chunk_ids[-1] + 1) * engine.connector.spec.groups[part.group].block_size == HIT
        for chunk, row in zip(part.chunk_ids, blocks(engine, part.group, part.block_ids), strict=True):
            assert row.tobytes() == stored[part.group, int(chunk)]
