"""An engine in a process of its own: ``python -m tests.vllm.other_process MODEL STORE_URL PHASE [TP] [PP]``.

The phase "local" computes a prompt, saves it and prints the output of a second run, served by vLLM's own prefix cache;
"external" prints the output of a first run, served by the store. "both" prints the first, forgets all it holds in its
ranks, and prints the second, which spares a start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.vllm.engine import BLOCK, ENVIRONMENT, PATIENCE, PATIENT, environment, prompt, transfer_config


def run_engine(
    model: Path, store: str, phase: str, multiprocessing: bool, tensor: int = 1, pipeline: int = 1
) -> dict[str, Any]:
    """What an engine in another process printed last: tokens, logprobs, and how many prompt tokens were cached."""
    return run_phases(model, store, phase, multiprocessing, tensor, pipeline)[-1]


def run_phases(
    model: Path, store: str, phase: str, multiprocessing: bool, tensor: int = 1, pipeline: int = 1
) -> list[dict[str, Any]]:
    """All that an engine in another process printed."""
    arguments = str(model), store, phase, str(tensor), str(pipeline)
    return outputs_of("tests.vllm.other_process", *arguments, multiprocessing=multiprocessing, ranks=tensor * pipeline)


def outputs_of(module: str, *arguments: str, multiprocessing: bool, ranks: int) -> list[dict[str, Any]]:
    """What ``python -m module`` handed to :func:`put_out`."""
    variables = environment() | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for a function of ours in the worker's process
    }
    if ranks > 1:
        variables |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_USE_AOT_COMPILE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=variables,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTPUT ")]
    assert lines, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return [json.loads(line.removeprefix("OUTPUT ")) for line in lines]


def put_out(result: dict[str, Any]) -> None:
    """One line for :func:`outputs_of`."""
    print("OUTPUT " + json.dumps(result), flush=True)


def new_engine(model: str, store: str, **options: Any) -> Any:
    """A vLLM engine (``LLM``) with kvpool on this store."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    from vllm import LLM

    return LLM(
        model=model,
        skip_tokenizer_init=True,
        seed=0,
        block_size=BLOCK,
        kv_transfer_config=transfer_config({**PATIENT, "store": store}),
        **options,
    )


def _saves_in_flight(_: Any) -> int:
    """Runs in each worker's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group: Any = get_kv_transfer_group()
    return int(group.worker.outstanding()["saves"])


def _overwrite(_: Any) -> None:
    """Runs in each worker's process: nothing stale can help a load."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group: Any = get_kv_transfer_group()
    for layout in group.worker.layouts:
        for region in layout.regions:
            region.owner.fill_(7.0)


def main(model: str, store: str, phase: str, tensor: str = "1", pipeline: str = "1") -> None:
    from tests.vllm.models import dtype

    llm = new_engine(
        model,
        store,
        enforce_eager=pipeline == "1",  # vLLM cannot run pipeline stages eagerly on CPU
        tensor_parallel_size=int(tensor),
        pipeline_parallel_size=int(pipeline),
        dtype=dtype(Path(model)),
        max_model_len=2048,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=32 << 20,
    )
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1)

    def run(tokens: list[int]) -> Any:
        return llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]

    def drain() -> None:
        end = time.monotonic() + PATIENCE
        while any(llm.collective_rpc(_saves_in_flight)):  # they end in the background; steps take note of it
            assert time.monotonic() < end, "saves do not end"
            time.sleep(0.02)
            run(prompt(20, seed=2))

    def say(done: Any) -> None:
        best = done.outputs[0]
        result = {
            "tokens": list(best.token_ids),
            "logprobs": [max(entry.logprob for entry in step.values()) for step in best.logprobs],
            "cached": done.num_cached_tokens,
        }
        put_out(result)

    tokens = prompt(1000, seed=1)
    if phase in ("local", "both"):
        run(tokens)
        done = run(tokens)
        drain()
        say(done)
    if phase == "both":
        end = time.monotonic() + PATIENCE
        while not llm.reset_prefix_cache():  # a pin is released in a later step
            assert time.monotonic() < end, "pins do not go"
            run(prompt(20, seed=2))
        llm.collective_rpc(_overwrite)
    if phase in ("external", "both"):
        say(run(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
