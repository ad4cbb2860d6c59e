"""vLLM's real scheduler and kvpool's connector, without a model: blocks hold names instead of numbers.

In place of KV, a slot of a block holds the name of its group and of all tokens up to its position; a Mamba state the
name of the tokens it stands for. Where a model would read a slot, the name that must be there is checked, so a wrong
block, a late copy or a hit that is too long fails at the token that uses it. The next token follows from the name, and
so do drafts, right and wrong ones.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import patch

from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvpool.spec import CacheSpec, Kind
from kvpool.transport import LookupRequest, LookupResult
from kvpool.vllm.messages import Job, StepWork, WorkerReport
from tests.differential.oracle import vllm_spec
from tests.unit.search_reference import attended, drive

__all__ = ["Answer", "Names", "SymbolicEngine"]

VOCAB = 1000
#: What stands in the one slot of a Mamba block.
STATE = -1

#: By slot: the group that wrote it, and the name of the tokens up to there.
Content: TypeAlias = dict[int, tuple[int, int]]


def follow(name: int, token: int) -> int:
    """The name of some tokens and one more."""
    return hash((name, token))


def continued(name: int, count: int) -> list[int]:
    """The tokens that follow."""
    tokens = list[int]()
    for _ in range(count):
        tokens.append(name % VOCAB)
        name = follow(name, tokens[-1])
    return tokens


_folder = tempfile.TemporaryDirectory(prefix="kvpool-tests-")  # kept until this process ends


@functools.cache
def _model() -> Path:
    """A model directory that is looked at for its shape alone."""
    folder = Path(_folder.name)
    shape = dict.fromkeys(("hidden_size", "intermediate_size"), 64)
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCAB}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096, **shape}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    return folder


@functools.cache
@patch.dict(os.environ)  # vLLM sets some variables for the engine that is to come
def _vllm_config(block_size: int, step_tokens: int, drafts: int, save_decoded: bool) -> VllmConfig:
    model = ModelConfig(model=str(_model()), skip_tokenizer_init=True, dtype="float32", max_model_len=2048)
    parallel = ParallelConfig()
    return VllmConfig(
        model_config=model,
        parallel_config=parallel,
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=block_size, mamba_cache_mode="align"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=step_tokens, max_model_len=2048, is_encoder_decoder=False
        ),
        speculative_config=SpeculativeConfig(
            method="eagle",
            model=str(_model()),
            num_speculative_tokens=drafts,
            target_model_config=model,
            target_parallel_config=parallel,
        )
        if drafts
        else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVPoolConnector",
            kv_connector_module_path="kvpool.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"model_fingerprint": "names", "save_decoded": save_decoded},
        ),
    )


class Names:
    """The store: what is kept under group and chunk hash. Never changed once it is there."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, bytes], Content] = {}

    def present(self, groups: Iterable[int], hashes: Sequence[bytes]) -> dict[int, set[int]]:
        return {g: {i for i, digest in enumerate(hashes) if (g, bytes(digest)) in self.values} for g in groups}


class _Client:
    """Answers lookups at once, by kvpool's own search."""

    def __init__(self, spec: CacheSpec, names: Names) -> None:
        self.spec, self.names = spec, names
        self._tickets = itertools.count(1)
        self._answers: list[tuple[int, LookupResult]] = []

    def submit(self, request: LookupRequest, *, timeout: float) -> int:
        present = self.names.present(self.spec.cached_groups, request.hashes)
        count = len(request.hashes)
        local = request.local_tokens
        hit = drive(self.spec, request.num_tokens, present, num_hashes=count, local_tokens=local).hit
        ticket = next(self._tickets)
        self._answers.append((ticket, LookupResult(hit.length, hit.boundaries, request.epoch, 1.0)))
        return ticket

    def poll(self, *, wait: float = 0.0) -> list[tuple[int, LookupResult]]:
        answers, self._answers = self._answers, []
        return answers

    def cancel(self, ticket: int) -> None:
        self._answers = [a for a in self._answers if a[0] != ticket]

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


@dataclass(frozen=True)
class Answer:
    """Where the tokens of a prompt came from that were not computed: vLLM's own prefix cache, the store."""

    local: int
    external: int


@dataclass
class _Sequence:
    """What a worker knows of a request. ``names``: of its tokens and all before, by position."""

    request: Request
    tables: list[list[int]]
    names: list[int] = field(default_factory=list)
    state_block: int = -1  #: index of the block that holds the running Mamba state

    def name(self, position: int, drafts: Sequence[int] = ()) -> int:
        tokens, names = self.request.all_token_ids, self.names
        while len(names) < min(position + 1, len(tokens)):
            names.append(follow(names[-1] if names else 0, tokens[len(names)]))
        if position < len(names):
            return names[position]
        return functools.reduce(follow, drafts[: position + 1 - len(tokens)], names[-1])


class SymbolicEngine:
    """A scheduler of ``spec`` whose connector reads and writes ``names``.

    ``step_tokens``: most tokens a step computes. ``drafts``: tokens that EAGLE proposes, each right or wrong by chance;
    none where there are Mamba states, of which vLLM then keeps several. ``delay``: jobs take up to so many steps.
    ``lossy``: share of loads that fail. ``told``: what the connector takes the engine for, if not ``spec``.
    """

    def __init__(
        self,
        spec: CacheSpec,
        names: Names,
        *,
        blocks: int = 2000,
        step_tokens: int = 64,
        drafts: int = 0,
        delay: int = 2,
        lossy: float = 0.0,
        save_decoded: bool = False,
        seed: int = 0,
        told: CacheSpec | None = None,
    ) -> None:
        init_none_hash(sha256)
        self.spec, self.names = spec, names
        self.drafts, self.delay, self.lossy = drafts, delay, lossy
        self.random = random.Random(seed)
        groups = [KVCacheGroupSpec([f"layer{i}"], vllm_spec(g), g.eagle) for i, g in enumerate(spec.groups)]
        cache = KVCacheConfig(blocks, [], groups, spec.retention_interval, hash_block_size=spec.hash_block_size)
        config = _vllm_config(spec.common_block, step_tokens, drafts, save_decoded)
        config.cache_config.num_gpu_blocks = blocks
        told = told or spec
        client = _Client(told, names)
        with ExitStack() as patches:
            channel = SimpleNamespace(polled_client=lambda: client)
            patches.enter_context(patch("kvpool.vllm.connector.create_transport", lambda _: channel))
            if spec.use_eagle or spec.partial_hits:  # refused so far: it is told, to see what it would do
                patches.enter_context(patch("kvpool.vllm.connector.cache_spec", lambda *_: told))
            self.scheduler: Any = Scheduler(
                config, cache, StructuredOutputManager(config), spec.common_block, spec.hash_block_size
            )
        assert self.scheduler.use_eagle == spec.use_eagle == bool(drafts)
        connector: Any = self.scheduler.connector
        assert connector._spec == told
        self.connector: Any = connector.scheduler
        self.hasher = get_request_block_hasher(spec.hash_block_size, sha256)
        self.memory: list[Content] = [{} for _ in range(blocks)]
        self.sequences: dict[str, _Sequence] = {}
        self.owners: dict[bytes, tuple[_Sequence, int]] = {}  #: block hash -> whose tokens up to which one
        self.jobs: list[tuple[int, bool, Job]] = []  #: steps left, whether it is a load, the job
        self.steps = self.failed_loads = self.preemptions = self.accepted = 0
        self._ids = itertools.count()

    # ---- requests

    def request(self, tokens: Sequence[int], output: int = 1) -> Request:
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        sampling.update_from_generation_config({}, None)
        return Request(f"r{next(self._ids)}", list(tokens), sampling, None, block_hasher=self.hasher)

    def local_hit(self, tokens: Sequence[int]) -> int:
        """How much of a prompt vLLM finds in its own prefix cache."""
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(self.request(tokens))[1])

    def run(self, prompts: Iterable[Sequence[int]], output: int = 1) -> list[Answer]:
        """All these prompts beside each other, until nothing is left to do."""
        requests = [self.request(tokens, output) for tokens in prompts]
        stats = [request.prefill_stats for request in requests]
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.has_requests():
            self.step()
        for request in requests:
            name = functools.reduce(follow, request.prompt_token_ids or [], 0)
            assert list(request.output_token_ids) == continued(name, output)
        return [Answer(s.num_local_cached_tokens, s.num_external_cached_tokens) for s in stats if s]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache and the memory."""
        assert self.scheduler.reset_prefix_cache()
        self.memory = [{} for _ in self.memory]

    def assert_at_rest(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks leak"
        assert not any(self.connector.outstanding().values()), self.connector.outstanding()

    # ---- one step, as a worker does it

    def step(self) -> None:
        self.steps += 1
        assert self.steps < 100_000, "the engine does not come to rest"
        output: SchedulerOutput = self.scheduler.schedule()
        work = output.kv_connector_metadata
        assert isinstance(work, StepWork)
        computed = self._take_tables(output)
        for block in output.new_block_ids_to_zero or ():
            self.memory[block] = {}
        for copy in output.kv_cache_block_copies or ():
            self.memory[copy.dst_block_id] = dict(self.memory[copy.src_block_id])
        sampled, proposed = [], []
        for name, count in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            sampled.append(self._forward(self.sequences[name], computed[name], count, drafts))
            proposed.append(self._propose(self.sequences[name], sampled[-1]))
        names = list(output.num_scheduled_tokens)
        connector = self._transfer(work)
        index = {name: i for i, name in enumerate(names)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(names, index, sampled, kv_connector_output=connector)
        )
        if self.drafts:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, proposed))

    def _take_tables(self, output: SchedulerOutput) -> dict[str, int]:
        """Block tables as a worker keeps them; tokens computed before the step."""
        computed = {}
        for new in output.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            self.sequences[new.req_id] = _Sequence(request, [list(ids) for ids in new.block_ids])
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            sequence, blocks = self.sequences[name], cached.new_block_ids[i]
            computed[name] = cached.num_computed_tokens[i]
            if name in cached.resumed_req_ids:
                self.preemptions += 1
                sequence.tables, sequence.state_block = [list(ids) for ids in blocks or ()], -1
            elif blocks is not None:
                for table, ids in zip(sequence.tables, blocks, strict=True):
                    table.extend(ids)
        return computed

    def _forward(self, sequence: _Sequence, start: int, count: int, drafts: list[int]) -> list[int]:
        """Compute tokens ``start`` to ``start + count``; what is sampled."""
        request = sequence.request
        known = request.num_tokens
        assert start + count <= known + len(drafts)
        for g, group in enumerate(self.spec.groups):
            table, size = sequence.tables[g], group.block_size
            if group.kind is Kind.MAMBA:
                if start:
                    at = sequence.state_block if sequence.state_block >= 0 else (start - 1) // size
                    held = self.memory[table[at]].get(STATE)
                    assert held == (g, sequence.name(start - 1)), f"group {g}: another state than after {start} tokens"
                sequence.state_block = (start + count - 1) // size
                self._write(table[sequence.state_block], {STATE: (g, sequence.name(start + count - 1, drafts))})
                continue
            for position in attended(group, start):
                held = self.memory[table[position // size]].get(position % size)
                assert held == (g, sequence.name(position)), f"group {g}: not the KV of token {position} of {start}"
            for position in range(start, start + count):
                self._write(table[position // size], {position % size: (g, sequence.name(position, drafts))})
        for i, digest in enumerate(request.block_hashes):
            self.owners.setdefault(bytes(digest), (sequence, (i + 1) * self.spec.hash_block_size))
        if start + count < known:
            return []
        tokens = []
        for i in range(start + count - known + 1):
            tokens.append(sequence.name(known - 1 + i, drafts) % VOCAB)
            if i < len(drafts) and drafts[i] != tokens[-1]:
                break
        self.accepted += len(tokens) - 1
        return tokens

    def _write(self, block: int, content: Content) -> None:
        assert block, "KV is written into the null block"
        self.memory[block].update(content)

    def _propose(self, sequence: _Sequence, sampled: list[int]) -> list[int]:
        """Drafts: what really comes next, up to a chance mistake."""
        if not sampled or not self.drafts or any(g.kind is Kind.MAMBA for g in self.spec.groups):
            return []
        name = functools.reduce(follow, sampled, sequence.name(sequence.request.num_tokens - 1))
        return [t if self.random.random() < 0.7 else 0 for t in continued(name, self.drafts)]

    # ---- jobs

    def _transfer(self, work: StepWork) -> KVConnectorOutput:
        """Take on the step's jobs and end those whose time has come: what the worker reports."""
        fresh = [(True, job) for job in work.loads] + [(False, job) for job in work.saves]
        self.jobs += [(self.random.randint(0, self.delay), load, job) for load, job in fresh]
        left, report, received = [], WorkerReport(), set[str]()
        output = KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=report)
        for steps, load, job in self.jobs:
            if steps:
                left.append((steps - 1, load, job))
            elif load:
                ok = self._load(job)
                report.loaded[job.number] = (1, ok)
                received.add(job.request_id)
                if not ok:
                    output.failed_recving.add(job.request_id)
            else:
                self._save(job)
                report.saved[job.number], report.released[job.number] = (1, True), 1
        self.jobs = left
        return output

    def _load(self, job: Job) -> bool:
        if self.random.random() < self.lossy:
            self.failed_loads += 1
            return False
        for part in job.parts:
            for digest, block in zip(part.hashes, part.block_ids.tolist(), strict=True):
                content = self.names.values.get((part.group, bytes(digest)))
                assert content is not None, f"group {part.group}: a hit that is not stored"
                self.memory[block] = dict(content)
        return True

    def _save(self, job: Job) -> None:
        for part in job.parts:
            for digest, block in zip(part.hashes, part.block_ids.tolist(), strict=True):
                self._check(part.group, bytes(digest), self.memory[block])
                self.names.values.setdefault((part.group, bytes(digest)), dict(self.memory[block]))

    def _check(self, g: int, digest: bytes, content: Content) -> None:
        """A stored chunk holds what its name says."""
        sequence, end = self.owners[digest]
        size = self.spec.groups[g].block_size
        if self.spec.groups[g].kind is Kind.MAMBA:
            assert content.get(STATE) == (g, sequence.name(end - 1)), f"group {g}: a state of another place is stored"
            return
        for position in range((end - 1) // size * size, end):
            assert content.get(position % size) == (g, sequence.name(position)), f"group {g}: {position} is not stored"
