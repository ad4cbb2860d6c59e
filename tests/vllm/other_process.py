"""An engine in a process of its own: ``python -m tests.vllm.other_process MODEL STORE local|external [TP] [PP]``.

"local" computes a prompt, saves it and prints the output of a second run, served by vLLM's own prefix cache; "external"
prints the output of a first run, served by the store.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from tests.vllm.engine import BLOCK, ENVIRONMENT, PATIENT, prompt


def main(model: str, store: str, phase: str, tensor: str = "1", pipeline: str = "1") -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=pipeline == "1",  # vLLM cannot run pipeline stages eagerly on CPU
        tensor_parallel_size=int(tensor),
        pipeline_parallel_size=int(pipeline),
        dtype="float32",
        seed=0,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        block_size=BLOCK,
        kv_cache_memory_bytes=32 << 20,
        kv_transfer_config={
            "kv_connector": "KVPoolConnector",
            "kv_connector_module_path": "kvpool.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**PATIENT, "store": f"file://{store}"},
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1)

    def run(tokens: list[int]) -> Any:
        return llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]

    tokens = prompt(1000, seed=1)
    done = run(tokens)
    if phase == "local":
        done = run(tokens)
        time.sleep(1.0)  # saves end in the background
        run(prompt(20, seed=2))
    best = done.outputs[0]
    result = {
        "tokens": list(best.token_ids),
        "logprobs": [max(entry.logprob for entry in step.values()) for step in best.logprobs],
        "cached": done.num_cached_tokens,
    }
    print("OUTPUT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
