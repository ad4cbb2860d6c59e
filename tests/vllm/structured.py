"""Answers that must fit a grammar, with drafts: ``python -m tests.vllm.structured MODEL [FOLDER]``.

Puts out what an engine answers to each kind of grammar, without FOLDER an engine without a pool. A process of its own
for the same reason as in :mod:`tests.vllm.drafts`, whose drafts these are.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.vllm.drafts import NGRAM, Drafter
from tests.vllm.engine import ENVIRONMENT, Engine, prompt
from tests.vllm.faults import Faults
from tests.vllm.other_process import put_out

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z ]{30,40}$"},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 8},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
PATTERN = "([a-z]{2,5}[0-9]{2} ){8,10}end"
CHOICES = ["the first of these long answers", "the other of these long answers", "none of the long answers"]
#: vLLM's ``StructuredOutputsParams`` for each.
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": PATTERN},
    "choice": {"choice": CHOICES},
}


def answers(engine: Engine, drafter: Drafter, faults: Faults | None, kind: str) -> dict[str, Any]:
    """One prompt again and again, and a follow-up; with each the drafts that were right and wrong."""
    from vllm.sampling_params import StructuredOutputsParams

    question = prompt(1000, seed=list(GRAMMARS).index(kind))

    def run(tokens: list[int], **options: Any) -> dict[str, Any]:
        drafter.begin()
        name = engine.add(tokens, **options)
        done = engine.finish([name])[name]
        engine.drain()
        return dataclasses.asdict(done) | {"accepted": drafter.accepted, "rejected": drafter.rejected}

    def ask() -> dict[str, Any]:
        grammar = StructuredOutputsParams(**GRAMMARS[kind])
        return run(question, output=200, ignore_eos=False, structured_outputs=grammar)

    said = {"cold": ask()}
    answer = said["cold"]["tokens"]
    drafter.learn([*question, *answer])
    said["local"] = ask()
    engine.forget()
    said["loaded"] = ask()
    engine.forget()
    said["follow-up"] = run([*question, *answer, *prompt(20, seed=9)], output=6)
    engine.forget()
    missing = engine.counters["load_missing_chunks"] if faults else 0
    with faults(kind="absent", op="get") if faults else nullcontext():
        said["lost"] = ask()
    assert not faults or engine.counters["load_missing_chunks"] > missing, "no load has failed"
    text: str = engine.llm.get_tokenizer().decode(answer, skip_special_tokens=True)
    return {"kind": kind, "text": text, "said": said}


def main(model: str, folder: str = "") -> None:
    os.environ.update(ENVIRONMENT)
    options: dict[str, Any] = {"prefix_cache_retention_interval": None}  # windows of answers are of use too
    faults = config = None
    if folder:
        faults = Faults(Path(folder, "script.json"))
        config = {"store": faults.url(f"file://{folder}/kv"), "save_decoded": True, "failed_key_ttl_s": 0}
    engine = Engine(Path(model), config, speculative_config=NGRAM, skip_tokenizer_init=False, **options)
    drafter = Drafter()
    engine.core.model_executor.driver_worker.worker.model_runner.drafter.propose = drafter.propose
    for kind in GRAMMARS:
        put_out(answers(engine, drafter, faults, kind))
    engine.assert_at_rest()
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
