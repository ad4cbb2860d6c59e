"""A hybrid of Mamba states and full attention (Qwen3-Next-like) reuses both, bit for bit.

vLLM keeps a state only where a chunk of a prefill ends on a block, hands over the exact block of each, and soon drops
it. States and attention pages lie in the same bytes. Loads are asynchronous: vLLM moves a state into the block that the
next step writes before a synchronous load would begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.spec import Kind
from tests.vllm.engine import Engine, prompt
from tests.vllm.faults import Faults, damaged_loads
from tests.vllm.mamba import block, group, start, whole


@pytest.fixture(scope="module", params=[pytest.param("memory", marks=pytest.mark.long), "file"])
def engine(
    request: pytest.FixtureRequest, mamba_model: Path, faults: Faults, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    store = "memory://" if request.param == "memory" else f"file://{tmp_path_factory.mktemp('store')}"
    engine = start(mamba_model, faults.url(store))
    yield engine
    engine.close()


def test_an_external_hit_is_bitwise_equal_to_a_local_hit(engine: Engine) -> None:
    tokens = prompt(1000, seed=1)
    cold = engine.run(tokens)
    engine.drain()
    local = engine.run(tokens)
    engine.forget()
    before = engine.counters
    external = engine.run(tokens)
    assert cold.cached == 0
    assert external.cached == local.cached == whole(engine, 1000) > 0
    assert external.like(local)
    # Every attention block, and of the states only the last.
    chunks = whole(engine, 1000) // block(engine) + 1
    assert engine.counters["loaded_chunks"] - before["loaded_chunks"] == chunks
    engine.assert_at_rest()


def test_states_and_attention_lie_in_the_same_bytes(engine: Engine) -> None:
    """Else the test above would not show that only the owner's part of a shared page is moved."""
    starts = [{r.address for r in layout.regions} for layout in engine.worker.layouts]
    assert set.intersection(*starts)


@pytest.mark.parametrize("kind", [Kind.MAMBA, Kind.FULL])
def test_a_wrong_block_changes_the_output(engine: Engine, kind: Kind) -> None:
    """Negative control: if loaded bytes did not matter, the other tests would prove nothing."""
    tokens = prompt(1000, seed=2)
    engine.run(tokens)
    engine.drain()
    local = engine.run(tokens)
    engine.forget()

    def reverse_the_first(block_ids: Any, rows: Any) -> Any:
        rows[0] = rows[0][::-1]
        return block_ids[:1]

    with damaged_loads(engine.worker.layouts[group(engine, kind)], reverse_the_first) as wrong:
        damaged = engine.run(tokens)
    assert wrong
    assert damaged.cached == local.cached
    assert not damaged.near(local)
    engine.forget()


@pytest.mark.parametrize("lost", [Kind.MAMBA, Kind.FULL])
def test_a_failed_load_is_computed_again(engine: Engine, faults: Faults, lost: Kind) -> None:
    """With several groups vLLM computes all again, exactly as it did when the prompt was new."""
    tokens = prompt(1000, seed=3)
    cold = engine.run(tokens)
    engine.forget()
    before = engine.counters
    with faults(kind="failed", op="get", keys=f"*/{group(engine, lost)}.0/*"):
        again = engine.run(tokens)
    assert again.like(cold)
    failed = engine.counters["load_failed_chunks"] - before["load_failed_chunks"]
    assert failed == (1 if lost is Kind.MAMBA else whole(engine, 1000) // block(engine))
    engine.assert_at_rest()


def test_prompts_that_share_a_beginning(engine: Engine) -> None:
    """A longer prompt goes on from the state where the shorter one would be replayed."""
    size = block(engine)
    shared = prompt(2 * size + 10, seed=4)
    longer = prompt(4 * size, seed=5, start=shared)
    engine.run(shared, salt="local")
    local = engine.run(longer, salt="local")
    engine.run(shared, salt="external")
    engine.forget()
    external = engine.run(longer, salt="external")
    assert external.cached == local.cached == 2 * size
    assert external.like(local)
    engine.assert_at_rest()


def test_chunked_prefill(engine: Engine) -> None:
    """Two prompts that together are more than one step may compute."""
    prompts = [prompt(900, seed=6), prompt(1300, seed=7)]
    names = [engine.add(tokens) for tokens in prompts]
    engine.finish(names)
    engine.drain()
    local = [engine.run(tokens) for tokens in prompts]
    engine.forget()
    names = [engine.add(tokens) for tokens in prompts]
    done = engine.finish(names)
    for name, tokens, expected in zip(names, prompts, local, strict=True):
        assert done[name].cached == expected.cached == whole(engine, len(tokens))
        assert done[name].tokens == expected.tokens
    engine.assert_at_rest()
