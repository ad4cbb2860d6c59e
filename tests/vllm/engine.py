"""A real vLLM engine in this process, driven step by step, with everything the tests look at within reach."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

#: Set before vLLM is imported: one process, no network, no compilation.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
#: A request that has not ended after this many seconds hangs.
PATIENCE = 240.0
BLOCK = 32
#: A busy machine must not turn hits into misses.
PATIENT = {"lookup_timeout_ms": 20_000}

_before: list[dict[str, str]] = []  # the environment as it was when the engine in this process was made


def environment() -> dict[str, str]:
    """For another process: without what vLLM has set for an engine in this one, as it could change the other engine."""
    return dict(_before[0] if _before else os.environ)


def transfer_config(
    connector: Mapping[str, Any], *, policy: str = "recompute", role: str = "kv_both"
) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for an engine with kvpool. ``connector``: kvpool's extra config."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": dict(connector),
    }


def prompt(tokens: int, seed: int, start: Sequence[int] = ()) -> list[int]:
    """``tokens`` random token ids that begin with ``start``."""
    source = random.Random(seed)
    return [*start, *(source.randrange(3, 1000) for _ in range(tokens - len(start)))]


@dataclass(frozen=True)
class Output:
    """What a request gave: greedy tokens, their log probabilities, prompt tokens not computed, how it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    finish: str | None

    def like(self, other: Output) -> bool:
        """Bitwise the same tokens and log probabilities."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs

    def near(self, other: Output, tolerance: float = 1e-3) -> bool:
        """The same tokens; log probabilities within fp32 rounding of another order of sums."""
        return self.tokens == other.tokens and all(
            abs(a - b) <= tolerance for a, b in zip(self.logprobs, other.logprobs, strict=True)
        )


class Engine:
    """``connector``: kvpool's extra config, or None for an engine without a connector."""

    def __init__(
        self,
        model: Path,
        connector: Mapping[str, Any] | None = None,
        *,
        policy: str = "recompute",
        role: str = "kv_both",
        kv_bytes: int = 32 << 20,
        **options: Any,
    ) -> None:
        from vllm import LLM

        settings: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "seed": 0,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": kv_bytes,
            "disable_log_stats": True,
        }
        if connector is not None:
            settings["kv_transfer_config"] = transfer_config(PATIENT | dict(connector), policy=policy, role=role)
        _before.append(dict(os.environ))
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        try:
            self.llm = LLM(**(settings | options))
        except BaseException:
            _restore_environment()
            raise
        self.engine: Any = cast(Any, self.llm).llm_engine
        self.core: Any = self.engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self._ids = 0
        self.preemptions = 0
        self.scheduled = 0  #: tokens that the last step computed
        self._watch()

    def _watch(self) -> None:
        preempt, schedule = self.scheduler._preempt_request, self.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.scheduled = output.total_num_scheduled_tokens
            return output

        self.scheduler._preempt_request, self.scheduler.schedule = counted, noted

    # ---- requests

    def add(
        self,
        tokens: Sequence[int],
        *,
        output: int = 6,
        name: str = "",
        salt: str = "",
        stop: Sequence[int] = (),
        **options: Any,
    ) -> str:
        """Queue a greedy request of at most ``output`` tokens, that ends with one of ``stop`` too; returns its id.

        ``options``: of vLLM's ``SamplingParams``.
        """
        from vllm import SamplingParams

        self._ids += 1
        name = name or f"request-{self._ids}"
        settings: dict[str, Any] = {"ignore_eos": True, "detokenize": False, "logprobs": 1}
        sampling = SamplingParams(
            temperature=0, max_tokens=output, stop_token_ids=list(stop) or None, **(settings | options)
        )
        body: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt:
            body["cache_salt"] = salt
        self.engine.add_request(name, body, sampling)
        return name

    def step(self) -> dict[str, Output]:
        """One engine step; the requests that ended in it."""
        return {o.request_id: _output(o) for o in self.engine.step() if o.finished}

    def finish(self, names: Iterable[str]) -> dict[str, Output]:
        """Step until all these requests have ended. Fails if one hangs."""
        waiting, done = set(names), {}
        end = time.monotonic() + PATIENCE
        while waiting:
            assert time.monotonic() < end, f"still not ended: {sorted(waiting)}"
            for name, output in self.step().items():
                done[name] = output
                waiting.discard(name)
        return done

    def run(self, tokens: Sequence[int], *, output: int = 6, salt: str = "") -> Output:
        """One request from start to end."""
        name = self.add(tokens, output=output, salt=salt)
        return self.finish([name])[name]

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def step_until(self, reached: Callable[[], object]) -> dict[str, Output]:
        """Step until ``reached()`` holds; the requests that ended on the way. Fails if it never does."""
        done: dict[str, Output] = {}
        end = time.monotonic() + PATIENCE
        while not reached():
            assert self.scheduler.has_requests(), "the engine came to rest before"
            assert time.monotonic() < end, "the engine never came there"
            done |= self.step()
        return done

    def drain(self) -> None:
        """Step until the engine has nothing left to do, saves included."""
        end = time.monotonic() + PATIENCE
        while self.scheduler.has_requests():
            assert time.monotonic() < end, "the engine does not come to rest"
            self.engine.step()

    # ---- what the tests look at

    @property
    def groups(self) -> int:
        """KV cache groups of the model."""
        return len(self.scheduler.kv_cache_config.kv_cache_groups)

    @property
    def connector(self) -> Any:
        """The scheduler's half."""
        return self.scheduler.connector.scheduler

    @property
    def worker(self) -> Any:
        """The worker's half."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group: Any = get_kv_transfer_group()
        return group.worker

    @property
    def counters(self) -> dict[str, int]:
        """The pool's counters."""
        return dict(self.worker.counters())

    def forget(self) -> None:
        """Empty the engine's own prefix cache and overwrite its KV memory, so that nothing stale can help a load."""
        self.drain()
        assert self.llm.reset_prefix_cache()
        for memory in self.kv():
            memory.fill_(7.0)

    def kv(self) -> list[Any]:
        """The KV tensors of all layers; a Mamba layer has several."""
        context = self.core.vllm_config.compilation_config.static_forward_context
        caches = [layer.kv_cache for layer in context.values() if getattr(layer, "kv_cache", None) is not None]
        return [t for cache in caches for t in (cache if isinstance(cache, (list, tuple)) else [cache])]

    def assert_at_rest(self) -> None:
        """No block held, no state of any request left."""
        self.drain()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1, "blocks leak"
        assert not self.scheduler.requests
        if self.scheduler.connector is not None:
            for half in (self.connector, self.worker):
                left = half.outstanding()
                assert not any(left.values()), f"state left behind in {type(half).__name__}: {left}"

    def close(self) -> None:
        """Stop the engine and let the next one start in this process."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        _restore_environment()


def _restore_environment() -> None:
    """vLLM sets variables that would change engines made later."""
    before = _before.pop()
    os.environ.clear()
    os.environ.update(before)


@contextmanager
def prefix_caching_on() -> Iterator[None]:
    """Engines made meanwhile keep their prefix cache where vLLM, without AMX, switches it off for latents."""
    from vllm.platforms.cpu import CpuPlatform

    settle: Any = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def caching(cls: type, config: Any) -> None:
        settle(cls, config)
        config.cache_config.enable_prefix_caching = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(caching))
        yield


def _output(done: Any) -> Output:
    best = done.outputs[0]
    logprobs = tuple(max(entry.logprob for entry in step.values()) for step in best.logprobs or [])
    return Output(tuple(best.token_ids), logprobs, done.num_cached_tokens or 0, best.finish_reason)
