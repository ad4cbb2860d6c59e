"""Little memory and many requests: the same outputs as an engine without a connector, nothing left at the end."""

from __future__ import annotations

import random
from pathlib import Path

from tests.vllm.engine import Engine, Output, prompt


def test_forced_preemption(model: Path, tmp_path: Path) -> None:
    """More decoding than the block memory holds: requests are thrown out, come back, and give what they should."""
    prompts = [prompt(400, seed=70 + i) for i in range(6)]
    small = 3 << 20
    alone = Engine(model, None, kv_bytes=small)
    expected = _all(alone, prompts, 150)
    preemptions = alone.preemptions
    alone.close()
    assert preemptions > 0, "the block memory is too large to force preemption"
    engine = Engine(model, {"store": f"file://{tmp_path}"}, kv_bytes=small)
    try:
        for _ in range(2):
            outputs = _all(engine, prompts, 150)
            assert engine.preemptions > 0
            for output, wanted in zip(outputs, expected, strict=True):
                assert output.tokens[:100] == wanted.tokens[:100]
                assert output.finish == "length"
            engine.assert_at_rest()
            engine.forget()
    finally:
        engine.close()


def test_a_hundred_random_requests(model: Path, tmp_path: Path) -> None:
    source = random.Random(5)
    shared = [prompt(source.randrange(100, 800), seed=100 + i) for i in range(6)]
    work: list[tuple[list[int], int]] = []
    for i in range(100):
        start = source.choice(shared)[: source.randrange(1, 800)]
        work.append((prompt(len(start) + source.randrange(1, 300), 200 + i, start), source.randrange(1, 12)))
    alone = Engine(model, None)
    expected = _random(alone, work, seed=1)
    alone.close()
    engine = Engine(model, {"store": f"file://{tmp_path}"}, kv_bytes=16 << 20)
    try:
        for round_ in range(2):
            outputs = _random(engine, work, seed=2 + round_)
            assert all(o.near(e) for o, e in zip(outputs, expected, strict=True))
            engine.assert_at_rest()
            engine.forget()
        assert engine.counters["loaded_chunks"] > 100
    finally:
        engine.close()


def _random(engine: Engine, work: list[tuple[list[int], int]], seed: int) -> list[Output]:
    """All requests in arrival order, with random pauses of engine steps between arrivals."""
    source = random.Random(seed)
    names: list[str] = []
    done: dict[str, Output] = {}
    for tokens, output in work:
        names.append(engine.add(tokens, output=output))
        for _ in range(source.randrange(4)):
            done |= engine.step()
    done |= engine.finish(set(names) - set(done))
    return [done[name] for name in names]


def _all(engine: Engine, prompts: list[list[int]], output: int) -> list[Output]:
    names = [engine.add(tokens, output=output) for tokens in prompts]
    done = engine.finish(names)
    return [done[name] for name in names]
