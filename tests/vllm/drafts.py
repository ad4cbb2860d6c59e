"""Speculative decoding by n-grams, whose drafter has no KV: ``python -m tests.vllm.drafts MODEL FOLDER VERSION``.

Reuse is bit for bit, whatever is accepted or rejected. The drafts come from here: what the model is about to say, with
a mistake in every third, so that both are certain. A process of its own, since with what the n-gram proposer imports
vLLM cannot start a second engine beside it.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vllm.engine import BLOCK, ENVIRONMENT, Engine, prompt
from tests.vllm.faults import damaged_loads

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


class Drafter:
    """In place of vLLM's proposer, whose name and arguments it takes."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self.calls = self.accepted = self.rejected = self._proposed = 0

    def learn(self, text: Sequence[int]) -> None:
        self.texts[tuple(text[:50])] = list(text)

    def propose(
        self, count: int, sampled: list[list[int]], lengths: Any, tokens: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """One request at a time: what follows the ``lengths[0]`` tokens of ``tokens[0]``."""
        if not sampled[0]:
            return [[]]
        self.accepted += len(sampled[0]) - 1
        self.rejected += self._proposed - (len(sampled[0]) - 1)
        said = tokens[0, : lengths[0]].tolist()
        drafts = self.texts.get(tuple(said[:50]), [])[len(said) : len(said) + count]
        self.calls += 1
        if drafts and self.calls % 3 == 0:
            drafts[-1] += 1 if drafts[-1] < 999 else -1
        self._proposed = len(drafts)
        return [drafts]


def an_external_hit_is_bitwise_equal_to_a_local_hit(engine: Engine, drafter: Drafter) -> None:
    tokens = prompt(1000, seed=1)
    cold = engine.run(tokens, output=60)
    drafter.learn([*tokens, *cold.tokens])
    engine.drain()
    local = engine.run(tokens, output=60)
    engine.forget()
    accepted, rejected = drafter.accepted, drafter.rejected
    external = engine.run(tokens, output=60)
    assert external.cached == local.cached == 1000 // BLOCK * BLOCK
    assert external.like(local)
    assert external.near(cold)
    assert drafter.accepted - accepted > 30
    assert drafter.rejected - rejected > 3
    engine.assert_at_rest()


def answers_are_stored_as_far_as_their_drafts_were_right(engine: Engine, drafter: Drafter) -> None:
    """A rejected draft leaves wrong KV behind, until the right token is computed over it."""
    question = prompt(990, seed=2)
    cold = engine.run(question, output=80)
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    drafter.learn([*question, *cold.tokens])
    accepted, rejected = drafter.accepted, drafter.rejected
    engine.run(question, output=80)
    assert drafter.accepted > accepted
    assert drafter.rejected > rejected
    follow_up = [*question, *cold.tokens, *prompt(20, seed=3)]
    engine.forget()
    external = engine.run(follow_up)
    engine.drain()
    local = engine.run(follow_up)
    assert external.cached >= 1056
    assert external.like(local)
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert external.near(engine.run(follow_up)), "computed without reuse and without drafts"
    engine.assert_at_rest()


def a_wrong_block_changes_the_output(engine: Engine) -> None:
    """Negative control: if loaded bytes did not matter, the others would prove nothing."""
    tokens = prompt(1000, seed=4)
    engine.run(tokens)
    engine.drain()
    local = engine.run(tokens)
    engine.forget()

    def reverse_one(block_ids: Any, rows: Any) -> Any:
        rows[3] = rows[3][::-1]
        return block_ids[3:4]

    with damaged_loads(engine.worker.layouts[-1], reverse_one) as wrong:
        damaged = engine.run(tokens)
    assert wrong
    assert damaged.cached == local.cached
    assert not damaged.near(local)


def a_session_stores_no_wrong_block(engine: Engine, drafter: Drafter) -> None:
    """A turn that stops among drafts that were right: vLLM keeps their KV for that of the next turn's first tokens."""
    question = prompt(950, seed=5)
    answer = list(engine.run(question, output=40).tokens)
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    drafter.learn([*question, *answer])
    drafter.calls = 0
    core = engine.core

    def say(tokens: Sequence[int], output: int) -> list[int]:
        """The session's next turn; all of its tokens so far."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        made = engine.engine.input_processor.process_inputs(
            "session", {"prompt_token_ids": list(tokens)}, sampling, supported_tasks=("generate",), resumable=True
        )
        core.add_request(*core.preprocess_add_request(made))
        session = core.scheduler.requests["session"]
        wanted = session.num_tokens + output
        while session.num_tokens < wanted:
            _, computed = core.step()
            core.post_step(computed)
        return list(session.all_token_ids)

    assert say(question, 6) == [*question, *answer[:6]]
    behind = core.scheduler.requests["session"]
    assert behind.num_computed_tokens > behind.num_tokens, "the turn did not stop among its drafts"
    text = say(prompt(140, seed=6), 2)
    core.abort_requests(["session"])
    engine.forget()
    assert engine.run(text).cached == 0, "wrong blocks were stored, and found"
    engine.assert_at_rest()


def main(model: str, folder: str, version: str) -> None:
    os.environ.update(ENVIRONMENT)
    faulthandler.dump_traceback_later(270, exit=True)  # tells where it hangs
    import vllm

    assert vllm.__version__ == version, f"vLLM {vllm.__version__} was imported from {vllm.__file__}"
    options: dict[str, Any] = {"prefix_cache_retention_interval": None}  # windows of answers are of use too
    store = {"store": f"file://{folder}", "save_decoded": True}
    engine = Engine(Path(model), store, speculative_config=NGRAM, **options)
    drafter = Drafter()
    engine.core.model_executor.driver_worker.worker.model_runner.drafter.propose = drafter.propose
    an_external_hit_is_bitwise_equal_to_a_local_hit(engine, drafter)
    answers_are_stored_as_far_as_their_drafts_were_right(engine, drafter)
    a_wrong_block_changes_the_output(engine)
    a_session_stores_no_wrong_block(engine, drafter)  # last: the engine stores nothing after it
    engine.close()
    print("PASSED", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
