"""Two ranks, one of which loses its store for a while: ``python -m tests.vllm.rank_away MODEL FOLDER``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvpool.backends.file import FileStore
from kvpool.errors import StoreError
from kvpool.registry import URL, parse_url
from kvpool.store import Presence, Results
from tests.vllm.engine import PATIENCE, prompt
from tests.vllm.other_process import new_engine, put_out

RUNS = 4  #: of the same prompt while the store is away


class OneRankAway(FileStore):
    """``OneRankAway?folder=PATH``: while ``PATH/away`` exists, nothing answers on the second tensor-parallel rank."""

    away: Path

    @classmethod
    def from_url(cls, url: URL) -> Self:
        folder = Path(url.params["folder"])
        store = super().from_url(parse_url(f"file://{folder}/kv"))
        store.away = folder / "away"
        return store

    def _check(self) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        if self.away.exists() and get_tp_group().rank_in_group == 1:
            raise StoreError("away on purpose")

    async def exists(self, keys: Sequence[str], **options: Any) -> Presence:
        self._check()
        return await super().exists(keys, **options)

    async def get_into(self, keys: Sequence[str], *args: Any, **options: Any) -> Results:
        self._check()
        return await super().get_into(keys, *args, **options)

    async def put(self, keys: Sequence[str], *args: Any, **options: Any) -> Results:
        self._check()
        return await super().put(keys, *args, **options)


def _counters(_: Any) -> dict[str, int]:
    """Runs in each worker's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group: Any = get_kv_transfer_group()
    return dict(group.worker.counters())


def main(model: str, folder: str) -> None:
    llm = new_engine(
        model,
        f"tests.vllm.rank_away:OneRankAway?folder={folder}",
        enforce_eager=True,
        tensor_parallel_size=2,
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=16 << 20,
    )
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    side, tokens = scheduler.connector.scheduler, prompt(500, seed=1)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    end = time.monotonic() + PATIENCE

    def run() -> dict[str, Any]:
        """The prompt once, without the engine's own cache, until all that it saves has ended."""
        assert llm.reset_prefix_cache()
        done = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]
        while scheduler.has_requests():
            assert time.monotonic() < end, "the engine does not come to rest"
            engine.step()
        ranks = llm.collective_rpc(_counters)
        return {
            "tokens": list(done.outputs[0].token_ids),
            "load_jobs": [rank["load_jobs"] for rank in ranks],
            "loaded": [rank["loaded_chunks"] for rank in ranks],
            "without": side.counters.lookups_without_rank,
            "left": sum(side.outstanding().values()),
        }

    away = Path(folder, "away")
    cold, before = run(), run()
    away.touch()
    while_away = [run() for _ in range(RUNS)]
    away.unlink()
    while (back := run())["loaded"][1] == before["loaded"][1]:
        assert time.monotonic() < end, "the store is back, and nothing is loaded"
        time.sleep(0.1)
    put_out({"cold": cold, "before": before, "away": while_away, "back": back})


if __name__ == "__main__":
    main(*sys.argv[1:])
