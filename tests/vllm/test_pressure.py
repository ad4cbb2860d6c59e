"""Little memory and many requests: the same outputs as an engine without a connector, nothing left at the end."""

from __future__ import annotations

import random
from dataclasses import dataclass
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


def test_aborts_while_preempted(model: Path, tmp_path: Path) -> None:
    """Requests that were thrown out and have not come back yet are aborted; the others are not disturbed."""
    from vllm.v1.request import RequestStatus

    engine = Engine(model, {"store": f"file://{tmp_path}"}, kv_bytes=3 << 20)
    try:
        names = [engine.add(prompt(400, seed=70 + i), output=150) for i in range(6)]
        aborted: set[str] = set()

        def preempted() -> list[str]:
            # vLLM's own ids are the given ones with something random behind.
            found = [r.request_id for r in engine.scheduler.requests.values() if r.status == RequestStatus.PREEMPTED]
            return [name for name in names for id_ in found if id_.startswith(name)]

        done = engine.step_until(preempted)
        for name in preempted():
            engine.abort(name)
            aborted.add(name)
        done |= engine.finish(set(names) - aborted - set(done))
        assert all(output.finish == "length" for output in done.values())
        engine.assert_at_rest()
    finally:
        engine.close()


@dataclass(frozen=True)
class Work:
    """One request: at most ``output`` tokens, or until one of ``stop``; aborted after ``abort`` steps, if at all."""

    tokens: list[int]
    output: int
    stop: list[int]
    abort: int | None


def test_two_hundred_random_requests(model: Path, tmp_path: Path) -> None:
    """Shared prefixes, random stops, random aborts: the same outputs as an engine without a connector."""
    source = random.Random(5)
    shared = [prompt(source.randrange(100, 800), seed=100 + i) for i in range(6)]
    work = []
    for i in range(200):
        start = source.choice(shared)[: source.randrange(1, 800)]
        tokens = prompt(len(start) + source.randrange(1, 200), 200 + i, start)
        stop = source.sample(range(1000), 100) if source.random() < 0.5 else []
        abort = source.randrange(12) if source.random() < 0.2 else None
        work.append(Work(tokens, source.randrange(1, 12), stop, abort))
    alone = Engine(model, None)
    expected = _random(alone, work, seed=1, aborts=False)
    alone.close()
    assert {o.finish for o in expected.values()} == {"length", "stop"}
    engine = Engine(model, {"store": f"file://{tmp_path}"}, kv_bytes=16 << 20)
    try:
        for round_, part in enumerate((work, work[:100])):
            outputs = _random(engine, part, seed=2 + round_, aborts=True)
            assert 0.7 < len(outputs) / len(part) < 1
            for i, output in outputs.items():
                assert output.near(expected[i])
                assert output.finish == expected[i].finish
            engine.assert_at_rest()
            engine.forget()
        assert engine.counters["loaded_chunks"] > 100
    finally:
        engine.close()


def _random(engine: Engine, work: list[Work], seed: int, *, aborts: bool) -> dict[int, Output]:
    """All requests in arrival order, with random pauses of engine steps between arrivals; outputs by index."""
    source = random.Random(seed)
    names: dict[str, int] = {}
    due: dict[str, int] = {}  # steps until a request is aborted
    done: dict[str, Output] = {}

    def step() -> None:
        for name in [name for name, steps in due.items() if steps == 0 or name in done]:
            if due.pop(name) == 0 and name not in done:
                engine.abort(name)
                del names[name]
        done.update(engine.step())
        for name in due:
            due[name] -= 1

    for i, item in enumerate(work):
        name = engine.add(item.tokens, output=item.output, stop=item.stop)
        names[name] = i
        if aborts and item.abort is not None:
            due[name] = item.abort
        for _ in range(source.randrange(4)):
            step()
    while due:
        step()
    done |= engine.finish(set(names) - set(done))
    return {i: done[name] for name, i in names.items()}


def _all(engine: Engine, prompts: list[list[int]], output: int) -> list[Output]:
    names = [engine.add(tokens, output=output) for tokens in prompts]
    done = engine.finish(names)
    return [done[name] for name in names]
